"""What callers do together and what replicas do to them: totals counted exactly, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from contract.errors import EngineFailed
from gateway.config.tenant import Limits
from gateway.routing.circuit_breaker import BreakerState
from tests.fakes.replica import FakeReplica, Script, SeenRequest
from tests.gateway.api.test_kserve import ours
from tests.gateway.cache.test_reuse import as_
from tests.gateway.config.test_configuration import ALICE, BOB, keys
from tests.gateway.running import Running, gateway, until

pytestmark = pytest.mark.slow

COMPLETIONS = "/v1/completions"


def request_body(prompt: str = "a b", max_tokens: int = 4, **more: object) -> dict:
    return {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, **more}


def exact(seen: SeenRequest) -> Script:
    return Script(tuple(" t" for _ in range(seen.value("max_tokens"))), first_token_s=0.01)


def nothing_left(running: Running) -> bool:
    admission, service = running.service.admission, running.service
    held = (admission.running, admission.waiting, admission._concurrency.in_flight, len(service.live))
    return held == (0, 0, 0, 0) and all(replica.work.outstanding == 0 for replica in service.replicas.all())


def free(running: Running, level: str) -> float:
    return running.service.budgets._buckets[f"tokens:{level}"].balance


async def test_floods_of_several_tenants_are_counted_to_the_token():
    """60 requests of two tenants, whole and streamed, at both protocols, one after another and at once."""
    config = keys(ALICE, BOB, limits="tokens_per_minute = 100000") + "[admission]\nmax_running = 6"
    async with FakeReplica(exact, slots=6) as replica, gateway(replica, config=config) as running:

        async def one(number: int) -> str:
            api_key = (ALICE, BOB)[number % 2]
            if number % 3 == 0:
                async with ours(running, api_key=api_key) as client:
                    await client.generate("a b", max_tokens=4).complete()
            else:
                status, _, body = await running.post(COMPLETIONS, request_body(n=1 + number % 2), **as_(api_key))
                assert status == 200 and len(body["choices"]) == 1 + number % 2
            return api_key

        done = Counter(await asyncio.gather(*(one(number) for number in range(60))))
        assert done == {ALICE: 30, BOB: 30}
        await until(lambda: nothing_left(running))
        assert replica.counts.most_running <= 6
        page = await running.metrics()
        for tenant, number in (("o0/t", 0), ("o1/t", 1)):
            # 10 of each by gRPC, 20 by HTTP, of which the odd tenant's have two choices each.
            choices = 10 + 20 * (1 + number)
            assert (
                page[f'trident_gateway_tokens_total{{direction="output",source="engine",tenant="{tenant}"}}']
                == 4 * choices
            )
        assert page["trident_gateway_in_flight"] == 0 and page['trident_gateway_pool_running{pool=""}'] == 0
        # A prompt counts once for all its choices: 30 prompts of 2 tokens each, and what was generated.
        for level, choices in (("o0", 30), ("o1", 50)):
            assert 100_000 - (60 + 4 * choices) <= round(free(running, level)) <= 100_000 - (60 + 4 * choices) + 400


async def test_a_budget_is_never_overrun_whatever_ends_come_between():
    """Every request ends some way at some time; what was generated never exceeds what the bucket allows."""
    rng, made = random.Random(4), 0

    def script(seen: SeenRequest) -> Script:
        nonlocal made
        made += 2 + seen.value("max_tokens")
        kind = rng.randrange(4)
        tokens = tuple(" t" for _ in range(seen.value("max_tokens")))
        failing = {1: {"fail_after": 3, "error": EngineFailed("x")}, 2: {"status_after": 3}}.get(kind, {})
        return Script(tokens, gap_s=0.002, **failing)

    limits = "tokens_per_minute = 600\nburst_tokens = 600"
    async with FakeReplica(script) as replica, gateway(replica, config=keys(ALICE, limits=limits)) as running:
        running.service.budgets._clock = lambda: 0.0  # nothing flows in

        async def one() -> int:
            body = request_body(max_tokens=rng.randint(5, 40), stream=rng.random() < 0.5)
            post = running.post(COMPLETIONS, body, **as_(ALICE))
            if body["stream"]:
                with contextlib.suppress(asyncio.TimeoutError, ValueError):
                    await asyncio.wait_for(post, rng.random() * 0.1)
                return 0
            return (await post)[0]

        statuses = Counter(await asyncio.gather(*(one() for _ in range(150))))
        assert statuses[429] > 20
        await until(lambda: nothing_left(running))
        bucket = running.service.budgets._buckets["tokens:o0"]
        assert 0 <= bucket.balance <= 600 and bucket.held == 0 and not bucket.leases


async def test_a_long_prompt_is_reserved_in_tokens_and_settled_with_what_the_engine_counted():
    """2,500 words of 14,600 bytes fit a budget of 8,000 tokens, and four prompts of 1,000 words at once, too."""
    words = ("lorem ipsum dolor sit amet consectetur adipiscing elit sed " * 400).split()
    limits = "tokens_per_minute = 8000"
    async with FakeReplica(exact) as replica, gateway(replica, config=keys(ALICE, BOB, limits=limits)) as running:
        running.service.budgets._clock = lambda: 0.0  # nothing flows in
        status, _, _ = await running.post(COMPLETIONS, request_body(" ".join(words[:2500]), 100), **as_(ALICE))
        assert status == 200 and free(running, "o0") == 8000 - 2600
        chat = {"model": "demo", "max_tokens": 100, "messages": [{"role": "user", "content": " ".join(words[:1000])}]}
        four = await asyncio.gather(*(running.post("/v1/chat/completions", chat, **as_(BOB)) for _ in range(4)))
        assert [status for status, _, _ in four] == [200] * 4


@pytest.mark.slow
async def test_a_long_flood_does_not_keep_a_short_request_waiting():
    config = keys(ALICE, BOB) + "[admission]\nmax_running = 4\ntenant_share = 0.75\nmax_waiting_per_tenant = 30"

    gate = asyncio.Event()

    def script(seen: SeenRequest) -> Script:
        return Script((" t",), gate=gate if seen.value("max_tokens") > 100 else None)

    async with FakeReplica(script) as replica, gateway(replica, config=config) as running:
        flood = [
            asyncio.ensure_future(running.post(COMPLETIONS, request_body(max_tokens=900), **as_(ALICE)))
            for _ in range(40)
        ]
        await until(lambda: sum(one.done() for one in flood) == 7 and running.service.admission.waiting == 30)
        page = await running.metrics()
        assert page['trident_gateway_queue_depth{pool="",priority="1"}'] == 30
        for _ in range(3):
            assert (await running.post(COMPLETIONS, request_body(max_tokens=2), **as_(BOB)))[0] == 200
        assert replica.counts.finished == 3  # none of the flood
        gate.set()
        statuses = Counter(status for status, _, _ in await asyncio.gather(*flood))
        assert statuses == {200: 33, 429: 7}
        await until(lambda: nothing_left(running))


async def test_two_gateways_share_one_budget_through_redis(redis_socket: Path):
    config = keys(ALICE, limits="tokens_per_minute = 600\nrequests_per_minute = 1\nburst_requests = 20")
    config += f'[budgets]\nredis = "unix://{redis_socket}"\n'
    async with (
        FakeReplica(exact) as replica,
        gateway(replica, config=config) as one,
        gateway(replica, config=config) as two,
    ):
        limits = Limits(tokens_per_minute=600, requests_per_minute=1, burst_requests=20)
        assert one.service.configuration.tenant(ALICE).levels[0].limits == limits
        answers = [
            gate.post(COMPLETIONS, request_body(max_tokens=1), **as_(ALICE)) for _ in range(20) for gate in (one, two)
        ]
        statuses = Counter(status for status, _, _ in await asyncio.gather(*answers))
        assert statuses[200] <= 21 and statuses[200] + statuses[429] == 40 and statuses[200] >= 10
        assert replica.counts.started == statuses[200]
        _, headers, _ = await one.post(COMPLETIONS, request_body(), **as_(ALICE))
        assert int(headers["x-ratelimit-remaining-requests"]) <= 20 - statuses[200] + 1


async def test_a_budget_store_that_is_gone_is_unavailable_and_takes_nothing():
    config = keys(ALICE, limits="tokens_per_minute = 600") + '[budgets]\nredis = "redis://127.0.0.1:1/0"\n'
    async with FakeReplica() as replica, gateway(replica, config=config) as running:
        status, headers, body = await running.post(COMPLETIONS, request_body(), **as_(ALICE))
        assert status == 503 and "budget store" in body["error"]["message"] and headers["retry-after"] == "1"
        assert nothing_left(running) and replica.counts.started == 0


async def test_requests_of_a_replica_that_is_killed_before_their_first_token_are_answered_by_another():
    async with FakeReplica(lambda seen: Script((" a",), stall_after=0)) as dying, FakeReplica(exact) as other:
        async with gateway(dying, other, routing="least_outstanding") as running:
            tasks = [asyncio.ensure_future(running.post(COMPLETIONS, request_body(n=2))) for _ in range(6)]
            await until(lambda: dying.counts.running > 0)
            await dying.stop()
            answers = await asyncio.gather(*tasks)
            assert [status for status, _, _ in answers] == [200] * 6
            await until(lambda: nothing_left(running))


async def test_a_replica_that_answers_nonsense_or_nothing_is_an_error_and_is_taken_out():
    poisoned = Script((" a", " b"), fail_after=0, error=EngineFailed("NaN"))
    async with FakeReplica(lambda seen: poisoned) as bad, gateway(bad, breaker_failures=3) as running:
        for _ in range(3):
            assert (await running.post(COMPLETIONS, request_body()))[0] == 500
        status, _, body = await running.post(COMPLETIONS, request_body())
        assert status == 503 and "no healthy replica" in body["error"]["message"] and nothing_left(running)
    silent = Script((" a", " b"), stall_after=0)
    async with FakeReplica(lambda seen: silent) as stalled, gateway(stalled, idle_timeout_s=0.1) as running:
        status, _, body = await running.post(COMPLETIONS, request_body())
        assert status == 504 and "silent" in body["error"]["message"]
        await until(lambda: stalled.counts.running == 0 and nothing_left(running))


async def test_a_tenants_pool_is_its_own_even_when_it_is_down():
    pinned = keys(ALICE, BOB).replace(
        "[orgs.o0.teams.t.keys.k]", '[orgs.o0.teams.t]\npool = "own"\n[orgs.o0.teams.t.keys.k]'
    )
    async with FakeReplica() as own, FakeReplica() as shared:
        pools = {"replicas": f"shared={shared.url};own={own.url}", "pool_weights": {"shared": "1"}}
        async with gateway(own, shared, config=pinned, **pools) as running:
            for api_key in (ALICE, BOB, ALICE):
                assert (await running.post(COMPLETIONS, request_body(), **as_(api_key)))[0] == 200
            assert (own.counts.started, shared.counts.started) == (2, 1)
            for one in running.service.replicas.all():
                if one.url == own.url:
                    one.health = type(one.health)(healthy=False)
            assert (await running.post(COMPLETIONS, request_body(), **as_(ALICE)))[0] == 503
            assert shared.counts.started == 1


async def test_a_key_sees_and_gets_only_the_models_it_may_use():
    team = "[orgs.o0.teams.t.keys.k]"
    config = keys(ALICE, BOB).replace(team, f'[orgs.o0.teams.t]\nmodels = ["other"]\n{team}')
    async with FakeReplica() as replica, gateway(replica, config=config) as running:
        for api_key, listed, status in ((ALICE, 0, 404), (BOB, 1, 200)):
            _, models = await running.get("/v1/models", **as_(api_key))
            assert len(json.loads(models)["data"]) == listed
            assert (await running.get("/v1/models/demo", **as_(api_key)))[0] == status
            assert (await running.post(COMPLETIONS, request_body(), **as_(api_key)))[0] == status


async def test_what_tokens_cost_is_on_the_page():
    async with FakeReplica() as replica, gateway(replica, config="[prices]\nreplica_hour = 3600.0") as running:
        assert "trident_gateway_cost_per_1000_tokens{" not in await running.metrics_page()
        await running.post(COMPLETIONS, request_body(max_tokens=8))
        page = await running.metrics()
        spent = page['trident_gateway_cost_total{currency="USD"}']
        assert spent == pytest.approx(page["trident_gateway_replica_seconds_total"], rel=0.2)
        assert page['trident_gateway_cost_per_1000_tokens{currency="USD"}'] == pytest.approx(spent / 10 * 1000)


@pytest.mark.parametrize("keyed", [False, True])
async def test_with_keys_no_caller_learns_what_the_shared_prefix_cache_had(keyed):
    environ = {"TRIDENT_GATEWAY_API_KEYS": f"a/b/c={'k' * 20}"} if keyed else {}
    bearer = {"authorization": "Bearer " + "k" * 20} if keyed else {}
    script = Script((" a", " b"), cached_tokens=64)
    async with FakeReplica(lambda seen: script) as replica, gateway(replica, environ=environ) as running:
        request_body = {"model": "demo", "prompt": "one two", "max_tokens": 2}
        _, _, body = await running.post("/v1/completions", request_body, **bearer)
        told = [body["usage"]["prompt_tokens_details"]["cached_tokens"]]
        async with ours(running, api_key="k" * 20 if keyed else "") as client:
            done = await client.generate("one two", max_tokens=2).complete()
        told.append(done.usage.cached_tokens)
        assert done.text == " a b" and done.usage.output_tokens == 2
    assert told == ([0, 0] if keyed else [64, 64])


def pool_of(tenant: int, pool: str, config: str) -> str:
    return config.replace(
        f"[orgs.o{tenant}.teams.t.keys.k]",
        f'[orgs.o{tenant}.teams.t]\npool = "{pool}"\n[orgs.o{tenant}.teams.t.keys.k]',
    )


@pytest.mark.parametrize("pinned", ["own", "public"])
async def test_a_flood_at_one_pool_delays_no_request_at_another(pinned: str):
    """The flood at a private pool of one slot, or at the public one beside an idle private pool of 64."""
    gate = asyncio.Event()

    def script(seen: SeenRequest) -> Script:
        return Script((" t",), gate=gate if seen.value("max_tokens") > 100 else None)

    config = keys(ALICE, BOB)
    if pinned == "own":
        config = pool_of(0, "own", config)
    own_slots, public_slots = (1, 4) if pinned == "own" else (64, 4)
    async with FakeReplica(script, slots=own_slots) as own, FakeReplica(script, slots=public_slots) as public:
        pools = {"replicas": f"public={public.url};own={own.url}", "pool_weights": {"public": "1"}}
        async with gateway(own, public, config=config, **pools) as running:
            flooded, slots = (own, own_slots) if pinned == "own" else (public, public_slots)
            flood = [
                asyncio.ensure_future(running.post(COMPLETIONS, request_body(max_tokens=900), **as_(ALICE)))
                for _ in range(60)
            ]
            await until(lambda: running.service.admission.waiting > 50)
            for _ in range(4):
                assert (await running.post(COMPLETIONS, request_body(max_tokens=2), **as_(BOB)))[0] == 200
            assert flooded.counts.running <= slots * 1.25 + 1
            page = await running.metrics()
            name = "own" if pinned == "own" else "public"
            assert page[f'trident_gateway_pool_waiting{{pool="{name}"}}'] > 50
            assert page[f'trident_gateway_pool_slots{{pool="{name}"}}'] == slots
            gate.set()
            assert {status for status, _, _ in await asyncio.gather(*flood)} == {200}
            assert flooded.counts.most_running <= slots * 1.25 + 1
            await until(lambda: nothing_left(running))


async def test_many_choices_of_one_request_leave_slots_to_others_and_all_come_to_their_end():
    gate = asyncio.Event()

    def script(seen: SeenRequest) -> Script:
        return Script((" t",), gate=gate if seen.value("max_tokens") > 100 else None)

    async with FakeReplica(script, slots=8) as replica, gateway(replica, config=keys(ALICE, BOB)) as running:
        wide = asyncio.ensure_future(
            running.post(COMPLETIONS, request_body(max_tokens=900, n=16, temperature=1), **as_(ALICE))
        )
        await until(lambda: replica.counts.running == 6 and running.service.admission.waiting == 1)
        for _ in range(5):
            assert (await running.post(COMPLETIONS, request_body(max_tokens=2), **as_(BOB)))[0] == 200
        gate.set()
        status, _, body = await wide
        assert status == 200 and len(body["choices"]) == 16 and body["usage"]["completion_tokens"] == 16
        await until(lambda: nothing_left(running))
        assert replica.counts.started == 16 + 5 and running.service.admission.slots().idle


async def test_requests_of_a_public_pool_that_dies_are_served_by_another_within_its_slots():
    async with (
        FakeReplica(lambda seen: Script((" a",), stall_after=0), slots=4) as dying,
        FakeReplica(exact, slots=2) as other,
    ):
        pools = {"replicas": f"one={dying.url};two={other.url}", "pool_weights": {"one": "1000000", "two": "0.001"}}
        async with gateway(dying, other, **pools) as running:
            tasks = [asyncio.ensure_future(running.post(COMPLETIONS, request_body(temperature=1))) for _ in range(12)]
            await until(lambda: dying.counts.running == 5 and running.service.admission.slots("one").waiting == 7)
            await dying.stop()
            assert {status for status, _, _ in await asyncio.gather(*tasks)} == {200}
            assert other.counts.most_running <= 3
            await until(lambda: nothing_left(running))


async def test_ready_means_that_callers_can_be_sent_somewhere():
    async with FakeReplica() as public, FakeReplica() as side:
        pools = {"replicas": f"public={public.url};side={side.url}", "pool_weights": {"public": "1"}}
        async with gateway(public, side, **pools) as running:
            status, body = await running.get("/health/ready")
            assert status == 200 and json.loads(body)["pools"]["side"]["ready"]
            for one in running.service.replicas.all():
                if one.url == public.url:
                    one.health = type(one.health)(healthy=False)
            status, body = await running.get("/health/ready")
            message = json.loads(body)
            assert (
                status == 503
                and not message["ready"]
                and message["pools"]["side"]
                == {
                    "ready": True,
                    "serving": False,
                    "healthy": 1,
                    "replicas": 1,
                }
            )
            assert (await running.metrics())['trident_gateway_pool_ready{pool="public"}'] == 0


async def test_a_breaker_that_opens_at_one_gateway_makes_the_others_careful(redis_socket: Path):
    shared = {"redis": f"unix://{redis_socket}", "breaker_failures": 3}
    async with FakeReplica() as replica:
        async with gateway(replica, **shared) as one, gateway(replica, **shared) as other:
            await until(lambda: one.service.replicas.ready() and other.service.replicas.ready())
            found = one.service.replicas.all()[0]
            for _ in range(3):
                found.ended(EngineFailed("broken"), 0.0)
            assert found.breaker.state is BreakerState.OPEN
            theirs = other.service.replicas.all()[0]
            await until(lambda: theirs.breaker.failures == 2)
            assert theirs.ready(time.monotonic())
            theirs.ended(EngineFailed("broken"), 0.0)
            assert theirs.breaker.state is BreakerState.OPEN
