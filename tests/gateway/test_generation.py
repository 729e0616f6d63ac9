"""One generation over scripted replicas: its deltas, its moves, its timeouts and its end."""

from __future__ import annotations

import asyncio
import time

import pytest

from contract.errors import Cancelled, DeadlineExceeded, EngineFailed, Unavailable
from contract.generation import FinishReason, TokenDelta, Usage
from gateway.config.policy import OverflowTarget
from gateway.generation import _generated
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.generation_runtime import requests, runtime
from tests.gateway.running import until


async def test_deltas_end_with_usage_and_the_end_is_recorded_once():
    async with FakeReplica() as replica, runtime(replica.url) as here:
        generation = await here.generation(requests()[0])
        deltas = [delta async for delta in generation]
        assert "".join(delta.text for delta in deltas) == " one two one"
        assert deltas[-1].finish_reason is FinishReason.LENGTH and generation.usage.output_tokens == 3
        generation.close()
        generation.close(EngineFailed("ignored"))
        assert generation.error is None and here.idle
        ends = here.metric("trident_gateway_generations_total", end="length", pool="", source="engine")
        assert ends == 1


async def test_a_generation_that_is_closed_early_is_cancelled_at_the_replica():
    async with FakeReplica(lambda seen: Script((" a",) * 9, stall_after=1)) as replica, runtime(replica.url) as here:
        generation = await here.generation(requests()[0])
        assert (await anext(generation)).text == " a"
        generation.close()
        await until(lambda: replica.counts.cancelled == 1)
        assert isinstance(generation.error, Cancelled) and generation.usage.output_tokens == 1 and here.idle


async def test_a_cut_raises_its_error_at_the_reader():
    async with FakeReplica(lambda seen: Script((" a",), stall_after=0)) as replica, runtime(replica.url) as here:
        generation = await here.generation(requests()[0])
        reading = asyncio.ensure_future(anext(generation))
        await until(lambda: replica.counts.running == 1)
        generation.cut(Unavailable("the gateway is stopping"))
        with pytest.raises(Unavailable, match="stopping"):
            await reading
        generation.close(generation.error)
        await until(lambda: replica.counts.running == 0)


@pytest.mark.parametrize(("tokens_before", "moves"), [(0, True), (1, False)])
async def test_a_failed_request_moves_to_a_target_only_before_its_first_token(tokens_before: int, moves: bool):
    broken = Script((" a", " b"), fail_after=tokens_before, error=Unavailable("gone", 1.0))
    async with FakeReplica(lambda seen: broken) as bad, FakeReplica() as spare:
        pools, targets = f"main={bad.url};spare={spare.url}", {"small": OverflowTarget(pool="spare")}
        async with runtime(pools, targets, pool_weights={"main": "1", "spare": "0"}) as here:
            choices = await here.choices(requests())
            generation = choices.generations[0]
            if moves:
                assert [delta.text async for delta in generation][-1] == " one"
                assert generation.target == "small" and here.degraded == {"overflow": 1}
                assert choices.headers["x-trident-degraded"] == "overflow=small"
            else:
                with pytest.raises(Unavailable):
                    _ = [delta async for delta in generation]
                assert generation.target == "" and not here.degraded
            choices.close()
            assert here.idle


async def test_the_call_of_a_silent_replica_that_another_one_continues_is_counted():
    scripts = [Script((" a", " b"), stall_after=1), Script((" a", " b"))]
    async with FakeReplica(lambda seen: scripts.pop(0)) as replica:
        async with runtime(replica.url, idle_timeout_s=5, continuations=1) as here:
            generation = await here.generation(requests()[0])
            assert (await anext(generation)).text == " a"
            reading = asyncio.ensure_future(anext(generation))
            await asyncio.sleep(0)
            generation.check(time.monotonic() + 6)
            assert (await reading).text == " b"
            generation.close()
            assert here.metric("trident_gateway_retries_total") == 1


async def test_a_silent_engine_is_cut_by_the_watchdogs_check():
    script = Script((" a", " b"), stall_after=1)
    async with FakeReplica(lambda seen: script) as replica, runtime(replica.url, idle_timeout_s=5) as here:
        generation = await here.generation(requests()[0])
        assert (await anext(generation)).text == " a"
        reading = asyncio.ensure_future(anext(generation))
        await asyncio.sleep(0)
        generation.check(time.monotonic() + 1)
        assert not reading.done()
        generation.check(time.monotonic() + 6)
        with pytest.raises(DeadlineExceeded, match="silent for 5 s"):
            await reading
        generation.close(generation.error)


@pytest.mark.parametrize("reported", [True, False])
async def test_prefix_cache_hits_are_hidden_where_tenants_share_replicas(reported: bool):
    script = Script((" a",), cached_tokens=2)
    async with FakeReplica(lambda seen: script) as replica:
        async with runtime(replica.url, reports_cached_tokens=reported) as here:
            generation = await here.generation(requests()[0])
            last = [delta async for delta in generation][-1]
            assert last.usage.cached_tokens == (2 if reported else 0)
            generation.close()


@pytest.mark.parametrize(
    ("delta", "tokens"),
    [
        (TokenDelta("an upstream's"), 1),
        (TokenDelta(""), 0),
        (TokenDelta("two", (5, 6)), 2),
        (TokenDelta("prompt and one", (1, 2, 3, 4), prompt_ids=3), 1),
        (TokenDelta("prompt", (1, 2, 3), prompt_ids=3), 0),
        (TokenDelta("prompt and one", (1, 2, 3, 4), (), FinishReason.LENGTH, usage=Usage(3, 1)), 1),
        (TokenDelta("prompt", (1, 2, 3), (), FinishReason.LENGTH, usage=Usage(3, 0)), 0),
        (TokenDelta("the last two", (7, 8), (), FinishReason.STOP, usage=Usage(3, 9)), 2),
    ],
)
def test_an_echoed_prompt_is_not_generated(delta: TokenDelta, tokens: int):
    assert _generated(delta) == tokens
