"""The balanced client over several scripted replicas."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from clients import BalancedClient, RetryPolicy
from clients.replica_set import picks
from clients.replica_set.replica import HealthPolicy
from contract.errors import Cancelled, DeadlineExceeded, EngineFailed, InvalidArgument, Overloaded, Unavailable
from contract.generation import FinishReason
from tests.fakes.replica import FakeReplica, Script, SeenRequest, echo

ABC = ("a", "b", "c")
BRISK = HealthPolicy(interval_s=0.05, timeout_s=30.0)
QUICK = RetryPolicy(attempts=4, base_s=0.001, cap_s=0.01)


@contextlib.asynccontextmanager
async def fleet(count: int, script=echo) -> AsyncIterator[list[FakeReplica]]:
    """So many replicas, all with the same script."""
    replicas = [await FakeReplica(script).start() for _ in range(count)]
    try:
        yield replicas
    finally:
        for replica in replicas:
            await replica.stop()


def urls(replicas: list[FakeReplica]) -> list[str]:
    return [replica.url for replica in replicas]


async def until(condition, limit_s: float = 60.0) -> None:
    for _ in range(int(limit_s / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("what was waited for did not happen")


def health(client: BalancedClient) -> dict[str, bool]:
    return {load.name: load.healthy for load in client.loads()}


async def test_requests_are_spread_and_what_was_booked_is_settled() -> None:
    async with fleet(3) as replicas, BalancedClient(urls(replicas), pick="token_aware") as client:
        answers = await asyncio.gather(*(client.complete(f"w{n}", max_tokens=4) for n in range(90)))
        assert [answer.text for answer in answers] == [f" w{n}" * 4 for n in range(90)]
        assert all(replica.counts.started > 15 for replica in replicas)
        assert [(load.outstanding, load.pending_tokens) for load in client.loads()] == [(0, 0)] * 3


async def test_bookings_are_there_while_requests_run_and_the_prompts_share_goes_with_the_first_token() -> None:
    def held(seen: SeenRequest) -> Script:
        return Script(ABC, stall_after=int(seen.value("text_input")[0]))

    async with fleet(1, held) as replicas, BalancedClient(urls(replicas)) as client:
        waiting = asyncio.create_task(client.generate("0" * 400, max_tokens=50).complete())
        await until(lambda: replicas[0].counts.running == 1)
        assert (client.loads()[0].outstanding, client.loads()[0].pending_tokens) == (1, 60)  # 100 prompt tokens at 0.1
        async with client.generate("1" * 400, max_tokens=30) as begun:
            await begun.__anext__()
            assert (client.loads()[0].outstanding, client.loads()[0].pending_tokens) == (2, 60 + 30)
        assert (client.loads()[0].outstanding, client.loads()[0].pending_tokens) == (1, 60)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert (client.loads()[0].outstanding, client.loads()[0].pending_tokens) == (0, 0)


async def test_a_failure_before_the_first_token_goes_to_another_replica() -> None:
    async with fleet(1, lambda _: Script(refuse=Overloaded("full"))) as full, fleet(1) as free:
        async with BalancedClient(urls(full + free), pick="round_robin", retry=QUICK) as client:
            for n in range(10):
                assert (await client.complete(f"w{n}", max_tokens=1)).text == f" w{n}"
    assert full[0].counts.started == 5
    assert len({seen.id for seen in full[0].seen} & {seen.id for seen in free[0].seen}) == 5


async def test_a_failure_after_the_first_token_stays_with_the_caller() -> None:
    broken = Script(ABC, status_after=2)
    async with fleet(2, lambda _: broken) as replicas, BalancedClient(urls(replicas), retry=QUICK) as client:
        texts = []
        with pytest.raises(Unavailable):
            async for delta in client.generate("x"):
                texts.append(delta.text)
        assert texts == ["a", "b"]
        assert sum(replica.counts.started for replica in replicas) == 1


async def test_an_error_that_would_be_the_same_anywhere_is_not_carried_around() -> None:
    refusal = Script(refuse=InvalidArgument("max_tokens", "got 0"))
    async with fleet(3, lambda _: refusal) as replicas, BalancedClient(urls(replicas)) as client:
        with pytest.raises(InvalidArgument, match="max_tokens: got 0"):
            await client.complete("x")
        assert sum(replica.counts.started for replica in replicas) == 1


async def test_every_replica_is_tried_before_one_is_tried_twice() -> None:
    async with fleet(3, lambda _: Script(refuse=Overloaded("full"))) as replicas:
        async with BalancedClient(urls(replicas), retry=QUICK) as client:
            with pytest.raises(Overloaded):
                await client.complete("x")
        assert sorted(replica.counts.started for replica in replicas) == [1, 1, 2]


async def test_a_replica_that_dies_is_left_out_and_taken_back_when_it_returns() -> None:
    async with fleet(2) as replicas, BalancedClient(urls(replicas), health=BRISK, retry=QUICK) as client:
        await client.found()
        await replicas[0].stop()
        answers = await asyncio.gather(*(client.complete(f"w{n}", max_tokens=2) for n in range(40)))
        assert [answer.text for answer in answers] == [f" w{n}" * 2 for n in range(40)]
        await until(lambda: health(client) == {replicas[0].url: False, replicas[1].url: True})
        port = int(replicas[0].url.rpartition(":")[2])
        async with await FakeReplica().start(port=port) as returned:
            await until(lambda: all(health(client).values()))
            await asyncio.gather(*(client.complete("x", max_tokens=2) for _ in range(40)))
            assert returned.counts.started > 5


async def test_a_replica_that_is_not_ready_is_left_out_after_three_probes_and_back_after_two() -> None:
    async with fleet(2) as replicas, BalancedClient(urls(replicas), health=BRISK) as client:
        await client.found()
        replicas[0].ready = False
        before = replicas[0].counts.health_checks
        await until(lambda: not health(client)[replicas[0].url])
        assert replicas[0].counts.health_checks - before >= 3
        replicas[0].ready = True
        before = replicas[0].counts.health_checks
        await until(lambda: health(client)[replicas[0].url])
        assert replicas[0].counts.health_checks - before >= 2


async def test_a_replica_that_is_still_loading_gets_nothing() -> None:
    async with fleet(2) as replicas:
        replicas[1].ready = False
        async with BalancedClient(urls(replicas)) as client:
            await asyncio.gather(*(client.complete("x", max_tokens=1) for _ in range(10)))
        assert [replica.counts.started for replica in replicas] == [10, 0]


@pytest.mark.slow
async def test_replicas_come_and_go_with_the_file_and_streams_outlive_a_departure(tmp_path) -> None:
    slow = Script(tuple("abcdefgh"), gap_s=0.05)
    path = tmp_path / "replicas"
    async with fleet(2, lambda _: slow) as replicas:
        path.write_text(replicas[0].url + "\n")
        async with BalancedClient(f"file://{path}", refresh_s=0.05) as client:
            running = asyncio.create_task(client.generate("x").complete())
            await until(lambda: replicas[0].counts.running == 1)
            path.write_text(replicas[1].url + "\n")
            await until(lambda: [load.name for load in client.loads()] == [replicas[1].url])
            assert (await client.generate("y").complete()).text == "abcdefgh"
            assert (await running).text == "abcdefgh"
            path.write_text("not a replica list, port: x\n")
            await asyncio.sleep(0.2)
            assert [load.name for load in client.loads()] == [replicas[1].url]
        assert [replica.counts.cancelled for replica in replicas] == [0, 0]


async def test_closing_does_not_wait_for_a_stream_at_a_replica_that_was_let_go(tmp_path) -> None:
    path = tmp_path / "replicas"
    async with fleet(2, lambda _: Script(ABC, stall_after=1)) as replicas:
        path.write_text(replicas[0].url + "\n")
        client = BalancedClient(f"file://{path}", refresh_s=0.05)
        stream = client.generate("x")
        assert (await anext(stream)).text == "a"
        path.write_text(replicas[1].url + "\n")
        await until(lambda: [load.name for load in client.loads()] == [replicas[1].url])
        await asyncio.wait_for(client.close(), 60)
        with pytest.raises(Cancelled):
            await stream.complete()


async def test_a_reader_learns_that_its_client_was_closed() -> None:
    async with fleet(1, lambda _: Script(ABC, stall_after=1)) as replicas:
        client = BalancedClient(urls(replicas))
        stream = client.generate("x")
        task = asyncio.create_task(stream.complete())
        await until(lambda: stream.tokens == 1)
        await client.close()
        with pytest.raises(Cancelled, match="was closed while it was being read"):
            await task


async def test_sessions_stay_together() -> None:
    async with fleet(4) as replicas, BalancedClient(urls(replicas), pick="session_affinity") as client:
        for turn in range(5):
            for session in ("ann", "bob", "cyd"):
                await client.complete(f"{session} {turn}", max_tokens=1, session=session)
        homes = {}
        for replica in replicas:
            for seen in replica.seen:
                homes.setdefault(seen.value("text_input").split()[0], set()).add(replica.url)
        assert {session: len(home) for session, home in homes.items()} == {"ann": 1, "bob": 1, "cyd": 1}


async def test_chats_with_one_beginning_stay_together() -> None:
    async with fleet(4) as replicas, BalancedClient(urls(replicas), pick=picks.prefix_affinity) as client:
        chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
        for _ in range(5):
            answer = await client.complete(messages=chat, max_tokens=1)
            chat += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "go on"}]
        assert sorted(replica.counts.started for replica in replicas) == [0, 0, 0, 5]


async def test_the_weight_of_prompts_is_learned_from_the_engines_own_timings() -> None:
    async with fleet(1) as replicas, BalancedClient(urls(replicas)) as client:
        assert client.costs.prefill_weight == 0.1
        await client.generate("one two three", max_tokens=20).complete()
        # The fake's engine takes 1 µs for the prompt's 3 tokens and 1 ns for each of the answer's.
        assert client.costs.prefill_weight == pytest.approx((1000 / 3) / (20 / 19), rel=0.1)
        assert replicas[0].seen[0].value("return_perf_metrics") is True


async def test_a_request_is_stopped_wherever_it_runs(unused_tcp_port) -> None:
    async with fleet(2, lambda _: Script(tuple("abc" * 1000), gap_s=0.005)) as replicas:
        where = [*urls(replicas), f"127.0.0.1:{unused_tcp_port}"]
        async with BalancedClient(where, health=HealthPolicy(timeout_s=30.0)) as client:
            deltas = []
            async for delta in client.generate("x", request_id="mine"):
                deltas.append(delta)
                if len(deltas) == 3:
                    await client.stop("mine")
            assert deltas[-1].finish_reason is FinishReason.CANCELLED
    async with BalancedClient(f"127.0.0.1:{unused_tcp_port}", health=HealthPolicy(timeout_s=30.0)) as client:
        with pytest.raises(Unavailable, match="cannot reach"):
            await client.stop("mine")


async def test_no_replica_at_all_is_said_at_once(tmp_path) -> None:
    async with BalancedClient(f"file://{tmp_path}/none", retry=QUICK) as client:
        with pytest.raises(Unavailable, match="cannot read the replicas"):
            await client.complete("x")
        (tmp_path / "none").write_text("")
        with pytest.raises(Unavailable, match="names no replica"):
            await client.complete("x")


async def test_a_deadline_that_passes_while_replicas_are_discovered_is_said() -> None:
    class Silent:
        async def replicas(self) -> tuple[str, ...]:
            await asyncio.Event().wait()
            return ()

    async with BalancedClient(Silent()) as client:
        with pytest.raises(DeadlineExceeded, match="the deadline passed before a replica was found"):
            await client.complete("x", timeout_s=0.05)


async def test_a_reader_learns_that_its_client_was_closed_while_replicas_were_discovered() -> None:
    asked = asyncio.Event()

    class Silent:
        async def replicas(self) -> tuple[str, ...]:
            asked.set()
            await asyncio.Event().wait()
            return ()

    client = BalancedClient(Silent())
    reader = asyncio.create_task(client.complete("x"))
    await asked.wait()
    await client.close()
    with pytest.raises(Cancelled, match="was closed before it was sent"):
        await reader


@pytest.mark.parametrize("refresh_s", [0, -1.0, float("nan")])
def test_a_time_between_discoveries_that_is_none_is_refused(refresh_s: float) -> None:
    with pytest.raises(InvalidArgument, match=f"refresh_s: must be more than 0, or None, got {refresh_s}"):
        BalancedClient("a:1", refresh_s=refresh_s)


async def test_an_engine_that_fails_is_not_called_unhealthy_for_it() -> None:
    async with (
        fleet(1, lambda _: Script(refuse=EngineFailed("boom"))) as replicas,
        BalancedClient(urls(replicas)) as client,
    ):
        for _ in range(5):
            with pytest.raises(EngineFailed):
                await client.complete("x")
        assert all(health(client).values())


def test_an_unknown_pick_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidArgument, match="pick: must be one of round_robin, least_outstanding.*, got 'best'"):
        BalancedClient("a:1", pick="best")
