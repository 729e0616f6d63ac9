"""Answers that need no engine: whose they are, what they cost, and what is never taken from them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest

from gateway.config.tenants import digest
from tests.fakes.replica import FakeReplica, Script, SeenRequest
from tests.gateway.config.test_configuration import ALICE, BOB, SALT, keys
from tests.gateway.running import Running, gateway, until

pytestmark = pytest.mark.slow

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY = {"model": "demo", "prompt": "one two", "max_tokens": 4, "temperature": 0}
ENGINE = "e" * 64


def numbered(seen: SeenRequest) -> Script:
    """Another text at every call."""
    numbered.calls += 1
    return Script((f" call-{numbered.calls}", " and", " more"))


@pytest.fixture(autouse=True)
def fresh() -> None:
    numbered.calls = 0


TWENTY = tuple(f" t{n}" for n in range(20))


def slow(seen: SeenRequest) -> Script:
    return Script(TWENTY, gap_s=0.01)


def gated(at: int = 0) -> tuple[asyncio.Event, Callable[[SeenRequest], Script]]:
    """A gate, and a script that waits at the token ``at`` for it to be opened."""
    gate = asyncio.Event()
    return gate, lambda seen: Script(TWENTY, gate=gate, gate_at=at)


def as_(api_key: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}", **more}


async def events(running: Running, body: dict, **headers: str) -> AsyncIterator[tuple[int | None, dict | str]]:
    """(id or None, event) of a stream as it comes."""
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    async with aiohttp.ClientSession() as session:
        async with session.post(running.base_url + COMPLETIONS, json={**body, "stream": True}, headers=named) as answer:
            assert answer.status == 200, await answer.text()
            number: int | None = None
            async for line in answer.content:
                if line.startswith(b"id: "):
                    number = int(line[4:])
                elif line.startswith(b"data: "):
                    data = line[6:].strip()
                    yield number, "[DONE]" if data == b"[DONE]" else json.loads(data)
                    number = None


def text(found: list[tuple[int | None, dict | str]]) -> str:
    return "".join(event["choices"][0]["text"] for _, event in found if isinstance(event, dict) and event["choices"])


async def test_the_same_deterministic_request_is_answered_from_the_cache_streamed_or_whole():
    async with FakeReplica(numbered, engine=ENGINE) as replica, gateway(replica) as running:
        status, headers, first = await running.post(COMPLETIONS, GREEDY)
        assert (status, headers["x-trident-cache"]) == (200, "miss")
        status, headers, again = await running.post(COMPLETIONS, GREEDY)
        assert headers["x-trident-cache"] == "hit" and again["id"] != first["id"]
        assert again["choices"] == first["choices"] and again["usage"] == first["usage"]
        found = [event async for event in events(running, GREEDY)]
        assert text(found) == first["choices"][0]["text"] and found[-1] == (None, "[DONE]")
        assert replica.counts.started == 1
        page = await running.metrics()
        assert page['trident_gateway_reuse_total{result="hit"}'] == 2
        assert page['trident_gateway_tokens_total{direction="output",source="engine",tenant="anonymous"}'] == 3


@pytest.mark.parametrize(
    "more", [{"temperature": 1}, {"seed": 5}, {"max_tokens": 5}, {"stop": ["x"]}, {"prompt": "one  two"}, {"n": 2}]
)
async def test_another_request_is_another_answer(more: dict):
    async with FakeReplica(numbered, engine=ENGINE) as replica, gateway(replica) as running:
        await running.post(COMPLETIONS, GREEDY)
        before = replica.counts.started
        _, headers, _ = await running.post(COMPLETIONS, {**GREEDY, **more})
        assert headers.get("x-trident-cache", "miss") == "miss" and replica.counts.started > before


async def test_callers_can_ask_for_a_new_answer_or_for_none_to_be_kept():
    async with FakeReplica(numbered, engine=ENGINE) as replica, gateway(replica) as running:
        for header in ({"cache_control": "no-store"}, {"x_trident_cache": "off"}):
            for _ in range(2):
                _, headers, _ = await running.post(COMPLETIONS, GREEDY, **header)
                assert "x-trident-cache" not in headers
        twice = [("cache-control", "max-age=60"), ("cache-control", "no-store")]
        async with aiohttp.ClientSession() as session:
            async with session.post(running.base_url + COMPLETIONS, json=GREEDY, headers=twice) as answer:
                assert answer.status == 200 and "x-trident-cache" not in answer.headers
        _, headers, old = await running.post(COMPLETIONS, GREEDY)
        assert headers["x-trident-cache"] == "miss"
        _, headers, new = await running.post(COMPLETIONS, GREEDY, cache_control="no-cache")
        assert headers["x-trident-cache"] == "miss" and new["choices"] != old["choices"]
        _, headers, latest = await running.post(COMPLETIONS, GREEDY)
        assert headers["x-trident-cache"] == "hit" and latest["choices"] == new["choices"]


async def test_another_engine_answers_for_itself_and_two_at_once_are_not_cached():
    async with FakeReplica(numbered, engine=ENGINE) as one, FakeReplica(numbered, engine=ENGINE) as two:
        async with gateway(one, two) as running:
            await running.post(COMPLETIONS, GREEDY)
            one.engine = "f" * 64
            await until(lambda: running.service.replicas.engine() == "")
            assert [(await running.post(COMPLETIONS, GREEDY))[1]["x-trident-cache"] for _ in range(2)] == ["miss"] * 2
            two.engine = "f" * 64
            await until(lambda: running.service.replicas.engine() == "f" * 64)
            message = [(await running.post(COMPLETIONS, GREEDY))[1]["x-trident-cache"] for _ in range(2)]
            assert message == ["miss", "hit"]


async def test_without_an_engines_hash_nothing_is_cached():
    async with FakeReplica(numbered) as replica, gateway(replica) as running:
        for _ in range(2):
            assert (await running.post(COMPLETIONS, GREEDY))[1]["x-trident-cache"] == "miss"
        assert replica.counts.started == 2


async def test_no_tenant_sees_what_another_asked_by_any_way():
    async with FakeReplica(numbered, engine=ENGINE) as replica, gateway(replica, config=keys(ALICE, BOB)) as running:
        _, _, mine = await running.post(COMPLETIONS, GREEDY, **as_(ALICE, idempotency_key="k"))
        _, headers, theirs = await running.post(COMPLETIONS, GREEDY, **as_(BOB, idempotency_key="k"))
        assert headers["x-trident-cache"] == "miss" and theirs["choices"] != mine["choices"]
        assert replica.counts.started == 2
        status, _, body = await running.post(
            COMPLETIONS, {**GREEDY, "stream": True}, **as_(BOB, idempotency_key="other", last_event_id="0")
        )
        assert status == 400 and "still kept" in body["error"]["message"]
        replica.script = slow
        request_body = {**GREEDY, "prompt": "slow"}
        answers = await asyncio.gather(*(running.post(COMPLETIONS, request_body, **as_(key)) for key in (ALICE, BOB)))
        assert [headers["x-trident-cache"] for _, headers, _ in answers] == ["miss", "miss"]


async def test_what_is_there_costs_a_request_and_no_tokens():
    limits = "tokens_per_minute = 600\nrequests_per_minute = 3"
    config = keys(ALICE, limits=limits)
    async with FakeReplica(numbered, engine=ENGINE) as replica, gateway(replica, config=config) as running:
        seen = [await running.post(COMPLETIONS, GREEDY, **as_(ALICE)) for _ in range(4)]
        assert [status for status, _, _ in seen] == [200, 200, 200, 429]
        assert [headers["x-ratelimit-remaining-requests"] for _, headers, _ in seen] == ["2", "1", "0", "0"]
        assert seen[1][1]["x-trident-cache"] == "hit" and "x-ratelimit-remaining-tokens" not in seen[1][1]
        assert int(seen[3][1]["retry-after"]) >= 1 and seen[3][2]["error"]["code"] == "rate_limit_exceeded"


async def test_identical_requests_under_way_share_one_engine_stream_and_each_may_leave():
    gate, script = gated(1)
    async with FakeReplica(script) as replica, gateway(replica) as running:
        pending = [asyncio.ensure_future(running.post(COMPLETIONS, {**GREEDY, "stream": False})) for _ in range(6)]
        streams = events(running, GREEDY)
        assert (await anext(streams))[1]["choices"][0]["text"] == " t0"
        await until(lambda: len(running.service.watchdog) >= 7)
        pending[0].cancel()  # the one for whom it was begun
        await streams.aclose()
        gate.set()
        answers = await asyncio.gather(*pending[1:])
        whole = "".join(TWENTY)
        assert all(body["choices"][0]["text"] == whole for _, _, body in answers)
        assert (replica.counts.started, replica.counts.cancelled) == (1, 0)
        assert {headers["x-trident-cache"] for _, headers, _ in answers} <= {"coalesced", "miss"}
        assert running.service.admission.running == 0


async def test_a_stream_of_another_class_or_key_is_not_joined():
    def script(seen: SeenRequest) -> Script:
        return Script((" t",) * seen.value("max_tokens"), gate=gate)

    gate, config = asyncio.Event(), keys(ALICE) + "[classes.background]\npriority = 7\nmax_tokens = 2\n"
    config += f'[orgs.o0.teams.t.keys.other]\nhash = "{digest(bytes.fromhex(SALT), BOB).hex()}"\n'
    async with FakeReplica(script) as replica, gateway(replica, config=config) as running:
        headers = (as_(ALICE, x_trident_class="background"), as_(ALICE), as_(BOB), as_(BOB))
        pending = [asyncio.ensure_future(running.post(COMPLETIONS, GREEDY, **named)) for named in headers]
        await until(lambda: replica.counts.running == 3)
        await until(lambda: len(running.service.watchdog) >= 4)
        gate.set()
        answers = await asyncio.gather(*pending)
        assert [body["usage"]["completion_tokens"] for _, _, body in answers] == [2, 4, 4, 4]
        assert sorted(headers["x-trident-cache"] for _, headers, _ in answers) == ["coalesced", "miss", "miss", "miss"]


async def test_the_last_reader_to_leave_frees_the_engine():
    async with FakeReplica(gated()[1]) as replica, gateway(replica) as running:
        pending = [asyncio.ensure_future(running.post(COMPLETIONS, GREEDY)) for _ in range(3)]
        await until(lambda: replica.counts.running == 1)
        for one in pending:
            one.cancel()
        await until(lambda: replica.counts.running == 0 and not running.service.live)
        assert replica.counts.cancelled == 1 and running.service.admission._concurrency.in_flight == 0


async def test_one_readers_deadline_is_not_the_others():
    gate, script = gated()
    async with FakeReplica(script) as replica, gateway(replica) as running:
        hurried = asyncio.ensure_future(running.post(COMPLETIONS, GREEDY, x_trident_timeout_s="1.5"))
        await until(lambda: replica.counts.running == 1)
        patient = asyncio.ensure_future(running.post(COMPLETIONS, GREEDY))
        assert (await hurried)[0] == 504
        gate.set()
        status, headers, body = await patient
        assert (status, headers["x-trident-cache"], body["usage"]["completion_tokens"]) == (200, "coalesced", 20)
        assert replica.counts.started == 1


async def test_an_answer_that_was_cut_short_under_load_is_not_kept():
    config = "[degradation]\nshorter_at = 0.0001\noverflow_at = 0.9\nmax_tokens = 2"
    request_body = {**GREEDY, "max_tokens": 6}
    async with FakeReplica(engine=ENGINE) as replica, gateway(replica, config=config) as running:
        replica.script = lambda seen: Script((" a",), stall_after=0)
        held = asyncio.ensure_future(running.post(COMPLETIONS, {**GREEDY, "prompt": "held"}))
        await until(lambda: replica.counts.running == 1)
        replica.script = lambda seen: Script(tuple(" a" for _ in range(seen.value("max_tokens"))))
        for _ in range(2):
            _, headers, body = await running.post(COMPLETIONS, request_body)
            assert headers["x-trident-degraded"] == "max_tokens=2" and headers["x-trident-cache"] == "miss"
            assert body["usage"]["completion_tokens"] == 2
        held.cancel()
        await until(lambda: not running.service.live)
        _, headers, body = await running.post(COMPLETIONS, request_body)
        assert "x-trident-degraded" not in headers and body["usage"]["completion_tokens"] == 6


async def test_a_retry_attaches_to_the_running_stream_and_to_the_finished_one():
    request_body = {**GREEDY, "temperature": 1}  # nothing that would be coalesced or cached
    gate, script = gated()
    async with FakeReplica(script) as replica, gateway(replica) as running:
        first = asyncio.ensure_future(running.post(COMPLETIONS, request_body, idempotency_key="k-1"))
        await until(lambda: replica.counts.running == 1)
        retrying = asyncio.ensure_future(running.post(COMPLETIONS, request_body, idempotency_key="k-1"))
        await until(lambda: len(running.service.watchdog) >= 2)
        gate.set()
        original, retry = await asyncio.gather(first, retrying)
        later = await running.post(COMPLETIONS, request_body, idempotency_key="k-1")
        assert original[2] == retry[2] == later[2]  # its id and the time it was created, too
        assert [one[1].get("x-trident-cache") for one in (original, retry, later)] == [None, "replayed", "replayed"]
        assert replica.counts.started == 1
        status, _, body = await running.post(COMPLETIONS, {**request_body, "prompt": "x"}, idempotency_key="k-1")
        assert status == 400 and body["error"]["param"] == "Idempotency-Key"


async def test_a_reader_that_was_cut_off_goes_on_after_its_last_event_without_the_engine():
    request_body = {**GREEDY, "temperature": 1, "stream_options": {"include_usage": True}, "n": 2}
    async with FakeReplica(slow) as replica, gateway(replica) as running:
        seen = []
        stream = events(running, request_body, idempotency_key="k")
        async for event in stream:
            seen.append(event)
            if len(seen) == 9:
                break
        await stream.aclose()
        assert [number for number, _ in seen] == list(range(9))
        rest = [event async for event in events(running, request_body, idempotency_key="k", last_event_id="8")]
        assert [number for number, _ in rest] == [*range(9, 40), None, None]
        assert rest[-2][1]["usage"]["completion_tokens"] == 40 and rest[-1] == (None, "[DONE]")
        for choice in (0, 1):
            texts = [e["choices"][0] for _, e in seen + rest if isinstance(e, dict) and e["choices"]]
            whole = "".join(one["text"] for one in texts if one["index"] == choice)
            assert whole == "".join(TWENTY)
        assert len({event["id"] for _, event in seen + rest if isinstance(event, dict)}) == 1
        assert replica.counts.started == 2 and replica.counts.cancelled == 0
        over = [event async for event in events(running, request_body, idempotency_key="k", last_event_id="39")]
        assert [event for _, event in over][-1] == "[DONE]" and len(over) == 2


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"last_event_id": "3"}, "Last-Event-ID"),
        ({"idempotency_key": "k", "last_event_id": "x"}, "Last-Event-ID"),
        ({"idempotency_key": "k", "last_event_id": "whole"}, "Last-Event-ID"),
        ({"idempotency_key": "k", "last_event_id": "5"}, "Last-Event-ID"),
        ({"idempotency_key": "k" * 300}, "Idempotency-Key"),
        ({"idempotency_key": "k", "cache_control": "no-store"}, "Idempotency-Key"),
    ],
)
async def test_headers_that_cannot_be_obeyed_are_refused_by_name(headers: dict[str, str], param: str):
    async with FakeReplica(numbered) as replica, gateway(replica) as running:
        request_body = {**GREEDY, "stream": headers.get("last_event_id") != "whole"}
        status, _, body = await running.post(COMPLETIONS, request_body, **headers)
        assert (status, body["error"]["param"]) == (400, param) and replica.counts.started == 0


async def test_a_refusal_of_the_shared_stream_reaches_every_reader_and_is_not_remembered():
    config = keys(ALICE, limits="tokens_per_minute = 100")
    request_body = {**GREEDY, "max_tokens": 60}
    async with FakeReplica(engine=ENGINE) as replica, gateway(replica, config=config) as running:
        spent = {**GREEDY, "prompt": "x", "max_tokens": 50, "temperature": 1}
        assert (await running.post(COMPLETIONS, spent, **as_(ALICE)))[0] == 200
        for headers in (as_(ALICE), as_(ALICE, idempotency_key="k")):
            answers = await asyncio.gather(*(running.post(COMPLETIONS, request_body, **headers) for _ in range(3)))
            assert [status for status, _, _ in answers] == [429] * 3
            assert all(int(message["retry-after-ms"]) > 0 for _, message, _ in answers)
        assert len(running.service.admission._concurrency._counts) == 0 and replica.counts.started == 1
