"""What of a prompt a replica has cached, and where conversations go because of it."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.replica_set.picks import ReplicaLoad, RoutingRequest
from contract.generation import GenerationRequest
from gateway.routing.prefix_cache import BLOCK_BYTES, MOST_BLOCKS, PrefixCache, blocks
from gateway.routing.scoring import Candidate, Explanation, Router
from tests.fakes.replica import FakeReplica, Script, SeenRequest
from tests.gateway.running import gateway, until


def request(text: str, **more: object) -> GenerationRequest:
    return GenerationRequest(text_input=text, **more)


@given(st.text(max_size=900), st.text(max_size=900), st.text(max_size=900))
def test_two_prompts_share_the_blocks_of_their_common_beginning(common: str, one: str, other: str) -> None:
    first, second = blocks(request(common + one)), blocks(request(common + other))
    shared = len(common.encode(errors="replace")) // BLOCK_BYTES
    assert first[:shared] == second[:shared]
    cache = PrefixCache()
    cache.sent(first)
    assert cache.fraction(first) == (1.0 if first else 0.0)
    if second:
        assert shared / len(second) <= cache.fraction(second) <= 1.0


def test_a_chat_is_hashed_whole_and_adapters_share_nothing() -> None:
    turns = [{"role": "user", "content": "x" * 1000}, {"role": "assistant", "content": "y" * 1000}]
    longer = [*turns, {"role": "user", "content": "z" * 1000}]
    first, second = blocks(GenerationRequest(messages=turns)), blocks(GenerationRequest(messages=longer))
    assert second[: len(first)] == first and len(second) > len(first) + 2
    assert not set(blocks(request("x" * 2000, adapter="sql"))) & set(blocks(request("x" * 2000)))
    assert len(blocks(request("x" * 1_000_000))) == MOST_BLOCKS


@given(st.lists(st.integers(0, 300), max_size=60), st.floats(0, 1))
def test_a_cache_stays_bounded_whatever_is_reported(prompts: list[int], fraction: float) -> None:
    cache = PrefixCache()
    for number in prompts:
        prompt = blocks(request(f"{number:08}" * 4000))
        cache.reported(cache.fraction(prompt), fraction)
        cache.sent(prompt)
        assert len(cache._blocks) <= cache._most <= 65_536


def test_a_replica_that_reports_no_hits_is_believed_to_keep_less() -> None:
    cache, prompt = PrefixCache(), blocks(request("a" * 65_536))
    cache.sent(prompt)
    for _ in range(20):
        cache.reported(1.0, 0.0)
    cache.sent(prompt)
    assert cache.fraction(prompt) == 64 / 256  # the beginning is kept


def test_the_longest_cached_prompt_wins_below_the_bound_and_the_explanation_says_so() -> None:
    loads = [ReplicaLoad("a", healthy=True), ReplicaLoad("b", healthy=True), ReplicaLoad("c", healthy=True)]
    routing = RoutingRequest(prefix="p" * 300, cached={"a": 0.2, "b": 0.9})
    explanation = Explanation()
    rng = random.Random(1)
    assert Router().choose([Candidate(load) for load in loads], routing, rng, explanation).name == "b"
    assert [explanation.scores[name]["affinity"] for name in "abc"] == [0.0, 1.0, 0.0]
    little = RoutingRequest(prefix="p" * 300, cached={"a": 0.2})
    idle = [ReplicaLoad("a", healthy=True, outstanding=1, pending_tokens=9), *loads[1:]]
    assert Router().choose([Candidate(load) for load in idle], little, rng).name != "a"  # not worth it
    busy = [loads[0], ReplicaLoad("b", healthy=True, outstanding=9, max_running=8), loads[2]]
    assert Router().choose([Candidate(load) for load in busy], routing, rng).name != "b"


async def test_each_turn_of_a_conversation_goes_where_its_earlier_turns_are() -> None:
    gate = asyncio.Event()

    def script(seen: SeenRequest) -> Script:
        return Script((" ok",), gate=gate)

    async with contextlib.AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(FakeReplica(script, slots=8)) for _ in range(3)]
        running = await stack.enter_async_context(gateway(*replicas, slow_start_s=0.0))
        await until(lambda: len(running.service.replicas.ready()) == 3)
        system = {"role": "system", "content": "common to all " * 100}
        chats = [[system, {"role": "user", "content": f"{number} " * 400}] for number in range(9)]

        async def turn(messages: list[dict]) -> None:
            body = {"model": "demo", "messages": messages, "max_tokens": 2, "temperature": 1.0}
            status, _, answer = await running.post("/v1/chat/completions", body)
            assert status == 200, answer
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "go on " * 50}]

        def homes() -> list[set[int]]:
            """The replicas that have seen each chat, by its first message."""
            return [
                {place for place, replica in enumerate(replicas) for seen in replica.seen if f'"{number} ' in str(seen)}
                for number in range(9)
            ]

        first = [asyncio.ensure_future(turn(messages)) for messages in chats]  # together, so that they spread
        await until(lambda: sum(len(replica.seen) for replica in replicas) == 9)
        gate.set()
        await asyncio.gather(*first)
        await until(lambda: not any(one.metrics.running for one in running.service.replicas.all()))
        before = homes()
        assert len(set.union(*before)) > 1
        for messages in chats * 2:
            await turn(messages)
        assert homes() == before and all(len(places) == 1 for places in before)


@pytest.mark.parametrize(("usage", "refused"), [(0.5, False), (0.97, True)])
async def test_a_full_kv_cache_is_pressure(usage: float, refused: bool) -> None:
    config = "[degradation]\nshorter_at = 0.9\noverflow_at = 0.9\nrefuse_at = 0.95\n"
    async with FakeReplica(kv_usage=usage, slots=4) as replica, gateway(replica, config=config) as running:
        await until(lambda: running.service.replicas.all()[0].metrics.kv_usage == usage)
        status, _, answer = await running.post("/v1/completions", {"model": "demo", "prompt": "a", "max_tokens": 2})
        assert status == (429 if refused else 200), answer


async def test_every_engine_has_a_cost_model_of_its_own() -> None:
    async with (
        FakeReplica(engine="a" * 8) as one,
        FakeReplica(engine="a" * 8) as two,
        FakeReplica(engine="b" * 8) as other,
        gateway(one, two, other) as running,
    ):
        replicas = running.service.replicas
        await until(lambda: all(replica.metrics.engine for replica in replicas.all()) and len(replicas.all()) == 3)
        models = {replica.url: replicas.costs_of(replica) for replica in replicas.all()}
        assert models[one.url] is models[two.url] is not models[other.url]
