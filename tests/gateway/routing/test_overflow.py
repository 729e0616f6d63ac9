"""What finds no room goes to a pool of others or to an upstream, is seen there, and comes back as if it were ours."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Sequence

import aiohttp
import pytest

from contract.errors import Overloaded, Unavailable
from contract.generation import GenerationRequest, Usage
from gateway.admission.budget_store import MemoryStore
from gateway.config.policy import OverflowTarget
from gateway.config.tenant import Tenant
from gateway.request_context import RequestContext
from gateway.routing.circuit_breaker import BreakerPolicy, BreakerState
from gateway.routing.overflow import REPLICAS, Overflow
from gateway.routing.upstream import Spend, Upstream
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.api.test_kserve import ours
from tests.gateway.config.test_configuration import ALICE, keys
from tests.gateway.openai_upstream import OpenAIUpstream, upstream
from tests.gateway.running import Running, gateway, until

pytestmark = pytest.mark.slow

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
REQUEST = {"model": "demo", "prompt": "one two", "max_tokens": 9, "temperature": 0.5, "stop": ["X"], "seed": 4}
LADDER = """
[degradation]
shorter_at = 0.0001
overflow_at = 0.0001
max_tokens = 2
overflow = "afar"
[overflow.afar]
"""
TRACE = f"00-{'1' * 32}-{'2' * 16}-01"


def elsewhere(there: OpenAIUpstream) -> str:
    return LADDER + f"url = '{there.url}'\nmodel = 'small'\napi_key = '$UPSTREAM'"


async def pressed(running: Running, replica: FakeReplica) -> asyncio.Task:
    """Makes the gateway as full as it takes: one request stays."""
    script = replica.script
    replica.script = lambda seen: Script((" a",) * 10_000, gap_s=0.05)
    held = asyncio.ensure_future(running.post(COMPLETIONS, {"model": "demo", "prompt": "held", "stream": True}))
    await until(lambda: replica.counts.running == 1)
    replica.script = script
    return held


async def test_an_upstream_serves_what_finds_no_room_and_the_response_says_so():
    async with upstream() as there, FakeReplica() as replica:
        config, environ = elsewhere(there), {"UPSTREAM": "hush"}
        async with gateway(replica, config=config, environ=environ) as running:
            _, headers, _ = await running.post(COMPLETIONS, {**REQUEST, "temperature": 1})
            assert "x-trident-degraded" not in headers and not there.seen
            held = await pressed(running, replica)
            status, headers, body = await running.post(COMPLETIONS, REQUEST, traceparent=TRACE)
            assert (status, headers["x-trident-degraded"]) == (200, "overflow=afar")
            assert body["choices"][0]["text"] == " from afar" and body["choices"][0]["finish_reason"] == "stop"
            assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (7, 2)
            path, seen, request_body = there.seen[-1]
            assert path == COMPLETIONS and seen["authorization"] == "Bearer hush" and "1" * 32 in seen["traceparent"]
            assert (request_body["model"], request_body["prompt"], request_body["max_tokens"]) == (
                "small",
                "one two",
                9,
            )
            assert (request_body["temperature"], request_body["stop"], request_body["seed"]) == (0.5, ["X"], 4)
            chat = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "stream": False}
            _, _, body = await running.post(CHAT, chat)
            assert body["choices"][0]["message"]["content"] == " from afar" and there.seen[-1][0] == CHAT
            page = await running.metrics()
            assert page['trident_gateway_degraded_total{stage="overflow"}'] == 2
            assert page['trident_gateway_generations_total{end="stop",pool="afar",source="engine"}'] == 2
            assert page[f'trident_gateway_breaker_state{{pool="afar",replica="{there.url}"}}'] == 0
            held.cancel()


async def test_what_an_upstream_cannot_say_is_made_shorter_instead():
    async with upstream() as there, FakeReplica() as replica:
        async with gateway(replica, config=elsewhere(there), environ={"UPSTREAM": ""}) as running:
            held = await pressed(running, replica)
            _, headers, body = await running.post(COMPLETIONS, {**REQUEST, "top_k": 3})
            assert headers["x-trident-degraded"] == "max_tokens=2" and not there.seen
            async with ours(running) as client:
                assert len((await client.generate("a b", max_tokens=9, top_k=3).complete()).token_ids) == 2
            held.cancel()


async def test_an_upstream_that_does_not_count_is_counted_for():
    async with upstream(usage=False) as there, FakeReplica() as replica:
        async with gateway(replica, config=elsewhere(there), environ={"UPSTREAM": ""}) as running:
            held = await pressed(running, replica)
            _, _, body = await running.post(COMPLETIONS, REQUEST)
            assert body["usage"]["completion_tokens"] == 2 and body["usage"]["prompt_tokens"] > 0
            held.cancel()


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        ({"status": 400}, 400, "invalid_value"),
        ({"cut_after": 1}, 503, "unavailable"),
        ({"broken_after": 1}, 500, "engine_failed"),
        ({"texts": ("x" * 300_000,)}, 200, ""),
    ],
)
async def test_what_an_upstream_refuses_as_wrong_or_breaks_midway_is_told_without_its_words(
    script: dict, status: int, code: str
):
    async with upstream(**script) as there, FakeReplica() as replica:
        async with gateway(replica, config=elsewhere(there), environ={"UPSTREAM": ""}) as running:
            held = await pressed(running, replica)
            found, _, body = await running.post(COMPLETIONS, REQUEST)
            assert found == status and replica.counts.started == 1  # the one that is held
            assert found == 200 or body["error"]["code"] == code
            if found != 200:  # what it says may be about our account there
                assert not set(body["error"]["message"].split()) & {"afar", "answered", "upstream", "no:", "broke"}
                assert "quote request" in body["error"]["message"]
            held.cancel()


BEFORE_ITS_FIRST_TOKEN = {
    "throttled": {"status": 429, "headers": {"retry-after": "7"}},
    "unknown key": {"status": 401},
    "broken": {"status": 500},
    "dropped": {"cut_after": 0},
    "an error event": {"broken_after": 0},
    "hung": {"hangs": True},
}


@pytest.mark.parametrize("failure", BEFORE_ITS_FIRST_TOKEN)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_fails_at_an_upstream_before_its_first_token_goes_back_to_the_replicas(failure: str, stream: bool):
    async with upstream(**BEFORE_ITS_FIRST_TOKEN[failure]) as there, FakeReplica() as replica:
        # Short only where silence is the failure: a slow machine may be silent for a moment, too.
        more = {"environ": {"UPSTREAM": ""}} | ({"first_token_timeout_s": 0.3} if failure == "hung" else {})
        async with gateway(replica, config=elsewhere(there), **more) as running:
            held = await pressed(running, replica)
            async with aiohttp.ClientSession() as session:
                async with session.post(running.base_url + COMPLETIONS, json={**REQUEST, "stream": stream}) as answer:
                    message = await answer.text()
                    assert answer.status == 200 and "error" not in message and " one" in message
                    assert "x-trident-degraded" not in answer.headers
            assert len(there.seen) == 1 and replica.counts.started == 2
            page = await running.metrics()
            assert page['trident_gateway_generations_total{end="length",pool="",source="engine"}'] == 1
            assert page['trident_gateway_degraded_total{stage="overflow"}'] == 1  # the way back is none
            assert running.service.admission.running == 1  # the held one: its slot was given back
            assert all(one.outstanding == 0 for one in running.service.overflow.upstreams.values())
            held.cancel()


async def test_what_comes_back_from_an_upstream_waits_for_its_slot_like_others():
    limits = "\n[admission]\nmax_running = 1"
    async with upstream(status=500) as there, FakeReplica() as replica:
        async with gateway(replica, config=elsewhere(there) + limits, environ={"UPSTREAM": ""}) as running:
            gate = asyncio.Event()
            replica.script = lambda seen: Script((" a",), gate=gate)
            held = asyncio.ensure_future(running.post(COMPLETIONS, {"model": "demo", "prompt": "held"}))
            await until(lambda: replica.counts.running == 1)
            waiting = [asyncio.ensure_future(running.post(COMPLETIONS, {**REQUEST, "n": 2})) for _ in range(2)]
            await until(lambda: running.service.admission.waiting == 4)
            assert replica.counts.running == 1
            gate.set()
            answers = await asyncio.gather(held, *waiting)
            assert [status for status, _, _ in answers] == [200] * 3, answers
            assert replica.counts.most_running == 1
            admission = running.service.admission
            await until(lambda: admission.slots().idle)


async def test_a_caller_that_leaves_while_it_waits_to_come_back_leaves_nothing_behind():
    limits = "\n[admission]\nmax_running = 1"
    async with upstream(status=500) as there, FakeReplica() as replica:
        async with gateway(replica, config=elsewhere(there) + limits, environ={"UPSTREAM": ""}) as running:
            held = await pressed(running, replica)
            admission = running.service.admission
            leaving = asyncio.ensure_future(running.post(COMPLETIONS, REQUEST))
            await until(lambda: admission.waiting == 1)
            leaving.cancel()
            await until(lambda: admission.waiting == 0 and len(running.service.live) == 1)
            assert admission.running == 1 and admission._concurrency.in_flight == 1
            held.cancel()


async def test_an_upstream_is_not_asked_again_before_the_time_it_said():
    async with upstream(status=429, headers={"retry-after": "7"}) as there, FakeReplica() as replica:
        async with gateway(replica, config=elsewhere(there), environ={"UPSTREAM": ""}) as running:
            held = await pressed(running, replica)
            for _ in range(5):
                assert (await running.post(COMPLETIONS, REQUEST))[0] == 200
            assert len(there.seen) == 1
            [one] = running.service.overflow.upstreams.values()
            assert 0 < one.wait_s() <= 7
            there.status, one._cool_until_s = 200, 0.0
            _, headers, _ = await running.post(COMPLETIONS, REQUEST)
            assert headers["x-trident-degraded"] == "overflow=afar" and len(there.seen) == 2
            held.cancel()


async def test_an_upstream_that_keeps_failing_is_left_alone_and_tried_again():
    async with upstream(status=500) as there, FakeReplica() as replica:
        config, more = elsewhere(there), {"breaker_failures": 2, "breaker_open_s": 60.0}
        async with gateway(replica, config=config, environ={"UPSTREAM": ""}, **more) as running:
            held = await pressed(running, replica)
            for _ in range(4):
                assert (await running.post(COMPLETIONS, REQUEST))[0] == 200
            status, headers, _ = await running.post(COMPLETIONS, REQUEST)
            assert (status, headers["x-trident-degraded"], len(there.seen)) == (200, "max_tokens=2", 2)
            there.status = 200
            [one] = running.service.overflow.upstreams.values()
            one.breaker = dataclasses.replace(one.breaker, until_s=0.0)  # its pause is over
            status, headers, _ = await running.post(COMPLETIONS, REQUEST)
            assert (status, headers["x-trident-degraded"]) == (200, "overflow=afar")
            held.cancel()


@pytest.mark.parametrize("replicas", ["alive", "dead"])
async def test_a_hung_upstreams_breaker_opens(replicas: str):
    async with upstream(hangs=True) as there, FakeReplica() as replica:
        config, more = elsewhere(there), {"breaker_failures": 3, "breaker_open_s": 60.0, "first_token_timeout_s": 0.5}
        if replicas == "dead":  # nowhere else to go
            more["idle_timeout_s"] = 0.5
        async with gateway(replica, config=config, environ={"UPSTREAM": ""}, **more) as running:
            held = await pressed(running, replica) if replicas == "alive" else None
            if held is None:
                take_out(running)
            answers = [await running.post(COMPLETIONS, REQUEST) for _ in range(6)]
            if held is None:  # no other request: they hear of it, and the later ones at once
                assert [status for status, _, _ in answers] == [504] * 3 + [503] * 3
                assert "silent" in answers[0][2]["error"]["message"]
                assert 1 <= int(answers[3][1]["retry-after"]) <= 60
            else:
                assert [status for status, _, _ in answers] == [200] * 6
            assert 0 < len(there.seen) <= 3  # where this process stood still, one was given up before it arrived
            page = await running.metrics()
            assert page[f'trident_gateway_breaker_state{{pool="afar",replica="{there.url}"}}'] == 2
            if held is not None:
                held.cancel()


def take_out(running: Running) -> None:
    for one in running.service.replicas.all():
        one.health = type(one.health)(healthy=False)


FALLBACK = "[degradation]\nshorter_at = 1.0\noverflow_at = 1.0\n"


async def test_while_no_replica_is_healthy_the_upstream_serves_without_any_pressure():
    async with upstream() as there, FakeReplica() as replica:
        config = FALLBACK + f"overflow = 'afar'\n[overflow.afar]\nurl = '{there.url}'\nmodel = 'small'"
        async with gateway(replica, config=config, probe_interval_s=60.0) as running:
            _, headers, _ = await running.post(COMPLETIONS, REQUEST)
            assert "x-trident-degraded" not in headers and not there.seen
            take_out(running)
            answers = await asyncio.gather(*(running.post(COMPLETIONS, {**REQUEST, "seed": n}) for n in range(30)))
            assert {(status, headers["x-trident-degraded"]) for status, headers, _ in answers} == {
                (200, "overflow=afar")
            }
            assert len(there.seen) == 30
            async with ours(running) as client:  # tensors have no upstream
                with pytest.raises(Unavailable):
                    await client.generate("x", max_tokens=2).complete()
            # What an upstream cannot say it does not get.
            assert (await running.post(COMPLETIONS, {**REQUEST, "top_k": 3}))[0] == 503


async def test_requests_of_a_replica_that_dies_under_them_go_to_the_upstream():
    async with upstream() as there, FakeReplica(lambda seen: Script((" a",), stall_after=0), engine="e") as replica:
        config = FALLBACK + f"overflow = 'afar'\n[overflow.afar]\nurl = '{there.url}'\nmodel = 'small'"
        async with gateway(replica, config=config) as running:
            plain = {"model": "demo", "prompt": "one", "max_tokens": 2, "temperature": 0}
            tasks = [asyncio.ensure_future(running.post(COMPLETIONS, {**plain, "prompt": str(n)})) for n in range(4)]
            await until(lambda: replica.counts.running == 4)
            await replica.stop()
            for status, headers, body in await asyncio.gather(*tasks):
                assert (status, body["choices"][0]["text"]) == (200, " from afar")
                assert headers["x-trident-cache"] == "miss"
            assert len(there.seen) == 4


async def test_an_answer_of_a_target_is_never_kept_as_the_engines():
    async with upstream() as there, FakeReplica(lambda seen: Script(refuse=Overloaded("full")), engine="e") as replica:
        config = FALLBACK + f"overflow = 'afar'\n[overflow.afar]\nurl = '{there.url}'\nmodel = 'small'"
        async with gateway(replica, config=config) as running:
            plain = {"model": "demo", "prompt": "one", "max_tokens": 2, "temperature": 0}
            _, headers, body = await running.post(COMPLETIONS, plain)
            assert (headers["x-trident-degraded"], body["choices"][0]["text"]) == ("overflow=afar", " from afar")
            replica.script = lambda seen: Script((" ours",))
            _, headers, body = await running.post(COMPLETIONS, plain)
            assert (headers["x-trident-cache"], body["choices"][0]["text"]) == ("miss", " ours")


async def test_targets_are_tried_in_their_order_each_once():
    async with upstream(status=503) as first, upstream(status=429, headers={"retry-after": "9"}) as second:
        async with upstream(texts=(" third",)) as third, FakeReplica() as replica:
            config = (
                FALLBACK
                + "overflow = ['a', 'b', 'c']\n"
                + "".join(
                    f"[overflow.{name}]\nurl = '{one.url}'\nmodel = 'm'\n"
                    for name, one in (("a", first), ("b", second), ("c", third))
                )
            )
            async with gateway(replica, config=config, probe_interval_s=60.0) as running:
                take_out(running)
                status, headers, body = await running.post(COMPLETIONS, REQUEST)
                assert (status, body["choices"][0]["text"]) == (200, " third")
                assert headers["x-trident-degraded"] == "overflow=c"
                third.status, third.headers = 429, {"retry-after": "20"}
                status, headers, body = await running.post(COMPLETIONS, REQUEST)
                assert [len(one.seen) for one in (first, second, third)] == [2, 1, 2]
                # The first may be asked again at once.
                assert status == 429 and headers["retry-after"] == "1" and "2 times" in body["error"]["message"]
                first.status, first.headers = 429, {"retry-after": "30"}
                await running.post(COMPLETIONS, REQUEST)
                status, headers, _ = await running.post(COMPLETIONS, REQUEST)
                assert status == 503 and 5 <= int(headers["retry-after"]) <= 9  # the second is the next to come back
                assert [len(one.seen) for one in (first, second, third)] == [3, 1, 2]


async def test_a_failing_target_costs_a_tenant_no_more_and_is_refunded():
    limits = keys(ALICE, limits="tokens_per_minute = 1000")
    async with upstream(status=500) as there, FakeReplica() as replica:
        config = limits + FALLBACK + f"overflow = 'afar'\n[overflow.afar]\nurl = '{there.url}'\nmodel = 'small'\n"
        async with gateway(replica, config=config, probe_interval_s=60.0) as running:
            running.service.budgets._clock = lambda: 0.0  # nothing flows in
            held = {"authorization": f"Bearer {ALICE}"}
            take_out(running)
            for _ in range(3):
                assert (await running.post(COMPLETIONS, REQUEST, **held))[0] == 503
            bucket = running.service.budgets._buckets["tokens:o0"]
            assert bucket.balance == 1000
            for one in running.service.replicas.all():
                one.health = type(one.health)(healthy=True)
            assert (await running.post(COMPLETIONS, REQUEST, **held))[0] == 200
            assert bucket.balance == 1000 - 11


async def test_a_caller_that_leaves_or_is_late_frees_the_upstream():
    async with upstream(texts=(" a",) * 500, gap_s=0.01) as there, FakeReplica() as replica:
        config = elsewhere(there)
        async with gateway(replica, config=config, environ={"UPSTREAM": ""}, breaker_failures=1) as running:
            held = await pressed(running, replica)
            leaving = asyncio.ensure_future(running.post(COMPLETIONS, REQUEST))
            await until(lambda: there.running == 1)
            leaving.cancel()
            await until(lambda: there.running == 0 and len(running.service.live) == 1)
            status, _, _ = await running.post(COMPLETIONS, REQUEST, x_trident_timeout_s="0.2")
            assert status == 504
            await until(lambda: there.running == 0)
            assert all(one.outstanding == 0 for one in running.service.overflow.upstreams.values())
            assert all(one.breaker.state is BreakerState.CLOSED for one in running.service.overflow.upstreams.values())
            held.cancel()


async def test_a_pool_of_others_serves_what_finds_no_room_at_both_protocols():
    config = LADDER + "pool = 'draft'"
    async with FakeReplica() as replica, FakeReplica(lambda seen: Script((" small",))) as draft:
        pools = {"replicas": f"usual={replica.url};draft={draft.url}", "pool_weights": {"usual": "1"}}
        async with gateway(replica, draft, config=config, **pools) as running:
            held = await pressed(running, replica)
            _, headers, body = await running.post(COMPLETIONS, REQUEST)
            assert headers["x-trident-degraded"] == "overflow=afar" and body["choices"][0]["text"] == " small"
            async with ours(running) as client:
                assert (await client.generate("x", max_tokens=5).complete()).text == " small"
            draft.ready = False
            for one in running.service.replicas.all():
                if one.url == draft.url:
                    one.health = type(one.health)(healthy=False)
            _, headers, _ = await running.post(COMPLETIONS, REQUEST)
            assert headers["x-trident-degraded"] == "max_tokens=2"
            assert draft.counts.started == 2
            held.cancel()


GROUP = """
[degradation]
overflow = "far"
[overflow.far]
model = "small"
%s
"""


def endpoint(name: str, server: OpenAIUpstream, more: str = "") -> str:
    return f"[overflow.far.endpoints.{name}]\nurl = '{server.url}'\n{more}\n"


async def test_a_throttled_key_of_an_upstream_is_left_for_another_in_the_same_request() -> None:
    async with upstream(status=429, headers={"retry-after": "60"}) as full, upstream() as free:
        config = GROUP % (
            endpoint("one", full, "api_key = 'k1'") + endpoint("two", free, "api_key = 'k2'\nmodel = 'other'")
        )
        async with gateway(config=config) as running:
            for _ in range(8):
                status, headers, body = await running.post(COMPLETIONS, {**REQUEST, "prompt": str(random.random())})
                assert status == 200 and headers["x-trident-degraded"] == "overflow=far/two", body
            assert len(full.seen) <= 1 and len(free.seen) == 8  # it says when it may be asked again
            assert free.seen[0][1]["authorization"] == "Bearer k2" and free.seen[0][2]["model"] == "other"


async def test_the_cheapest_endpoint_serves_until_its_day_is_spent() -> None:
    async with upstream() as cheap, upstream() as dear:
        config = GROUP % (
            "prefer = 'cheapest'\n"
            + endpoint("dear", dear, "price = { input = 5.0, output = 5.0 }")
            + endpoint("cheap", cheap, "price = { input = 1.0, output = 1.0 }\nspend_per_day = 0.03")
        )
        async with gateway(config=config) as running:
            for _ in range(6):
                status, _, body = await running.post(COMPLETIONS, {**REQUEST, "prompt": str(random.random())})
                assert status == 200, body
            assert len(cheap.seen) in (2, 3) and len(dear.seen) == 6 - len(cheap.seen)
            page = await running.metrics()
            assert page['trident_gateway_upstream_spend_total{pool="far/dear"}'] == pytest.approx(
                0.045 * len(dear.seen)
            )


async def test_a_request_stays_at_an_endpoint_that_the_configuration_drops_while_its_cost_is_reserved(monkeypatch):
    async with upstream() as far:
        config = GROUP % endpoint("only", far, "price = { input = 1.0, output = 1.0 }\nspend_per_day = 5.0")
        async with gateway(config=config) as running:
            overflow, reserve, spends = running.service.overflow, Upstream.reserve, []

            async def dropped(self: Upstream, request: GenerationRequest) -> Spend:
                spends.append(await reserve(self, request))
                overflow.change({}, ())
                return spends[-1]

            monkeypatch.setattr(Upstream, "reserve", dropped)
            status, _, body = await running.post(COMPLETIONS, REQUEST)
            assert status == 200, body
            assert len(far.seen) == 1 and [spend.settled for spend in spends] == [True]


async def test_a_user_stays_on_one_side_of_a_release_and_others_are_drawn() -> None:
    release = '[releases.r]\nstable = "stable"\ncandidate = "next"\nweight = 50\n'
    async with FakeReplica() as stable, FakeReplica() as other:
        where = {"replicas": f"stable={stable.url};next={other.url}", "metrics_urls": {}}
        async with gateway(config=release, **where) as running:
            for user in "abcdefgh":
                before = len(stable.seen), len(other.seen)
                for n in range(4):
                    status, _, body = await running.post(COMPLETIONS, {**REQUEST, "prompt": f"{n}", "user": user})
                    assert status == 200, body
                grown = len(stable.seen) - before[0], len(other.seen) - before[1]
                assert grown in ((4, 0), (0, 4))
            assert stable.seen and other.seen


async def test_other_rules_of_an_endpoint_do_not_give_it_a_new_day() -> None:
    targets = Overflow(Replicas(True), BreakerPolicy(), MemoryStore(time.monotonic))
    targets.start()
    spends = []
    for limit in (5.0, 7.0):
        target = {"url": "http://far", "price": {"input": 1.0}, "spend_per_day": limit}
        targets.change({"far": OverflowTarget.model_validate({"model": "m", "endpoints": {"one": target}})}, ())
        spends.append(await targets.upstreams["far/one"].reserve(GenerationRequest("x", max_tokens=1)))
    for spend in spends:  # also of the stream that the change left at the endpoint before
        spend.settle(Usage(2000, 1))
    assert targets.upstreams["far/one"].total == 4.0
    spend = await targets.upstreams["far/one"].reserve(GenerationRequest("x", max_tokens=1))
    standing = spend.reservation.standings[0]
    assert standing.balance == 3_000_000 - standing.demand.amount
    await targets.close()


async def test_an_endpoint_keeps_its_breaker_when_another_one_of_its_target_changes() -> None:
    targets = Overflow(Replicas(True), BreakerPolicy())
    targets.start()

    def change(**urls: str) -> None:
        endpoints = {name: {"url": url} for name, url in urls.items()}
        targets.change({"far": OverflowTarget.model_validate({"model": "m", "endpoints": endpoints})}, ())

    change(one="http://one", two="http://two")
    one, two = targets.upstreams["far/one"], targets.upstreams["far/two"]
    change(one="http://one", two="http://other", three="http://three")
    assert targets.upstreams["far/one"] is one and targets.upstreams["far/two"] is not two
    change(two="http://other")
    assert [upstream.name for upstream in targets.upstreams.values()] == ["far/two"]
    await targets.close()


async def test_fast_endpoints_without_errors_get_most_requests() -> None:
    async with upstream(gap_s=0.0) as fast, upstream(broken_after=0) as broken:
        config = GROUP % (endpoint("fast", fast) + endpoint("broken", broken))
        async with gateway(config=config, breaker_failures=1000) as running:
            for _ in range(60):
                status, _, body = await running.post(COMPLETIONS, {**REQUEST, "prompt": str(random.random())})
                assert status == 200, body
            assert len(fast.seen) == 60 and 1 <= len(broken.seen) < 30


FAILED = GenerationRequest("one", max_tokens=5)
HTTP = RequestContext(Tenant(), "http", "chat", "r")
GRPC = RequestContext(Tenant(), "grpc", "chat", "r")


class Replicas:
    def __init__(self, healthy: bool) -> None:
        self.healthy = healthy

    def serves(self, pool: str) -> bool:
        return self.healthy


class Targets(Overflow):
    """``pool`` is a target of replicas, ``far`` an upstream."""

    def __init__(self, healthy: bool, *preferred: str) -> None:
        super().__init__(Replicas(healthy), BreakerPolicy())
        self._preferred = preferred

    def members(self, target: str, request: GenerationRequest) -> list[str]:
        return [target]

    def accepts(self, target: str, requests: Sequence[GenerationRequest]) -> bool:
        return target in ("pool", "far")

    def has_pool(self, target: str, requests: Sequence[GenerationRequest]) -> bool:
        return target == "pool"

    def wait_s(self, targets: Sequence[str], request: GenerationRequest) -> float | None:
        return 0.2 if "far" in targets else None


def fallback(*targets: str, healthy: bool = True) -> Overflow:
    return Targets(healthy, *targets)


@pytest.mark.parametrize(
    ("context", "tried", "expected"),
    [
        (HTTP, {REPLICAS}, "far"),
        (HTTP, {REPLICAS, "far"}, "pool"),
        (HTTP, {"far"}, "pool"),
        (HTTP, {"far", "pool"}, REPLICAS),
        (HTTP, {REPLICAS, "far", "pool"}, None),
        (GRPC, {REPLICAS}, "pool"),
        (GRPC, {REPLICAS, "pool"}, None),
    ],
)
def test_targets_come_in_order_each_once_then_the_replicas(context, tried, expected):
    assert fallback("unknown", "far", "pool").next_target(context, FAILED, tried) == expected


def test_replicas_that_are_down_are_no_target():
    assert fallback("pool", healthy=False).next_target(HTTP, FAILED, {"pool"}) is None


def test_retry_after_is_the_upstreams_where_the_pool_is_down():
    refusal = Overloaded("full", 9.0)
    assert fallback("far").retry_after_s(HTTP, FAILED, refusal) == 9.0
    assert fallback("far", healthy=False).retry_after_s(HTTP, FAILED, refusal) == 1.0
    assert fallback("far", healthy=False).retry_after_s(GRPC, FAILED, refusal) == 9.0
    assert fallback(healthy=False).retry_after_s(HTTP, FAILED, refusal) == 9.0
