"""A client of an OpenAI-compatible server that serves overflowing requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import operator
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import orjson

from clients.replica_set import costs
from contract.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidArgument,
    Overloaded,
    PromptTooLong,
    TridentError,
    Unavailable,
)
from contract.generation import (
    FinishReason,
    GenerationRequest,
    Guide,
    SamplingParams,
    Sections,
    TokenDelta,
    ToolCallDelta,
    Usage,
)
from gateway.admission.budget_store import BudgetStore
from gateway.admission.budgets import Reservation
from gateway.config.policy import UpstreamEndpoint
from gateway.config.tenant import Level, Limits, Quota
from gateway.routing.circuit_breaker import Breaker, BreakerPolicy, BreakerState, blames_replica

_LOG = logging.getLogger(__name__)
CONNECT_S = 5.0
BELIEVED_S = 5.0  # other workers and gateways spend of a day's bound too, and return of it what they do not use
COOL_S = 1.0  # pause after a 429 without Retry-After
MAX_CONNECTIONS = 200
MAX_EVENT_BYTES = 1024 * 1024
_BYTES_PER_TOKEN = 4  # of a prompt, where an upstream does not count
# Parameters that OpenAI's protocol lacks, or that upstreams interpret differently.
_NEUTRAL = ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "log_probs", "top_log_probs")
_LOST: tuple[str, ...] = ("adapter", "continue_ids", "input_ids", "stop_token_ids")  # ids are of a pool's vocabulary
_LOST += ("bad_words", "chat_template_kwargs", "echo", "truncate_prompt_tokens")  # OpenAI refuses a long one
_SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
_PARAMETERS = frozenset({"messages", "tools", "prompt", "max_tokens", "stop", "seed", *_SAMPLING})


class Upstream:
    """One endpoint of an upstream, with a circuit breaker.

    model: where the endpoint has none of its own. budgets: keeps what its day may cost. totals: what each upstream has
    cost, by name, in the currency of its prices.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        name: str,
        endpoint: UpstreamEndpoint,
        model: str,
        breaker: BreakerPolicy,
        budgets: BudgetStore | None = None,
        totals: dict[str, float] | None = None,
    ) -> None:
        self._session, self._endpoint, self._policy = session, endpoint, breaker
        self._model, self._api_key = endpoint.model or model, endpoint.api_key
        self.name, self.url = name, endpoint.url.rstrip("/")
        self.breaker = Breaker()
        self.outstanding = 0
        self.first_s = self.errors = 0.0  # means of the latest: time to first token, share of failures
        self._budgets, self._totals = budgets, {} if totals is None else totals
        self._left, self._left_until_s = 0, 0.0  # millionths of the day's bound, and how long that is believed
        self._cool_until_s = 0.0

    def accepts(self, request: GenerationRequest) -> bool:
        """Return whether it can serve the request now."""
        bounded = self._endpoint.spend_per_day is not None and time.time() < self._left_until_s
        affordable = not bounded or self.cost(request) <= self._left
        return affordable and self.understands(request) and self.wait_s() <= 0

    def cost(self, request: GenerationRequest) -> int:
        """Return what the request costs at most, by its estimated prompt, in millionths of the currency."""
        return self._endpoint.price.micros(Usage(_prompt_tokens(request), request.max_tokens))

    def weight(self, slowest_s: float) -> float:
        """Return its weight among the endpoints of a target. slowest_s: the longest mean time to first token there."""
        return (1.0 - self.errors) ** 4 * slowest_s / (self.first_s or slowest_s) if slowest_s else 1.0

    async def reserve(self, request: GenerationRequest) -> Spend:
        """Return the reserved cost of a request. Raises Unavailable if the day may cost no more."""
        limit, micros = self._endpoint.spend_per_day, self.cost(request)
        if limit is None or self._budgets is None:
            return Spend(self)
        level = Level(f"upstream {self.name}", Limits(quotas=(Quota("day", True, round(limit * 10**6)),)))
        reservation = await self._budgets.reserve((level,), 0, micros=micros)
        self._left, self._left_until_s = int(reservation.standings[0].balance), time.time() + BELIEVED_S
        if not reservation.granted:
            error = Unavailable(f"{self.name} may cost no more today: spend_per_day")
            error.internal = True
            raise error
        return Spend(self, reservation, micros)

    @property
    def total(self) -> float:
        """What it has cost."""
        return self._totals.get(self.name, 0.0)

    def spent(self, spend: Spend, usage: Usage | None) -> None:
        """Take note of what a request did cost."""
        micros = self._endpoint.price.micros(usage) if usage is not None else 0
        self._totals[self.name] = self.total + micros / 1e6
        if self._budgets is not None and spend.reservation is not None:
            self._budgets.settle(spend.reservation, 0, micros)
            self._left += spend.micros - micros

    def began(self, sent_s: float) -> None:
        """Take note of the first tokens of a request. sent_s: when it was sent."""
        self.first_s += (time.monotonic() - sent_s - self.first_s) * (0.2 if self.first_s else 1.0)
        self.breaker = self.breaker.began(self._policy, sent_s)

    def understands(self, request: GenerationRequest) -> bool:
        """Return whether OpenAI's protocol can express the request."""
        if any(getattr(request.sampling, name) != getattr(SamplingParams, name) for name in _NEUTRAL):
            return False
        if any(getattr(request, name) != getattr(GenerationRequest, name) for name in _LOST):
            return False
        if request.tools is not None:  # a guide of calls and the special tokens are what a replica needs for them
            return request.guide is None or not _holds_answer(request.guide)
        return request.guide is None and request.skip_special_tokens

    def wait_s(self) -> float:
        """Return the seconds until it accepts requests: its Retry-After and its breaker; 0 or less for now."""
        now_s = time.monotonic()
        # Half open, the trial under way decides; it is unknown when.
        pause_s = 0.0 if self.breaker.allows(now_s) else max(self.breaker.until_s - now_s, 1.0)
        return max(self._cool_until_s - now_s, pause_s)

    def stream(self, request: GenerationRequest, spend: Spend, traceparent: str = "") -> UpstreamStream:
        """Send the request and return its stream. spend: of ``reserve``. Needs a running event loop."""
        self.breaker = self.breaker.sent(time.monotonic())
        self.outstanding += 1
        return UpstreamStream(self, self._events(request, traceparent), request, spend)

    def over(self, error: TridentError | None, silent_s: float, sent_s: float) -> None:
        self.outstanding -= 1
        now_s = time.monotonic()
        failed = blames_replica(error, silent_s) or isinstance(error, Overloaded)
        self.errors += 0.1 * (0.99 * failed - self.errors)  # below 1, so that it is tried again
        before, self.breaker = self.breaker, self.breaker.over(error, silent_s, now_s, self._policy, sent_s)
        if self.breaker.state is BreakerState.OPEN and before.state is not BreakerState.OPEN:
            _LOG.warning("upstream %s: the breaker opens for %g s after: %s", self.name, self.breaker.pause_s, error)

    async def _events(self, request: GenerationRequest, traceparent: str) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of the stream. Raises TridentError."""
        path = "/completions" if request.messages is None else "/chat/completions"
        headers = {"authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        headers |= {"traceparent": traceparent} if traceparent else {}
        timeout = aiohttp.ClientTimeout(total=request.timeout_s, sock_connect=CONNECT_S)
        try:
            async with self._session.post(
                self.url + path,
                json=_body(request, self._model),
                headers=headers,
                timeout=timeout,
                read_bufsize=MAX_EVENT_BYTES,
                allow_redirects=False,
            ) as answer:
                if answer.status != 200:
                    raise self._refused(answer, await answer.content.read(4096))
                async for line in answer.content:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    event = orjson.loads(data)
                    if not isinstance(event, dict) or event.get("error"):
                        raise EngineFailed(f"{self.name} failed midway: {_message(data)}")
                    yield event
        except (asyncio.TimeoutError, aiohttp.ClientError, OSError, ValueError) as exc:
            if isinstance(exc, asyncio.TimeoutError) and not isinstance(exc, aiohttp.ServerTimeoutError):
                raise DeadlineExceeded(f"the deadline passed while {self.name} was answering") from exc
            raise Unavailable(f"{self.name} cannot be reached or read: {type(exc).__name__}: {exc}") from exc

    def _refused(self, answer: aiohttp.ClientResponse, body: bytes) -> TridentError:
        """Return the error of a status other than 200. Its text is internal: it may name the account there."""
        status, message = answer.status, f"{self.name} answered {answer.status}: {_message(body)}"
        if status in (400, 413, 422):
            return _invalid(message, body)
        wait_s = retry_after_s(answer.headers)
        if wait_s is not None or status == 429:
            self._cool_until_s = max(self._cool_until_s, time.monotonic() + (COOL_S if wait_s is None else wait_s))
        # Its keys and models are our configuration, so a wrong one is no fault of the caller's.
        return Overloaded(message, wait_s) if status == 429 else Unavailable(message, wait_s)


@dataclass
class Spend:
    """The reserved cost of one request at an upstream; ``settle`` it in any case."""

    upstream: Upstream
    reservation: Reservation | None = None
    micros: int = 0
    settled: bool = False

    def settle(self, usage: Usage | None) -> None:
        """Charge ``usage`` instead. A second call does nothing."""
        if not self.settled:
            self.settled = True
            self.upstream.spent(self, usage)


class UpstreamStream:
    """One generation at an upstream: deltas, the last with ``finish_reason``; raises TridentError. ``cancel`` ends it
    from any task; a waiting reader gets Cancelled."""

    attempts = 1
    message, deferred_error, finished = b"", None, False  # see TokenStream; upstreams send no messages to relay

    def __init__(
        self, upstream: Upstream, events: AsyncIterator[dict[str, Any]], request: GenerationRequest, spend: Spend
    ) -> None:
        self._upstream, self._request, self._spend = upstream, request, spend
        self.url = upstream.url
        self._arrived: asyncio.Queue[TokenDelta | TridentError | None] = asyncio.Queue(maxsize=64)
        self._sent_s = time.monotonic()
        self._tokens = 0
        self._counted: Usage | None = None
        self._over = False
        self._failure: TridentError | None = None
        self._reading = asyncio.ensure_future(self._read(events))
        self._reading.add_done_callback(self._ended)

    async def __anext__(self) -> TokenDelta:
        if self._over:
            raise StopAsyncIteration
        item = await self._arrived.get()
        if isinstance(item, TokenDelta):
            return item
        self._over = True
        if item is None:
            raise StopAsyncIteration
        raise item

    def cancel(self) -> None:
        self._reading.cancel()

    def abandon(self, error: TridentError) -> None:
        """End it with ``error``, which its reader sees, as a failure of the upstream: it was silent."""
        self._failure = error
        self.cancel()

    async def _read(self, events: AsyncIterator[dict[str, Any]]) -> TridentError | None:
        """Return how it ended."""
        end: TridentError | None = None
        try:
            async for delta in self._deltas(events):
                await self._arrived.put(delta)
        except TridentError as exc:
            end = exc
        await self._arrived.put(end)
        return end

    def _ended(self, reading: asyncio.Task) -> None:
        self._spend.settle(self._counted or (self._estimated() if self._tokens else None))
        silent_s = 0.0 if self._tokens else time.monotonic() - self._sent_s
        if reading.cancelled():
            end, silent_s = self._failure or Cancelled("the stream was left"), math.inf
        elif (malformed := reading.exception()) is not None:
            end = EngineFailed(f"{self._upstream.name} sent a malformed event: {malformed}")
        else:
            self._upstream.over(reading.result(), silent_s, self._sent_s)
            return
        while not self._arrived.empty():
            self._arrived.get_nowait()
        self._arrived.put_nowait(end)
        self._upstream.over(end, silent_s, self._sent_s)

    async def _deltas(self, events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[TokenDelta]:
        """Yield text as it arrives; the end waits for the usage that follows it."""
        reason: FinishReason | None = None
        counted: Usage | None = None
        async for event in events:
            counted = usage_of(event.get("usage")) or counted
            for choice in event.get("choices") or ():
                added = choice.get("delta") or {}
                text, sections = _text(choice.get("text") or added.get("content")), _sections(added)
                if text or sections:
                    if not self._tokens:
                        self._upstream.began(self._sent_s)
                    self._tokens += 1
                    yield TokenDelta(text=text, sections=sections)
                if end := choice.get("finish_reason"):
                    reason = FinishReason.LENGTH if end == "length" else FinishReason.STOP
        if reason is None:
            raise Unavailable(f"{self._upstream.name} closed the stream before its end")
        self._counted = counted or self._estimated()
        yield TokenDelta(finish_reason=reason, usage=self._counted)

    def _estimated(self) -> Usage:
        """Return the usage of a stream that was not counted."""
        return Usage(_prompt_tokens(self._request), self._tokens)


def _prompt_tokens(request: GenerationRequest) -> int:
    return math.ceil(costs.prompt_bytes(request) / _BYTES_PER_TOKEN)


def _holds_answer(guide: Guide) -> bool:
    """Return whether the guide of a request with tools is not that of its calls alone, as the gateway makes it."""
    if guide.kind != "structural_tag":
        return True
    try:
        last = orjson.loads(guide.text)["format"]
        while '{"name": "' not in last.get("begin", ""):  # calls stand before the format of an answer
            last = (last.get("elements") or last.get("tags") or [last["content"]])[-1]
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
        return True
    return False


def _turn(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a turn for OpenAI's protocol: without reasoning, and with null for the text of one that only calls."""
    turn = {name: value for name, value in message.items() if name != "reasoning_content"}
    return {**turn, "content": turn.get("content") or None} if turn.get("tool_calls") else turn


def _body(request: GenerationRequest, model: str) -> dict[str, Any]:
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": request.max_tokens,
        **{name: getattr(sampling, name) for name in _SAMPLING},
    }
    if request.messages is None:
        body["prompt"] = request.text_input
    else:
        body["messages"] = [_turn(message) for message in request.messages]
    if request.tools is not None:
        body |= {"tools": orjson.loads(request.tools), "parallel_tool_calls": request.parallel_tool_calls}
        body["tool_choice"] = request.tool_choice
    if request.stop:
        body["stop"] = list(request.stop)
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    return body


def _invalid(message: str, body: bytes) -> InvalidArgument:
    """Return the error of a refusal; it names the parameter at fault, if that is one that was sent."""
    error: Any = {}
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = orjson.loads(body)["error"]
    param, code = (error.get("param"), error.get("code")) if isinstance(error, dict) else (None, None)
    kind = PromptTooLong if code == "context_length_exceeded" else InvalidArgument
    refused = kind(param if isinstance(param, str) and param in _PARAMETERS else "", message)
    refused.internal = True
    return refused


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that ``retry-after-ms`` or ``retry-after`` (seconds or a date) ask for, at most an hour."""
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        text = headers.get(name, "")
        try:
            wait_s = float(text) * scale
        except ValueError:
            try:
                wait_s = parsedate_to_datetime(text).timestamp() - time.time()
            except (ValueError, TypeError, OverflowError):
                continue
        if math.isfinite(wait_s):
            return min(max(wait_s, 0.0), 3600.0)
    return None


def _text(value: Any) -> str:
    """Return a text of an event, "" for none. Raises TypeError."""
    if not isinstance(value or "", str):
        raise TypeError(f"a text was expected, got {value!r:.80}")
    return value or ""


def usage_of(fields: Any) -> Usage | None:
    """Return the usage that OpenAI's ``usage`` tells; None where it is missing or cannot be right."""
    if not isinstance(fields, dict):
        return None
    cached = (fields.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    reasoning = (fields.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    counts: list[Any] = [fields.get("prompt_tokens"), fields.get("completion_tokens"), cached, reasoning]
    if any(type(count) is not int or not 0 <= count < 2**31 for count in counts):
        return None
    prompt, output, *_ = counts
    return Usage(prompt, output, min(cached, prompt), reasoning)


def _sections(added: Mapping[str, Any]) -> Sections | None:
    """Return the tool calls and the reasoning of a chunk's delta."""
    reasoning, calls = _text(added.get("reasoning_content") or added.get("reasoning")), []
    for call in added.get("tool_calls") or ():
        function = call.get("function") or {}
        named = (_text(call.get("id")), _text(function.get("name")), _text(function.get("arguments")))
        calls.append(ToolCallDelta(operator.index(call.get("index") or 0), *named))
    return Sections(reasoning, tuple(calls)) if reasoning or calls else None


def _message(body: bytes) -> str:
    """Return the message of an error body, or the beginning of the body."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(orjson.loads(body)["error"]["message"])[:300]
    return body[:300].decode(errors="replace")
