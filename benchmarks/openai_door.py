"""The OpenAI door of a server, ours or a peer's, as a target of the load generator: /v1/completions, streamed.

A chunk of the stream carries text and, with most servers, no ids. It then counts as one token, and the last delta
brings what the usage says on top, so that every answer's sum is the server's own count. Of a server that puts several
tokens into a chunk the rates are right; its gaps between tokens are gaps between chunks.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from benchmarks.workload import PlannedRequest
from contract.errors import DeadlineExceeded, EngineFailed, InvalidArgument, TridentError, Unavailable
from contract.generation import FinishReason, TokenDelta, Usage

UNKNOWN_ID = -1
_ERRORS = {400: lambda said: InvalidArgument("", said), 422: lambda said: InvalidArgument("", said)}


class OpenAiDoor:
    """base_url: ``http://HOST:PORT``. model: the name the server wants. extra: fields that this server understands
    beyond OpenAI's, such as ``ignore_eos``. Requests are greedy and never retried."""

    def __init__(
        self, base_url: str, model: str, extra: Mapping[str, Any] | None = None, timeout_s: float = 120.0
    ) -> None:
        self._url, self._model, self._extra = f"{base_url}/v1/completions", model, dict(extra or {})
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    def open(self, asked: PlannedRequest, *, ignore_eos: bool, stream: bool) -> AsyncIterator[TokenDelta]:
        """As ``Target.open``. Raises InvalidArgument for what this door cannot ask: a whole answer."""
        if not stream:
            raise InvalidArgument("stream", "the OpenAI door is measured streaming only")
        body = {"model": self._model, "prompt": asked.prompt, "max_tokens": asked.max_tokens, "temperature": 0.0}
        fixed = {"ignore_eos": True} if ignore_eos and "ignore_eos" in self._extra else {}
        extra = {name: value for name, value in self._extra.items() if name != "ignore_eos"}
        return self._read(body | {"stream": True} | extra | fixed)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _read(self, body: dict[str, Any]) -> AsyncIterator[TokenDelta]:
        if self._session is None:
            # A connection of its own for each request: one that is kept may be closed by the server as it is used
            # again, and a request that was lost so is not the server's failure.
            unlimited = aiohttp.TCPConnector(limit=0, force_close=True)
            timeout = aiohttp.ClientTimeout(total=self._timeout_s)
            self._session = aiohttp.ClientSession(connector=unlimited, timeout=timeout)
        try:
            async with self._session.post(self._url, json=body) as answer:
                if answer.status != 200:
                    raise _refused(answer.status, (await answer.text())[:300])
                async for delta in deltas(answer.content):
                    yield delta
        except asyncio.TimeoutError as exc:
            raise DeadlineExceeded(f"{self._url} took more than {self._timeout_s:g} s") from exc
        except aiohttp.ClientError as exc:
            raise Unavailable(f"{self._url}: {exc}") from exc


async def deltas(lines: AsyncIterator[bytes]) -> AsyncIterator[TokenDelta]:
    """What the events of one answer mean; the last one has the finish reason, and the usage where it was sent.

    Raises EngineFailed for an error in the stream, and for one that ends without having said why.
    """
    reason, usage, tokens = None, None, 0
    async for line in lines:
        data = line.strip().removeprefix(b"data:").strip()
        if not data or not line.startswith(b"data:"):
            continue
        if data == b"[DONE]":
            break
        event = json.loads(data)
        if event.get("error"):
            raise EngineFailed(str(event["error"])[:300])
        if event.get("usage"):
            usage = Usage(event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"])
        for choice in event.get("choices") or ():
            text = choice.get("text") or ""
            if ids := tuple(choice.get("token_ids") or (UNKNOWN_ID,) * bool(text)):
                tokens += len(ids)
                yield TokenDelta(text, ids)
            reason = choice.get("finish_reason") or reason
    if reason is None:
        raise EngineFailed(f"the stream ended after {tokens} tokens without a finish reason")
    missing = max(0, usage.output_tokens - tokens) if usage else 0
    yield TokenDelta("", (UNKNOWN_ID,) * missing, (), FinishReason(reason), usage=usage)


def _refused(status: int, said: str) -> TridentError:
    if status in _ERRORS:
        return _ERRORS[status](said)
    return Unavailable(f"HTTP {status}: {said}") if status in (429, 503) else EngineFailed(f"HTTP {status}: {said}")
