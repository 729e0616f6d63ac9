"""One upstream that speaks OpenAI's protocol: what it understands, its streams, its refusals, its breaker."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import AsyncIterator
from email.utils import formatdate
from typing import Any

import aiohttp
import pytest

from contract.errors import Cancelled, EngineFailed, InvalidArgument, Overloaded, PromptTooLong, Unavailable
from contract.generation import (
    FinishReason,
    GenerationRequest,
    Guide,
    SamplingParams,
    Sections,
    ToolCallDelta,
    Usage,
)
from gateway.admission.budget_store import MemoryStore
from gateway.config.policy import ModelPrice, UpstreamEndpoint
from gateway.routing import upstream as module
from gateway.routing.circuit_breaker import Breaker, BreakerPolicy, BreakerState
from gateway.routing.upstream import Upstream, retry_after_s
from gateway.tools.chat_format import HERMES, LLAMA3, MISTRAL, NONE, OPEN, TAGGED, ChatFormat
from gateway.tools.guide import tool_guide
from tests.gateway.openai_upstream import OpenAIUpstream, upstream
from tests.gateway.running import until

CALLABLE = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
REQUEST = GenerationRequest("one two", max_tokens=5, timeout_s=60.0)


@contextlib.asynccontextmanager
async def target(**script: Any) -> AsyncIterator[tuple[Upstream, OpenAIUpstream]]:
    async with upstream(**script) as server, aiohttp.ClientSession() as session:
        endpoint = UpstreamEndpoint(url=server.url, api_key="key")
        yield Upstream(session, "far", endpoint, "m", BreakerPolicy(failures=2, open_s=60.0)), server


async def read(far: Upstream, request: GenerationRequest = REQUEST) -> list[Any]:
    stream, deltas = far.stream(request, await far.reserve(request)), []
    with contextlib.suppress(StopAsyncIteration):
        while True:
            deltas.append(await anext(stream))
    return deltas


async def test_a_stream_ends_with_a_reason_and_the_upstreams_own_counts():
    async with target() as (far, server):
        deltas = await read(far)
        assert "".join(delta.text for delta in deltas) == " from afar"
        assert (deltas[-1].finish_reason, deltas[-1].usage) == (FinishReason.STOP, Usage(7, 2))
        path, headers, body = server.seen[0]
        assert path == "/v1/completions" and headers["authorization"] == "Bearer key"
        assert (body["model"], body["prompt"], body["max_tokens"]) == ("m", "one two", 5)
        await until(lambda: far.outstanding == 0)


async def test_an_event_that_says_there_is_no_error_is_none():
    async with target(more={"error": None}) as (far, _):
        assert "".join(delta.text for delta in await read(far)) == " from afar"


async def test_a_chat_without_counts_is_estimated():
    chat = GenerationRequest(messages=({"role": "user", "content": "hello"},), max_tokens=5, timeout_s=60.0)
    async with target(usage=False) as (far, server):
        assert (await read(far, chat))[-1].usage.output_tokens == 2
        assert server.seen[0][0] == "/v1/chat/completions"


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ({"status": 429, "headers": {"retry-after": "7"}}, Overloaded),
        ({"status": 503}, Unavailable),
        ({"status": 401}, Unavailable),
        ({"status": 307, "headers": {"location": "/v1/completions"}}, Unavailable),
        ({"status": 400, "error": {"error": {"message": "no", "param": "seed"}}}, InvalidArgument),
        ({"status": 400, "error": {"error": {"code": "context_length_exceeded"}}}, PromptTooLong),
        ({"cut_after": 1}, Unavailable),
        ({"broken_after": 1}, EngineFailed),
    ],
)
async def test_failures_become_typed_errors(script: dict[str, Any], kind: type[Exception]):
    async with target(**script) as (far, server):
        with pytest.raises(kind) as caught:
            await read(far)
        assert len(server.seen) == 1  # no redirect is followed: the key and the prompt are for this upstream
        if kind in (InvalidArgument, PromptTooLong):
            assert caught.value.internal
        if script.get("status") == 429:
            assert caught.value.retry_after_s == 7 and 6 < far.wait_s() <= 7 and not far.accepts(REQUEST)


async def test_one_that_does_not_accept_in_time_cannot_be_reached(monkeypatch):
    """The deadline of the request is still far: another target can serve it."""
    monkeypatch.setattr(module, "CONNECT_S", 0.2)
    with contextlib.ExitStack() as sockets:
        full = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # what the system accepts for a server that does not, and more
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        async with aiohttp.ClientSession() as session:
            endpoint = UpstreamEndpoint(url=f"http://127.0.0.1:{full.getsockname()[1]}/v1")
            with pytest.raises(Unavailable, match="far cannot be reached or read: ConnectionTimeoutError"):
                await read(Upstream(session, "far", endpoint, "m", BreakerPolicy()))


@pytest.mark.parametrize(
    "delta",
    [
        {"content": [{"type": "thinking"}]},
        {"reasoning_content": ["why"]},
        {"tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
        {"tool_calls": [{"index": "0", "function": {"name": "f"}}]},
        {"tool_calls": 1},
    ],
)
async def test_a_malformed_event_ends_the_stream_as_a_failure(delta: dict[str, Any]):
    chat = GenerationRequest(messages=({"role": "user", "content": "hello"},), max_tokens=5, timeout_s=60.0)
    async with target(texts=(delta,)) as (far, _):
        with pytest.raises(EngineFailed, match="malformed event"):
            await asyncio.wait_for(read(far, chat), 60)
        assert far.outstanding == 0 and far.breaker.failures == 1


async def test_a_failure_that_was_not_foreseen_ends_the_stream_too(monkeypatch: pytest.MonkeyPatch):
    async def broken(request: GenerationRequest, traceparent: str) -> AsyncIterator[dict[str, Any]]:
        yield {"choices": [{"text": " one"}]}
        raise OverflowError("too large")

    async with target() as (far, _):
        monkeypatch.setattr(far, "_events", broken)
        with pytest.raises(EngineFailed, match="too large"):
            await asyncio.wait_for(read(far), 60)
        assert far.outstanding == 0


@pytest.mark.parametrize(
    ("said", "usage"),
    [
        ({"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}}, Usage(7, 2, 5)),
        ({"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 9}}, Usage(7, 2, 7)),
        ({"prompt_tokens": 7, "completion_tokens": -1000}, Usage(2, 2)),
        ({"prompt_tokens": 7.5, "completion_tokens": 2}, Usage(2, 2)),
        ({"prompt_tokens": 7, "completion_tokens": 10**30}, Usage(2, 2)),
    ],
)
async def test_counts_that_cannot_be_right_are_estimated(said: dict[str, Any], usage: Usage):
    async with target(usage=said) as (far, _):
        assert (await read(far))[-1].usage == usage


async def test_a_trial_closes_the_breaker_at_its_first_token():
    async with target(gap_s=60.0) as (far, _):
        far.breaker = Breaker(BreakerState.OPEN, 2, 10.0)
        stream = far.stream(REQUEST, await far.reserve(REQUEST))
        assert not far.accepts(REQUEST)
        assert (await anext(stream)).text == " from" and far.accepts(REQUEST)
        stream.cancel()


async def test_consecutive_failures_open_its_breaker():
    async with target(status=503) as (far, _):
        for _ in range(2):
            with pytest.raises(Unavailable):
                await read(far)
        await until(lambda: far.breaker.state is BreakerState.OPEN)
        assert not far.accepts(REQUEST) and far.wait_s() > 50


async def test_a_cancelled_stream_raises_cancelled_and_frees_the_upstream():
    async with target(hangs=True) as (far, _):
        stream = far.stream(REQUEST, await far.reserve(REQUEST))
        stream.cancel()
        with pytest.raises(Cancelled):
            await anext(stream)
        assert far.outstanding == 0 and far.breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize(
    "change",
    [
        {"stop_token_ids": (1,)},
        {"echo": True},
        {"guide": Guide("json")},
        {"input_ids": (1, 2), "text_input": None},
        {"truncate_prompt_tokens": -1},
        {"continue_ids": (1, 2)},
        {"bad_words": ("x",)},
        {"skip_special_tokens": False},
        {"sampling": SamplingParams(top_k=4)},
        {"sampling": SamplingParams(log_probs=True)},
    ],
)
async def test_requests_that_openais_protocol_cannot_express_are_not_accepted(change: dict[str, Any]):
    async with aiohttp.ClientSession() as session:
        far = Upstream(session, "far", UpstreamEndpoint(url="http://x/v1"), "m", BreakerPolicy())
        assert far.understands(REQUEST)
        assert not far.understands(GenerationRequest(**{"text_input": "one", "max_tokens": 5, **change}))


@pytest.mark.parametrize("reasoning", [NONE, TAGGED, OPEN])
@pytest.mark.parametrize("tools", [HERMES, LLAMA3, MISTRAL])
async def test_tools_are_understood_and_a_format_of_the_answer_beside_them_is_not(tools: Any, reasoning: Any):
    form, tag = ChatFormat(tools, reasoning), {"type": "tag", "begin": "a", "content": {"type": "any_text"}, "end": "b"}
    answers = (
        Guide("json"),
        Guide("json_schema", '{"type": "object"}'),
        Guide("choice", '["a", "b"]'),
        Guide("structural_tag", json.dumps({"type": "structural_tag", "format": tag})),
    )
    calls = [
        tool_guide(CALLABLE, choice, several, form) for choice in ("auto", "required", "f") for several in (True, False)
    ]
    formats = [*answers, *(tool_guide(CALLABLE, "auto", False, form, answer) for answer in answers)]
    asked = GenerationRequest(messages=({"role": "user", "content": "a"},), tools=json.dumps(CALLABLE))
    async with aiohttp.ClientSession() as session:
        far = Upstream(session, "far", UpstreamEndpoint(url="http://x/v1"), "m", BreakerPolicy())
        assert all(far.understands(dataclasses.replace(asked, guide=guide)) for guide in (None, *calls))
        assert not any(far.understands(dataclasses.replace(asked, guide=guide)) for guide in formats)


def test_retry_after_is_seconds_milliseconds_or_a_date_within_an_hour():
    assert retry_after_s({"retry-after": "3"}) == 3 and retry_after_s({"retry-after-ms": "250"}) == 0.25
    assert retry_after_s({"retry-after": "99999"}) == 3600 and retry_after_s({"retry-after": "-1"}) == 0
    assert 0 <= retry_after_s({"retry-after": formatdate(time.time() + 60)}) <= 60
    assert retry_after_s({"retry-after": "Wed, 21 Oct 99999999999999999999 07:28:00 GMT"}) is None
    assert retry_after_s({"retry-after": "soon"}) is None and retry_after_s({}) is None


async def test_tools_go_there_and_calls_come_back():
    call = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}
    pieces = ({"reasoning_content": "why"}, {"tool_calls": [call]}, {"tool_calls": [{"function": {"arguments": "{}"}}]})
    asked = {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "before"}
    request = GenerationRequest(
        messages=({"role": "user", "content": "hello"}, asked),
        tools=json.dumps(CALLABLE),
        tool_choice="required",
        parallel_tool_calls=False,
        guide=tool_guide(CALLABLE, "required", False, ChatFormat(HERMES)),
        skip_special_tokens=False,
        timeout_s=60.0,
    )
    async with target(texts=pieces) as (far, server):
        assert far.understands(request)
        *deltas, end = await read(far, request)
        assert [delta.sections for delta in deltas] == [
            Sections("why"),
            Sections("", (ToolCallDelta(0, "a", "f"),)),
            Sections("", (ToolCallDelta(0, "", "", "{}"),)),
        ]
        assert end.finish_reason is FinishReason.STOP
        _, _, body = server.seen[0]
        assert (body["tools"][0]["function"]["name"], body["tool_choice"]) == ("f", "required")
        assert body["parallel_tool_calls"] is False
        assert body["messages"][1] == {"role": "assistant", "content": None, "tool_calls": [call]}


async def test_what_a_day_may_cost_is_never_exceeded_and_the_next_day_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 86_400.0 * 20_000
    monkeypatch.setattr(time, "time", lambda: now_s)
    price = ModelPrice(input=1.0, output=1.0)  # the upstream counts 7 and 2 tokens: 0.009 an answer; at most 0.007
    async with upstream() as server, aiohttp.ClientSession() as session:
        endpoint = UpstreamEndpoint(url=server.url, price=price, spend_per_day=0.017)
        far = Upstream(session, "far", endpoint, "m", BreakerPolicy(), MemoryStore(time.monotonic, wall=time.time))
        assert far.cost(REQUEST) == 7000
        served = 0
        while far.accepts(REQUEST):
            await read(far)
            served += 1
            await until(lambda: far.outstanding == 0)
        assert served == 2 and far.total == pytest.approx(0.018)
        with pytest.raises(Unavailable, match="spend_per_day"):
            await far.reserve(REQUEST)
        now_s += 86_400.0
        assert far.accepts(REQUEST)
        (await far.reserve(REQUEST)).settle(None)


async def test_what_runs_counts_for_the_bound_of_a_day() -> None:
    price = ModelPrice(input=1.0, output=1.0)
    async with upstream() as server, aiohttp.ClientSession() as session:
        endpoint = UpstreamEndpoint(url=server.url, price=price, spend_per_day=0.017)
        budgets = MemoryStore(time.monotonic)
        far = Upstream(session, "far", endpoint, "m", BreakerPolicy(), budgets)
        running = [far.stream(REQUEST, await far.reserve(REQUEST)) for _ in range(2)]
        assert not far.accepts(REQUEST)
        with pytest.raises(Unavailable, match="spend_per_day"):
            await far.reserve(REQUEST)
        for stream in running:
            stream.cancel()
        await until(lambda: far.outstanding == 0)
        (await far.reserve(REQUEST)).settle(None)
        other = Upstream(session, "far", endpoint, "m", BreakerPolicy(), budgets)  # another worker's
        await other.reserve(REQUEST)
        await other.reserve(REQUEST)
        assert far.accepts(REQUEST) and not other.accepts(REQUEST)
        with pytest.raises(Unavailable, match="spend_per_day"):
            await far.reserve(REQUEST)
        assert not far.accepts(REQUEST)
