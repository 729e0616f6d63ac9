"""What finds no room goes to a pool of others or to an upstream, is seen there, and comes back as if it were ours."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from gateway.health import BreakerState
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.openai_upstream import OpenAIUpstream, upstream
from tests.gateway.running import Running, gateway, until
from tests.gateway.test_kserve import ours

pytestmark = pytest.mark.slow

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED = {"model": "demo", "prompt": "one two", "max_tokens": 9, "temperature": 0.5, "stop": ["X"], "seed": 4}
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
    replica.script = lambda seen: Script((" a",), stall_after=0)
    held = asyncio.ensure_future(running.post(COMPLETIONS, {"model": "demo", "prompt": "held"}))
    await until(lambda: replica.counts.running == 1)
    replica.script = script
    return held


async def test_an_upstream_serves_what_finds_no_room_and_the_response_says_so():
    async with upstream() as there, FakeReplica() as replica:
        config, environ = elsewhere(there), {"UPSTREAM": "hush"}
        async with gateway(replica, config=config, environ=environ) as running:
            _, headers, _ = await running.post(COMPLETIONS, {**ASKED, "temperature": 1})
            assert "x-trident-degraded" not in headers and not there.seen
            held = await pressed(running, replica)
            status, headers, body = await running.post(COMPLETIONS, ASKED, traceparent=TRACE)
            assert (status, headers["x-trident-degraded"]) == (200, "overflow=afar")
            assert body["choices"][0]["text"] == " from afar" and body["choices"][0]["finish_reason"] == "stop"
            assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (7, 2)
            path, seen, asked = there.seen[-1]
            assert path == COMPLETIONS and seen["authorization"] == "Bearer hush" and "1" * 32 in seen["traceparent"]
            assert (asked["model"], asked["prompt"], asked["max_tokens"]) == ("small", "one two", 9)
            assert (asked["temperature"], asked["stop"], asked["seed"]) == (0.5, ["X"], 4)
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
            _, headers, body = await running.post(COMPLETIONS, {**ASKED, "top_k": 3})
            assert headers["x-trident-degraded"] == "max_tokens=2" and not there.seen
            async with ours(running) as client:
                assert len((await client.generate("a b", max_tokens=9, top_k=3).complete()).token_ids) == 2
            held.cancel()


async def test_an_upstream_that_does_not_count_is_counted_for():
    async with upstream(usage=False) as there, FakeReplica() as replica:
        async with gateway(replica, config=elsewhere(there), environ={"UPSTREAM": ""}) as running:
            held = await pressed(running, replica)
            _, _, body = await running.post(COMPLETIONS, ASKED)
            assert body["usage"]["completion_tokens"] == 2 and body["usage"]["prompt_tokens"] > 0
            held.cancel()


@pytest.mark.parametrize(
    ("script", "status", "code", "after"),
    [
        ({"status": 429, "headers": {"retry-after": "7"}}, 429, "rate_limit_exceeded", "7"),
        ({"status": 401}, 503, "unavailable", "1"),
        ({"status": 500}, 503, "unavailable", "1"),
        ({"status": 400}, 400, "invalid_value", None),
        ({"cut_after": 1}, 503, "unavailable", "1"),
        ({"broken_after": 1}, 500, "engine_failed", None),
        ({"texts": ("x" * 300_000,)}, 200, "", None),
    ],
)
async def test_an_upstreams_refusals_and_failures_are_the_gateways_own(
    script: dict, status: int, code: str, after: str | None
):
    async with upstream(**script) as there, FakeReplica() as replica:
        async with gateway(replica, config=elsewhere(there), environ={"UPSTREAM": ""}) as running:
            held = await pressed(running, replica)
            found, headers, body = await running.post(COMPLETIONS, ASKED)
            assert (found, headers.get("retry-after")) == (status, after)
            assert found == 200 or body["error"]["code"] == code
            if found != 200:  # what it says may be about our account there
                assert not set(body["error"]["message"].split()) & {"afar", "answered", "upstream", "no:", "broke"}
                assert "quote request" in body["error"]["message"]
            held.cancel()


async def test_an_upstream_that_keeps_failing_is_left_alone_and_tried_again():
    async with upstream(status=500) as there, FakeReplica() as replica:
        config, more = elsewhere(there), {"breaker_failures": 2, "breaker_open_s": 60.0}
        async with gateway(replica, config=config, environ={"UPSTREAM": ""}, **more) as running:
            held = await pressed(running, replica)
            assert [(await running.post(COMPLETIONS, ASKED))[0] for _ in range(2)] == [503, 503]
            status, headers, _ = await running.post(COMPLETIONS, ASKED)
            assert (status, headers["x-trident-degraded"], len(there.seen)) == (200, "max_tokens=2", 2)
            there.status = 200
            [one] = running.service.overflow.upstreams()
            one.breaker = dataclasses.replace(one.breaker, until_s=0.0)  # its pause is over
            status, headers, _ = await running.post(COMPLETIONS, ASKED)
            assert (status, headers["x-trident-degraded"]) == (200, "overflow=afar")
            held.cancel()


async def test_a_caller_that_leaves_or_is_late_frees_the_upstream():
    async with upstream(texts=(" a",) * 500, gap_s=0.01) as there, FakeReplica() as replica:
        config = elsewhere(there)
        async with gateway(replica, config=config, environ={"UPSTREAM": ""}, breaker_failures=1) as running:
            held = await pressed(running, replica)
            leaving = asyncio.ensure_future(running.post(COMPLETIONS, ASKED))
            await until(lambda: there.running == 1)
            leaving.cancel()
            await until(lambda: there.running == 0 and len(running.service._live) == 1)
            status, _, _ = await running.post(COMPLETIONS, ASKED, x_trident_timeout_s="0.2")
            assert status == 504
            await until(lambda: there.running == 0)
            assert all(one.outstanding == 0 for one in running.service.overflow.upstreams())
            assert all(one.breaker.state is BreakerState.CLOSED for one in running.service.overflow.upstreams())
            held.cancel()


async def test_a_pool_of_others_serves_what_finds_no_room_at_both_doors():
    config = LADDER + "pool = 'draft'"
    async with FakeReplica() as replica, FakeReplica(lambda seen: Script((" small",))) as draft:
        pools = {"replicas": f"usual={replica.url};draft={draft.url}", "pool_weights": {"usual": "1"}}
        async with gateway(replica, draft, config=config, **pools) as running:
            held = await pressed(running, replica)
            _, headers, body = await running.post(COMPLETIONS, ASKED)
            assert headers["x-trident-degraded"] == "overflow=afar" and body["choices"][0]["text"] == " small"
            async with ours(running) as client:
                assert (await client.generate("x", max_tokens=5).complete()).text == " small"
            draft.ready = False
            for one in running.service.replicas.all():
                if one.url == draft.url:
                    one.health = type(one.health)(healthy=False)
            _, headers, _ = await running.post(COMPLETIONS, ASKED)
            assert headers["x-trident-degraded"] == "max_tokens=2"
            assert draft.counts.started == 2
            held.cancel()
