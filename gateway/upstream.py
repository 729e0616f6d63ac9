"""A server elsewhere that speaks OpenAI's protocol, as one more place where a generation can be made."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson

from clients import costs
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
from contract.generation import FinishReason, GenerationRequest, SamplingParams, TokenDelta, Usage
from gateway.health import Breaker, BreakerPolicy

CONNECT_S = 5.0
MAX_CONNECTIONS = 200
MAX_EVENT_BYTES = 1024 * 1024
_BYTES_PER_TOKEN = 4  # of a prompt, where an upstream does not count
# What OpenAI's protocol cannot say, or what an upstream may do otherwise than our engines.
_NEUTRAL = ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "log_probs", "top_log_probs")
_SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
_PARAMETERS = frozenset({"messages", "prompt", "max_tokens", "stop", "seed", *_SAMPLING})
_ENDS = {"length": FinishReason.LENGTH}


class Upstream:
    """One upstream. url: up to and with ``/v1``. Its breaker opens after failures in a row, as a replica's does."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        name: str,
        url: str,
        model: str,
        api_key: str,
        breaker: BreakerPolicy,
    ) -> None:
        self._session, self._model, self._api_key, self._policy = session, model, api_key, breaker
        self.name, self.url = name, url.rstrip("/")
        self.breaker = Breaker()
        self.outstanding = 0

    def takes(self, request: GenerationRequest) -> bool:
        """Whether it is fit, and the request asks for nothing that is lost on the way."""
        plain = all(getattr(request.sampling, name) == getattr(SamplingParams(), name) for name in _NEUTRAL)
        lost = request.stop_token_ids or request.json_schema or request.echo or not request.skip_special_tokens
        return plain and not lost and self.breaker.allows(time.monotonic())

    def stream(self, request: GenerationRequest, traceparent: str = "") -> UpstreamStream:
        """Sent at once. Made inside a running event loop."""
        self.breaker = self.breaker.sent(time.monotonic())
        self.outstanding += 1
        return UpstreamStream(self, self._events(request, traceparent), request)

    def over(self, error: TridentError | None, silent_s: float) -> None:
        self.outstanding -= 1
        self.breaker = self.breaker.over(error, silent_s, time.monotonic(), self._policy)

    async def _events(self, request: GenerationRequest, traceparent: str) -> AsyncIterator[dict[str, Any]]:
        """The stream's events as tables. Raises what went wrong as TridentError."""
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
                    if not isinstance(event, dict) or "error" in event:
                        raise EngineFailed(f"{self.name} failed midway: {_said(data)}")
                    yield event
        except asyncio.TimeoutError as exc:
            raise DeadlineExceeded(f"the deadline passed while {self.name} was answering") from exc
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            raise Unavailable(f"{self.name} cannot be reached or read: {type(exc).__name__}: {exc}") from exc

    def _refused(self, answer: aiohttp.ClientResponse, body: bytes) -> TridentError:
        """The error that a status other than 200 means. All of it is internal: it may speak of our account there."""
        status, said = answer.status, f"{self.name} answered {answer.status}: {_said(body)}"
        if status in (400, 413, 422):
            return _invalid(said, body)
        if status == 429:
            error = Overloaded(said)
            with contextlib.suppress(ValueError):
                wait_s = float(answer.headers.get("retry-after-ms", "nan")) / 1e3
                wait_s = wait_s if math.isfinite(wait_s) else float(answer.headers.get("retry-after", "nan"))
                error.retry_after_s = min(max(wait_s, 0.0), 3600.0) if math.isfinite(wait_s) else None
            return error
        # Its keys and models are our configuration, so a wrong one is no fault of the caller's.
        return Unavailable(said)


class UpstreamStream:
    """One generation there: deltas that end with one that has ``finish_reason``; errors are raised, typed.

    ``cancel`` ends it from any task; a reader that waits sees Cancelled.
    """

    attempts = 1

    def __init__(self, upstream: Upstream, events: AsyncIterator[dict[str, Any]], request: GenerationRequest) -> None:
        self._upstream, self._request = upstream, request
        self.url = upstream.url
        self._arrived: asyncio.Queue[TokenDelta | TridentError | None] = asyncio.Queue(maxsize=64)
        self._sent_s = time.monotonic()
        self._tokens = 0
        self._over = False
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
        if not self._reading.done():
            self._reading.cancel()

    async def _read(self, events: AsyncIterator[dict[str, Any]]) -> TridentError | None:
        """Returns how it ended."""
        end: TridentError | None = None
        try:
            async for delta in self._deltas(events):
                await self._arrived.put(delta)
        except TridentError as exc:
            end = exc
        except (AttributeError, TypeError) as exc:
            end = EngineFailed(f"{self._upstream.name} sent an event that is none of OpenAI's: {exc}")
        await self._arrived.put(end)
        return end

    def _ended(self, reading: asyncio.Task) -> None:
        if not reading.cancelled():
            self._upstream.over(reading.result(), 0.0 if self._tokens else time.monotonic() - self._sent_s)
            return
        left = Cancelled("the stream was left")
        while not self._arrived.empty():
            self._arrived.get_nowait()
        self._arrived.put_nowait(left)
        self._upstream.over(left, 0.0)

    async def _deltas(self, events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[TokenDelta]:
        """Its text as it comes; the end is held back until the tokens have been counted, behind it."""
        reason: FinishReason | None = None
        counted: Usage | None = None
        async for event in events:
            counted = _usage(event.get("usage")) or counted
            for choice in event.get("choices") or ():
                text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                if text:
                    self._tokens += 1
                    yield TokenDelta(text=text)
                if choice.get("finish_reason"):
                    reason = _ENDS.get(choice["finish_reason"], FinishReason.STOP)
        if reason is None:
            raise Unavailable(f"{self._upstream.name} closed the stream before its end")
        prompt_tokens = math.ceil(costs.prompt_bytes(self._request) / _BYTES_PER_TOKEN)
        yield TokenDelta(finish_reason=reason, usage=counted or Usage(prompt_tokens, self._tokens))


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
        body["messages"] = list(request.messages)
    if request.stop:
        body["stop"] = list(request.stop)
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    return body


def _invalid(said: str, body: bytes) -> InvalidArgument:
    """A refusal that names the request's parameter at fault, if that is one we sent."""
    error: Any = {}
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = orjson.loads(body)["error"]
    param, code = (error.get("param"), error.get("code")) if isinstance(error, dict) else (None, None)
    kind = PromptTooLong if code == "context_length_exceeded" else InvalidArgument
    refused = kind(param if isinstance(param, str) and param in _PARAMETERS else "", said)
    refused.internal = True
    return refused


def _usage(said: Any) -> Usage | None:
    if not isinstance(said, dict):
        return None
    prompt, output = said.get("prompt_tokens"), said.get("completion_tokens")
    return Usage(prompt, output) if isinstance(prompt, int) and isinstance(output, int) else None


def _said(body: bytes) -> str:
    """The message of an error body, or its beginning."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(orjson.loads(body)["error"]["message"])[:300]
    return body[:300].decode(errors="replace")
