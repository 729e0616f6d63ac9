"""The blocking client over true gRPC, against a replica in another thread."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import grpc
import pytest

from clients import NO_RETRY, Client, RetryPolicy
from contract.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidArgument,
    NotFound,
    Overloaded,
    Unavailable,
)
from contract.generation import FinishReason, GenerationRequest
from tests.fakes.replica import FakeReplica, Script

ABC = ("a", "b", "c")
QUICK = RetryPolicy(attempts=4, base_s=0.001, cap_s=0.01)


def settled(replica: FakeReplica, limit_s: float = 60.0) -> None:
    for _ in range(int(limit_s / 0.01)):
        if not replica.counts.running:
            return
        time.sleep(0.01)
    raise AssertionError(f"{replica.counts.running} requests still run after {limit_s} s")


@pytest.mark.parametrize("empty_final", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_tokens_arrive_one_by_one_to_the_end(threaded_replica, playlist, empty_final, sparse) -> None:
    playlist.set(Script(ABC, empty_final=empty_final, sparse=sparse))
    with Client(threaded_replica.url) as client:
        deltas = list(client.generate("x"))
        settled(threaded_replica)
    assert [delta.text for delta in deltas] == ["a", "b", "c"]
    assert [delta.finish_reason for delta in deltas] == [None, None, FinishReason.STOP]
    assert (threaded_replica.counts.finished, threaded_replica.counts.cancelled) == (1, 0)


def test_a_whole_completion_comes_in_one_response(threaded_replica, playlist) -> None:
    playlist.set(Script(ABC))
    with Client(threaded_replica.url, api_key="k") as client:
        whole = client.complete("x", timings=True)
    assert (whole.text, whole.finish_reason, whole.timings.arrival_ns) == ("abc", FinishReason.STOP, 1_000)
    assert threaded_replica.seen[0].metadata["authorization"] == "Bearer k"
    assert threaded_replica.seen[0].value("stream") is False


def leave_by_break(client: Client) -> None:
    stream = client.generate("x")
    for _ in stream:
        break
    assert stream.tokens == 1


def leave_by_exception(client: Client) -> None:
    with pytest.raises(ZeroDivisionError):
        for _ in client.generate("x"):
            raise ZeroDivisionError


def leave_by_cancel(client: Client) -> None:
    stream = client.generate("x")
    next(stream)
    stream.cancel()
    stream.cancel()
    with pytest.raises(StopIteration):
        next(stream)
    with pytest.raises(Cancelled, match="was closed while it was being read"):
        stream.complete()


def leave_by_the_with_block(client: Client) -> None:
    with client.generate("x") as stream:
        assert next(stream).text == "a"


def once(happened: Callable[[], object], act: Callable[[], None]) -> None:
    """``act`` from another thread, when that has happened."""

    def wait() -> None:
        while not happened():
            time.sleep(0.01)
        act()

    threading.Thread(target=wait).start()


def leave_from_another_thread(client: Client) -> None:
    stream = client.generate("x", request_id="mine")
    once(lambda: stream.tokens, stream.cancel)
    with pytest.raises(Cancelled, match="request mine was closed while it was being read"):
        stream.complete()


@pytest.mark.parametrize(
    "leave",
    [leave_by_break, leave_by_exception, leave_by_cancel, leave_by_the_with_block, leave_from_another_thread],
)
def test_leaving_a_stream_cancels_the_servers_work(threaded_replica, playlist, leave) -> None:
    playlist.set(Script(tuple("abc" * 1000), gap_s=0.005))
    with Client(threaded_replica.url) as client:
        leave(client)
        settled(threaded_replica)
        assert (threaded_replica.counts.started, threaded_replica.counts.cancelled) == (1, 1)


@pytest.mark.parametrize("tokens_before", [0, 1])
def test_a_reader_learns_that_its_client_was_closed(threaded_replica, playlist, tokens_before: int) -> None:
    playlist.set(Script(("a", "b", "c"), stall_after=tokens_before))
    client = Client(threaded_replica.url)
    stream = client.generate("x", request_id="mine")
    once(lambda: threaded_replica.counts.running and stream.tokens == tokens_before, client.close)
    with pytest.raises(Cancelled, match="request mine was closed while it was being read"):
        stream.complete()
    assert (stream.attempts, threaded_replica.counts.started) == (1, 1)


def test_a_reader_that_waits_to_try_again_learns_that_its_stream_was_closed(unused_tcp_port) -> None:
    with Client(f"127.0.0.1:{unused_tcp_port}", retry=RetryPolicy(2, 3600.0, 3600.0), rng=random.Random(1)) as client:
        stream = client.generate("x", timeout_s=86_400)
        once(lambda: stream.attempts, stream.cancel)
        with pytest.raises(Cancelled, match="was closed"):
            stream.complete()


def test_a_deadline_ends_the_stream_and_the_servers_work(threaded_replica, playlist) -> None:
    playlist.set(Script(ABC, stall_after=2))
    with Client(threaded_replica.url) as client:
        for timeout_s in (0.3, 3.0, 30.0):  # until two tokens come in time, however slow the machine
            with pytest.raises(DeadlineExceeded, match=f"the deadline of {timeout_s:g} s passed ") as passed:
                client.generate("x", timeout_s=timeout_s).complete()
            settled(threaded_replica)
            if "after 2 tokens" in str(passed.value):
                break
        else:
            pytest.fail(str(passed.value))
    assert threaded_replica.counts.cancelled == threaded_replica.counts.started


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (Script(refuse=InvalidArgument("max_tokens", "got 0")), InvalidArgument),
        (Script(fail_after=0, error=EngineFailed("boom")), EngineFailed),
        (Script(ABC, fail_after=2, error=Overloaded("full")), Overloaded),
        (Script(ABC, status_after=2), Unavailable),
        (Script(ABC, status_after=2, status=(grpc.StatusCode.CANCELLED, "", ())), Unavailable),
    ],
)
def test_what_cannot_be_tried_again_is_raised_at_once(threaded_replica, playlist, script, kind) -> None:
    playlist.set(script)
    with Client(threaded_replica.url, retry=QUICK) as client, pytest.raises(kind):
        client.generate("x").complete()
    assert len(threaded_replica.seen) == 1


@pytest.mark.parametrize(
    "script", [Script(refuse=Overloaded("full")), Script(ABC, status_after=0), Script(silent_end=True)]
)
def test_a_failure_before_the_first_token_is_tried_again(threaded_replica, playlist, script) -> None:
    playlist.set(script, script, Script(ABC))
    with Client(threaded_replica.url, retry=QUICK) as client:
        stream = client.generate("x")
        assert stream.complete().text == "abc"
    assert (stream.attempts, len(threaded_replica.seen)) == (3, 3)


def test_no_retry_means_one_attempt(threaded_replica, playlist) -> None:
    playlist.set(Script(status_after=0, tokens=ABC, status=(grpc.StatusCode.UNAVAILABLE, "x", ())), Script(ABC))
    with Client(threaded_replica.url, retry=NO_RETRY) as client, pytest.raises(Unavailable):
        client.complete("x")
    assert len(threaded_replica.seen) == 1


def test_a_stopped_request_ends_with_what_it_had(threaded_replica, playlist) -> None:
    playlist.set(Script(tuple("abc" * 1000), gap_s=0.005))
    with Client(threaded_replica.url) as client:
        stream = client.generate("x", request_id="to-stop")
        next(stream)
        client.stop("to-stop")
        assert stream.complete().finish_reason is FinishReason.CANCELLED


def test_threads_share_one_client(threaded_replica) -> None:
    texts: dict[int, str] = {}
    with Client(threaded_replica.url) as client:

        def ask(n: int) -> None:
            texts[n] = client.generate(f"w{n}", max_tokens=5).complete().text

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == {n: f" w{n}" * 5 for n in range(16)}


@pytest.mark.parametrize(
    "use", [Client.health, lambda client: client.stop("x"), lambda client: client.generate("x").complete()]
)
def test_a_channel_that_another_thread_closes_before_the_call_is_told(threaded_replica, use) -> None:
    with Client(threaded_replica.url) as client:
        client.health()
        client._channel.close()
        with pytest.raises(Cancelled, match="the client was closed"):
            use(client)
        client.close()
        use(client)


def test_requests_beside_close_succeed_or_are_cancelled(threaded_replica) -> None:
    ended = threading.Event()
    wrong: list[Exception] = []

    def repeat(use: Callable[[], object]) -> None:
        while not ended.is_set():
            try:
                use()
            except Cancelled:
                pass
            except Exception as error:
                wrong.append(error)

    with Client(threaded_replica.url, retry=NO_RETRY) as client:
        uses = [lambda: client.complete("x", max_tokens=2), client.health, lambda: client.stop("x")]
        threads = [threading.Thread(target=repeat, args=(use,)) for use in uses * 2]
        for thread in threads:
            thread.start()
        for _ in range(25):
            time.sleep(0.005)
            client.close()
        ended.set()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert client.complete("x", max_tokens=2).text == " x x"


def test_status_questions_are_answered(threaded_replica) -> None:
    with Client(threaded_replica.url) as client:
        assert client.health().ok
        assert [model.name for model in client.models()] == ["ensemble", "engine"]
        assert client.model_ready("engine")
    with Client(threaded_replica.url, model="nosuch") as client, pytest.raises(NotFound):
        client.complete("x")


def test_a_server_that_is_not_there_is_named(unused_tcp_port) -> None:
    with Client(f"127.0.0.1:{unused_tcp_port}", retry=NO_RETRY) as client:
        with pytest.raises(Unavailable, match=f"cannot reach 127.0.0.1:{unused_tcp_port}"):
            client.complete("x")
        with pytest.raises(Unavailable, match="cannot reach"):
            client.health()


def test_text_that_utf8_cannot_hold_is_refused_by_name(threaded_replica) -> None:
    with Client(threaded_replica.url) as client:
        with pytest.raises(InvalidArgument, match="prompt: must be .* UTF-8, got a lone surrogate at index 1"):
            client.generate("x\ud800")
        stream = client.open(GenerationRequest("x\ud800"))
        with pytest.raises(InvalidArgument, match="text_input: must be .* UTF-8, got a lone surrogate at index 1"):
            stream.complete()
        with pytest.raises(StopIteration):
            next(stream)


def test_streams_take_the_packed_ensemble_while_the_server_has_it(threaded_replica) -> None:
    threaded_replica.packed = True
    with Client(threaded_replica.url, retry=NO_RETRY) as client:
        while "ensemble_packed" not in {seen.model for seen in threaded_replica.seen}:
            assert client.generate("p q", max_tokens=2).complete().text == " p q"
        assert threaded_replica.counts.health_checks == 1
        client.complete("x", max_tokens=1)
        assert threaded_replica.seen[-1].model == "ensemble"
        threaded_replica.packed, started = False, threaded_replica.counts.started
        threaded_replica.seen.clear()
        assert [client.generate("p q", max_tokens=2).complete().text for _ in range(2)] == [" p q"] * 2
        assert [seen.model for seen in threaded_replica.seen] == ["ensemble_packed", "ensemble", "ensemble"]
        assert threaded_replica.counts.started == started + 2
    with Client(threaded_replica.url, model="ensemble_packed") as client, pytest.raises(NotFound):
        client.generate("x", max_tokens=1).complete()


def test_a_client_that_was_closed_before_it_asked_for_the_packed_ensemble_stays_closed(
    threaded_replica, monkeypatch
) -> None:
    closed, asked, ask = threading.Event(), threading.Event(), Client._ask

    def late(client: Client, *arguments: object) -> None:
        assert closed.wait(30)
        ask(client, *arguments)
        asked.set()

    monkeypatch.setattr(Client, "_ask", late)
    with Client(threaded_replica.url) as client:
        client.generate("x", max_tokens=1).complete()
    closed.set()
    assert asked.wait(30) and client._channel is None
