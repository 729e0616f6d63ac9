"""Copies that no caller waits for: compared where they can be, bounded, and never noticed by the caller."""

from __future__ import annotations

import asyncio
import random

from contract.generation import GenerationRequest
from gateway.config.policy import ShadowRules
from gateway.routing.shadow import Shadow
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.api.test_kserve import ours
from tests.gateway.running import gateway, until

REQUEST = {"model": "demo", "prompt": "one two", "max_tokens": 4, "temperature": 0}
CONFIG = '[shadow]\npool = "next"\nfraction = 1.0\nmax_running = 2\n'


def pools(usual: FakeReplica, shadow: FakeReplica) -> dict:
    return {"replicas": f"usual={usual.url};next={shadow.url}", "pool_weights": {"usual": "1"}, "config": CONFIG}


def test_a_request_of_the_pool_for_copies_is_not_copied_to_it():
    shadow = Shadow(None, random.Random(), lambda *_: None, lambda *_: None)
    shadow.rules = {None: ShadowRules(pool="next", fraction=1.0)}
    assert [shadow.begin(GenerationRequest("x"), pool) is not None for pool in ("usual", "next")] == [True, False]


async def counted(running, result: str, count: int) -> None:
    sample = running.service.metrics.shadow.labels(result)
    await until(lambda: sample._value.get() == count)


async def test_texts_of_deterministic_requests_are_compared_and_others_are_only_sent():
    async with FakeReplica() as usual, FakeReplica() as shadow:
        async with gateway(usual, shadow, **pools(usual, shadow)) as running:
            await running.post("/v1/completions", REQUEST)
            await counted(running, "agree", 1)
            async with ours(running) as client:
                await client.generate("three four", max_tokens=4, temperature=0.0, seed=7).complete()
            await counted(running, "undetermined", 1)  # nothing of its sampling is known over this protocol
            for name in ("temperature", "seed", "max_tokens"):
                assert shadow.seen[-1].value(name) == usual.seen[-1].value(name) is not None
            shadow.script = lambda seen: Script((" other",))
            await running.post("/v1/completions", {**REQUEST, "stream": False, "prompt": "x y"})
            await counted(running, "differ", 1)
            await running.post("/v1/completions", {**REQUEST, "temperature": 1})
            await counted(running, "undetermined", 2)
            assert usual.counts.started == shadow.counts.started == 4


async def test_a_shadow_that_fails_stalls_or_is_full_is_not_noticed():
    async with FakeReplica() as usual, FakeReplica(lambda seen: Script((), status_after=0)) as shadow:
        async with gateway(usual, shadow, **pools(usual, shadow)) as running:
            assert (await running.post("/v1/completions", {**REQUEST, "prompt": "0"}))[0] == 200
            await counted(running, "failed", 1)
            for one in running.service.replicas.all():
                one.breaker = type(one.breaker)()
                one.health = type(one.health)(healthy=True)
            shadow.script = lambda seen: Script((" a",), stall_after=0)
            answers = [running.post("/v1/completions", {**REQUEST, "prompt": f"p {n}"}) for n in range(5)]
            assert [status for status, _, _ in await asyncio.gather(*answers)] == [200] * 5
            await counted(running, "full", 3)
            await until(lambda: shadow.counts.running == 2)
        await until(lambda: shadow.counts.running == 0)
