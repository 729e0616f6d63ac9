"""Streams over true gRPC, from a scripted replica: order, ends, failures, retries, and leaving in every way."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref

import grpc
import pytest
from tritonclient.grpc import service_pb2

from clients import NO_RETRY, AsyncClient, RetryBudget, RetryPolicy, TokenStream
from clients.wire.retries import RetrySchedule
from contract.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidArgument,
    Overloaded,
    TridentError,
    Unavailable,
)
from contract.generation import FinishReason, GenerationRequest, Timings, TokenDelta, Usage
from tests.fakes.replica import FakeReplica, Script

ABC = ("a", "b", "c")
QUICK = RetryPolicy(attempts=4, base_s=0.001, cap_s=0.01)


async def settled(replica: FakeReplica, limit_s: float = 60.0) -> None:
    """Waits until the replica has nothing running."""
    for _ in range(int(limit_s / 0.01)):
        if not replica.counts.running:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{replica.counts.running} requests still run after {limit_s} s")


async def test_tokens_arrive_one_by_one_and_the_last_delta_says_why_it_ended(replica, playlist) -> None:
    playlist.set(Script(ABC, FinishReason.STOP, stop_reason="c"))
    async with AsyncClient(replica.url) as client:
        deltas = [delta async for delta in client.generate("one two", timings=True)]
    assert [delta.text for delta in deltas] == ["a", "b", "c"]
    assert [delta.token_ids for delta in deltas] == [(0,), (1,), (2,)]
    assert [delta.finish_reason for delta in deltas] == [None, None, FinishReason.STOP]
    assert deltas[-1].stop_reason == "c"
    assert deltas[-1].usage == Usage(2, 3)
    assert deltas[-1].timings == Timings(1_000, 2_000, 3_000, 3_002, 1_500, 4_002, 5_002)


@pytest.mark.parametrize("empty_final", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("per_response", [1, 2, 7])
async def test_every_way_a_server_may_end_a_stream_gives_the_same_answer(
    replica, playlist, empty_final, sparse, per_response
) -> None:
    playlist.set(Script(ABC, empty_final=empty_final, sparse=sparse, tokens_per_response=per_response))
    async with AsyncClient(replica.url) as client:
        deltas = [delta async for delta in client.generate("x")]
        assert "".join(delta.text for delta in deltas) == "abc"
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [FinishReason.STOP]
        await settled(replica)
    assert (replica.counts.finished, replica.counts.cancelled) == (1, 0)


async def test_an_answer_without_a_final_response_is_whole_if_it_said_why_it_ended(replica, playlist) -> None:
    playlist.set(Script(ABC, silent_end=True))
    async with AsyncClient(replica.url) as client:
        assert (await client.complete("x")).text == "abc"


async def test_a_whole_completion_comes_in_one_response(replica, playlist) -> None:
    playlist.set(Script(ABC))
    async with AsyncClient(replica.url) as client:
        whole = await client.complete("x", log_probs=True)
    assert (whole.text, whole.token_ids, whole.log_probs) == ("abc", (0, 1, 2), (-0.5, -0.5, -0.5))
    assert (whole.finish_reason, whole.ttft_s) == (FinishReason.STOP, None)
    assert replica.seen[0].value("stream") is False
    assert replica.seen[0].value("return_log_probs") is True


async def leave_by_break(client: AsyncClient) -> None:
    stream = client.generate("x")
    async for _ in stream:
        break
    assert stream.tokens == 1  # the stream itself is still held here, and left all the same


async def leave_by_exception(client: AsyncClient) -> None:
    with pytest.raises(ZeroDivisionError):
        async for _ in client.generate("x"):
            raise ZeroDivisionError


async def leave_by_aclose(client: AsyncClient) -> None:
    stream = client.generate("x")
    await stream.__anext__()
    await stream.aclose()
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await stream.__anext__()


async def leave_by_the_with_block(client: AsyncClient) -> None:
    async with client.generate("x") as stream:
        assert (await stream.__anext__()).text == "a"


async def leave_by_cancelling_the_task(client: AsyncClient) -> None:
    began = asyncio.Event()

    async def read() -> None:
        async for _ in client.generate("x"):
            began.set()

    task = asyncio.create_task(read())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_a_timeout_of_asyncio(client: AsyncClient) -> None:
    stream = client.generate("x")
    await stream.__anext__()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(stream.complete(), 0.05)


async def leave_by_dropping_it(client: AsyncClient) -> None:
    stream = client.generate("x")
    await stream.__anext__()
    del stream


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_break,
        leave_by_exception,
        leave_by_aclose,
        leave_by_the_with_block,
        leave_by_cancelling_the_task,
        leave_by_a_timeout_of_asyncio,
        leave_by_dropping_it,
    ],
)
async def test_leaving_a_stream_cancels_the_servers_work(replica, playlist, leave) -> None:
    playlist.set(Script(tuple("abc" * 1000), gap_s=0.005))
    async with AsyncClient(replica.url) as client:
        await leave(client)
        await settled(replica)
        assert (replica.counts.started, replica.counts.cancelled) == (1, 1)


async def test_leaving_before_the_first_token_cancels_as_well(replica, playlist) -> None:
    playlist.set(Script(ABC, stall_after=0))
    async with AsyncClient(replica.url) as client:
        task = asyncio.create_task(client.generate("x").complete())
        while not replica.counts.running:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settled(replica)
    assert replica.counts.cancelled == 1


async def test_an_attempt_without_a_token_can_be_given_up_for_another(replica, playlist) -> None:
    playlist.set(Script(ABC, stall_after=0), Script(ABC))
    async with AsyncClient(replica.url, retry=QUICK) as client:
        stream = client.generate("x")
        reading = asyncio.ensure_future(stream.complete())
        while not replica.counts.running:
            await asyncio.sleep(0.005)
        stream.abandon(Unavailable("it hangs"))
        assert (await reading).text == "abc" and stream.attempts == 2
    await settled(replica)


async def test_giving_up_is_an_error_where_nothing_may_be_tried_again_and_nothing_once_a_token_came(
    replica, playlist
) -> None:
    playlist.set(Script(ABC, stall_after=0), Script(ABC, stall_after=1))
    async with AsyncClient(replica.url, retry=NO_RETRY) as client:
        stream = client.generate("x")
        reading = asyncio.ensure_future(stream.complete())
        while not replica.counts.running:
            await asyncio.sleep(0.005)
        stream.abandon(Unavailable("it hangs"))
        with pytest.raises(Unavailable, match="it hangs"):
            await reading
        async with client.generate("x") as begun:
            await begun.__anext__()
            begun.abandon(Unavailable("too late"))
            assert replica.counts.running == 1 and begun.attempts == 1
    await settled(replica)


async def test_a_reader_learns_that_another_task_closed_its_stream(replica, playlist) -> None:
    playlist.set(Script(ABC, stall_after=1))
    async with AsyncClient(replica.url) as client:
        stream = client.generate("x", request_id="mine")
        task = asyncio.create_task(stream.complete())
        while not stream.tokens:
            await asyncio.sleep(0.01)
        await stream.aclose()
        with pytest.raises(Cancelled, match="request mine was closed while it was being read"):
            await task


class LateMessage:
    """A call, its attempt and its route: a message arrives although the call was cancelled before it was read."""

    url = "late:1"

    def __init__(self, data: bytes) -> None:
        self.call, self._data, self.cancelled = self, data, asyncio.Event()

    async def open(self, request, remaining_s) -> LateMessage:
        return self

    def __aiter__(self) -> LateMessage:
        return self

    async def __anext__(self) -> bytes:
        await self.cancelled.wait()
        return self._data

    def cancel(self) -> None:
        self.cancelled.set()

    def began(self) -> None:
        raise AssertionError("it was released")

    def release(self, error, response) -> None:
        """Nothing was reserved."""


async def test_a_first_message_that_arrived_when_the_stream_was_closed_is_handed_out() -> None:
    """A gateway that stood still closes a silent stream while its first message waits to be read."""
    message = service_pb2.ModelStreamInferResponse()
    message.infer_response.outputs.add(name="text_output", datatype="BYTES", shape=[1, 1])
    message.infer_response.raw_output_contents.append(len(b"a").to_bytes(4, "little") + b"a")
    request = GenerationRequest(text_input="p", timeout_s=5.0)
    late = LateMessage(message.SerializeToString())
    stream = TokenStream(late, request, RetrySchedule(NO_RETRY, RetryBudget(), random.Random(1)))
    reading = asyncio.create_task(stream.__anext__())
    await asyncio.sleep(0)
    stream.cancel()
    assert (await reading).text == "a"
    with pytest.raises(StopAsyncIteration):
        await stream.__anext__()


@pytest.mark.parametrize("tokens_before", [0, 1])
async def test_a_reader_learns_that_its_client_was_closed(replica, playlist, tokens_before: int) -> None:
    playlist.set(Script(ABC, stall_after=tokens_before))
    client = AsyncClient(replica.url)
    stream = client.generate("x", request_id="mine")
    task = asyncio.create_task(stream.complete())
    while not (replica.counts.running and stream.tokens == tokens_before):
        await asyncio.sleep(0.01)
    await client.close()
    with pytest.raises(Cancelled, match="request mine was closed while it was being read"):
        await task
    assert (stream.attempts, replica.counts.started) == (1, 1)


async def test_a_reader_that_waits_to_try_again_learns_that_its_stream_was_closed(replica, playlist) -> None:
    playlist.set(Script(refuse=Overloaded("full")))
    async with AsyncClient(replica.url, retry=RetryPolicy(2, 3600.0, 3600.0), rng=random.Random(1)) as client:
        stream = client.generate("x", timeout_s=86_400)
        task = asyncio.create_task(stream.complete())
        while not (replica.counts.started and not replica.counts.running):
            await asyncio.sleep(0.01)
        stream.cancel()
        with pytest.raises(Cancelled, match="was closed"):
            await asyncio.wait_for(task, 60)


async def test_a_stream_that_was_not_sent_outlives_its_clients_close(replica) -> None:
    client = AsyncClient(replica.url)
    stream = client.generate("one two", max_tokens=2)
    await client.close()
    assert (await stream.complete()).text == " one two"
    await client.close()


async def test_the_first_delta_may_be_taken_alone(replica, playlist) -> None:
    playlist.set(Script(ABC, stall_after=2))
    async with AsyncClient(replica.url) as client:
        assert (await anext(aiter(client.generate("x")))).text == "a"
        await settled(replica)
    assert replica.counts.cancelled == 1


async def test_a_stream_that_was_read_to_its_end_is_never_cancelled(replica, playlist) -> None:
    playlist.set(Script(ABC, empty_final=True))
    async with AsyncClient(replica.url) as client:
        for _ in range(20):
            async for _ in client.generate("x"):
                pass
        await settled(replica)
    assert (replica.counts.finished, replica.counts.cancelled) == (20, 0)


async def test_a_deadline_ends_the_stream_and_the_servers_work(replica, playlist) -> None:
    playlist.set(Script(ABC, stall_after=2))
    async with AsyncClient(replica.url) as client:
        for timeout_s in (0.3, 3.0, 30.0):  # until two tokens come in time, however slow the machine
            texts = []
            with pytest.raises(DeadlineExceeded) as passed:
                async for delta in client.generate("x", timeout_s=timeout_s):
                    texts.append(delta.text)
            said = f"after {len(texts)} tokens" if texts else "before the first token"
            assert f"the deadline of {timeout_s:g} s passed {said}" in str(passed.value)
            if texts == ["a", "b"]:
                break
        assert texts == ["a", "b"]
        assert 0 < replica.seen[-1].deadline_s <= timeout_s + 0.1  # gRPC rounds up
        assert 0 < replica.seen[-1].parameters["timeout"] <= timeout_s * 1e6
        with pytest.raises(DeadlineExceeded, match="the deadline of 0.2 s passed before the first token"):
            playlist.set(Script(ABC, stall_after=0))
            await client.complete("x", timeout_s=0.2)
        await settled(replica)
    assert replica.counts.cancelled == replica.counts.started


async def test_every_request_has_a_deadline(replica) -> None:
    async with AsyncClient(replica.url) as client:
        await client.complete("x", max_tokens=1)
    assert 590 < replica.seen[0].deadline_s <= 601


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        (Script(refuse=InvalidArgument("max_tokens", "got 0")), InvalidArgument, "max_tokens: got 0"),
        (Script(refuse="in ensemble 'ensemble', engine boom"), EngineFailed, "engine boom"),
        (Script(fail_after=0, error=EngineFailed("the step broke")), EngineFailed, "the step broke"),
        (Script(status_after=0, status=(grpc.StatusCode.INTERNAL, "bad", ())), EngineFailed, "bad"),
    ],
)
async def test_a_failure_that_would_fail_again_is_raised_at_once(replica, playlist, script, kind, message) -> None:
    playlist.set(script)
    async with AsyncClient(replica.url, retry=QUICK) as client:
        with pytest.raises(kind, match=message):
            await client.complete("x")
    assert len(replica.seen) == 1


@pytest.mark.parametrize(
    "script",
    [
        Script(refuse=Overloaded("full")),
        Script(ABC, fail_after=2, error=EngineFailed("late")),
        Script(ABC, status_after=2),
    ],
)
async def test_a_failed_stream_is_freed_at_once(replica, playlist, script) -> None:
    playlist.set(script)
    async with AsyncClient(replica.url, retry=NO_RETRY) as client:
        stream = client.generate("x")
        freed = weakref.ref(stream)
        gc.disable()
        try:
            with pytest.raises(TridentError):
                await stream.complete()
            del stream
            assert freed() is None
        finally:
            gc.enable()


@pytest.mark.parametrize(
    "script",
    [
        Script(refuse=Overloaded("the queue is full")),
        Script(refuse="Exceeds maximum queue size"),
        Script(fail_after=0, error=Overloaded("the queue is full")),
        Script(ABC, status_after=0),
        Script(ABC, status_after=0, status=(grpc.StatusCode.CANCELLED, "", ())),  # a server that stops
        Script(silent_end=True),
    ],
)
async def test_a_failure_before_the_first_token_is_tried_again(replica, playlist, script) -> None:
    playlist.set(script, script, Script(ABC))
    async with AsyncClient(replica.url, retry=QUICK) as client:
        stream = client.generate("x")
        assert (await stream.complete()).text == "abc"
    assert (stream.attempts, len(replica.seen)) == (3, 3)
    assert len({seen.id for seen in replica.seen}) == 1
    assert len({seen.metadata["traceparent"] for seen in replica.seen}) == 1


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (Script(ABC, fail_after=2, error=Overloaded("full")), Overloaded),
        (Script(ABC, status_after=2), Unavailable),
    ],
)
async def test_a_failure_after_the_first_token_is_never_tried_again(replica, playlist, script, kind) -> None:
    playlist.set(script, Script(ABC))
    texts = []
    async with AsyncClient(replica.url, retry=QUICK) as client:
        with pytest.raises(kind):
            async for delta in client.generate("x"):
                texts.append(delta.text)
    assert texts == ["a", "b"]
    assert len(replica.seen) == 1


async def test_text_that_comes_with_an_error_is_handed_out_before_it(replica, playlist) -> None:
    """A server may put the last text and the failure in one response."""
    import tests.fakes.replica as fake

    playlist.set(Script(ABC, fail_after=2, error=EngineFailed("late"), tokens_per_response=2))
    original = fake.content

    def with_text(request_id, model, sent, texts, reason, *rest):
        return original(request_id, model, sent, ("tail",) if reason is FinishReason.ERROR else texts, reason, *rest)

    fake.content = with_text
    try:
        async with AsyncClient(replica.url) as client:
            texts = []
            with pytest.raises(EngineFailed, match="late"):
                async for delta in client.generate("x"):
                    texts.append((delta.text, delta.finish_reason))
    finally:
        fake.content = original
    assert texts == [("ab", None), ("tail", None)]


async def test_the_servers_wish_to_be_left_alone_is_honoured(replica, playlist) -> None:
    refusal = (grpc.StatusCode.UNAVAILABLE, "draining", (("grpc-retry-pushback-ms", "-1"),))
    playlist.set(Script(status_after=0, tokens=ABC, status=refusal), Script(ABC))
    async with AsyncClient(replica.url, retry=QUICK) as client:
        with pytest.raises(Unavailable, match="draining"):
            await client.complete("x")
    assert len(replica.seen) == 1


async def test_the_servers_hint_sets_the_wait_and_is_shown_when_it_is_too_long(replica, playlist) -> None:
    hinted = (grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("retry-after-ms", "600000"),))
    playlist.set(Script(status_after=0, tokens=ABC, status=hinted), Script(ABC))
    async with AsyncClient(replica.url, retry=QUICK) as client:
        with pytest.raises(Overloaded) as caught:
            await client.complete("x", timeout_s=60)
        assert caught.value.retry_after_s == 600.0
        playlist.set(
            Script(status_after=0, tokens=ABC, status=(hinted[0], "full", (("retry-after-ms", "20"),))), Script(ABC)
        )
        assert (await client.complete("x", timeout_s=60)).text == "abc"


async def test_a_server_that_is_not_there_is_named(unused_tcp_port) -> None:
    async with AsyncClient(f"127.0.0.1:{unused_tcp_port}", retry=NO_RETRY) as client:
        with pytest.raises(Unavailable, match=f"cannot reach 127.0.0.1:{unused_tcp_port}: .*refused"):
            await client.complete("x")


async def test_a_server_that_dies_mid_stream_raises_unavailable(playlist) -> None:
    playlist.set(Script(ABC, stall_after=2))
    replica = await FakeReplica(playlist).start()
    async with AsyncClient(replica.url, retry=QUICK) as client:
        texts = []
        with pytest.raises(TridentError) as caught:
            async for delta in client.generate("x", timeout_s=60):
                texts.append(delta.text)
                if len(texts) == 2:
                    await replica.stop()
        assert isinstance(caught.value, Unavailable | Cancelled)
    assert texts == ["a", "b"]


async def test_a_stopped_request_ends_with_what_it_had(replica, playlist) -> None:
    playlist.set(Script(tuple("abc" * 1000), gap_s=0.005))
    async with AsyncClient(replica.url) as client:
        stream = client.generate("x", request_id="to-stop")
        deltas: list[TokenDelta] = []
        async for delta in stream:
            deltas.append(delta)
            if len(deltas) == 3:
                await client.stop("to-stop")
        assert deltas[-1].finish_reason is FinishReason.CANCELLED
        await client.stop("unknown")
    assert replica.counts.stopped_ids == ["to-stop", "unknown"]


async def test_many_streams_share_one_client(replica) -> None:
    async with AsyncClient(replica.url) as client:
        answers = await asyncio.gather(*(client.complete(f"w{n}", max_tokens=5, stream=True) for n in range(100)))
    assert [answer.text for answer in answers] == [f" w{n}" * 5 for n in range(100)]
    assert len({seen.id for seen in replica.seen}) == 100


async def test_a_stream_that_was_closed_between_two_deltas_is_no_completion(replica, playlist) -> None:
    playlist.set(Script(ABC, gap_s=0.01))
    async with AsyncClient(replica.url) as client:
        stream = client.generate("x")
        await anext(stream)
        stream.cancel()
        with pytest.raises(Cancelled, match="was closed while it was being read"):
            await stream.complete()


def raw_stream(client: AsyncClient) -> TokenStream:
    stream = client.generate("x")
    return TokenStream(
        stream._route, stream.request, RetrySchedule(NO_RETRY, RetryBudget(), random.Random(1)), raw=True
    )


async def test_a_relay_gets_the_bytes_of_every_message_and_none_behind_the_end(replica, playlist) -> None:
    playlist.set(Script(ABC, empty_final=True, sparse=True))
    async with AsyncClient(replica.url) as client:
        stream = raw_stream(client)
        read = [(delta.text, service_pb2.ModelStreamInferResponse.FromString(stream.message)) async for delta in stream]
    assert [text for text, _ in read] == ["a", "b", "c"] and stream.finished
    assert all(len(message.infer_response.raw_output_contents) for _, message in read)


@pytest.mark.parametrize(
    ("script", "carries"),
    [
        (Script(refuse=Overloaded("full")), True),
        (Script(fail_after=0, error=EngineFailed("boom")), True),
        (Script(status_after=0, status=(grpc.StatusCode.INTERNAL, "bad", ())), False),
    ],
)
async def test_a_relay_gets_the_bytes_of_a_message_that_carried_the_error(replica, playlist, script, carries) -> None:
    playlist.set(script)
    async with AsyncClient(replica.url) as client:
        stream = raw_stream(client)
        with pytest.raises(TridentError):
            await stream.__anext__()
        assert bool(stream.message) is carries
