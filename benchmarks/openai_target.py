"""An OpenAI-compatible server as a target of the load generator: /v1/completions, streamed.

Most servers send text without token ids. Such a chunk counts as one token, and the last delta adds the difference to
the usage, so that every answer's sum is the server's own count.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from typing import Any

import aiohttp

from benchmarks.target import TIMEOUT_S, DeltaStream, DeltaTarget
from benchmarks.workload import PlannedRequest
from contract import errors
from contract.errors import DeadlineExceeded, EngineFailed, InvalidArgument, Overloaded, TridentError, Unavailable
from contract.generation import FinishReason, TokenDelta, Usage

UNKNOWN_ID = -1
_BY_HTTP_STATUS = {422: InvalidArgument} | {kind.http_status: kind for kind in errors.BY_GRPC_STATUS.values()}


class OpenAITarget(DeltaTarget):
    """The completions endpoint of one server, ``http://HOST:PORT``. Requests are greedy.

    extra: fields that this server understands beyond OpenAI's, such as ``ignore_eos``.
    """

    def __init__(self, base_url: str, model: str, extra: Mapping[str, Any] | None = None) -> None:
        self._url, self._model, self._extra = f"{base_url}/v1/completions", model, dict(extra or {})
        self._session: aiohttp.ClientSession | None = None

    def open(self, request: PlannedRequest) -> DeltaStream:
        """As ``DeltaTarget.open``. Raises InvalidArgument for a request that does not stream."""
        if not request.stream:
            raise InvalidArgument("stream", "must be true for an OpenAI server, got false")
        body = {"model": self._model, "prompt": request.prompt, "max_tokens": request.max_tokens, "temperature": 0.0}
        extra = {name: value for name, value in self._extra.items() if name != "ignore_eos" or request.ignore_eos}
        return self._read(body | {"stream": True} | extra)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _read(self, body: dict[str, Any]) -> AsyncGenerator[TokenDelta, None]:
        if self._session is None:
            # A server may close an idle connection just as the next request is sent on it, which is no failure of it.
            unlimited = aiohttp.TCPConnector(limit=0, force_close=True)
            timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
            self._session = aiohttp.ClientSession(connector=unlimited, timeout=timeout)
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status != 200:
                    raise http_error(response.status, (await response.text())[:300])
                async for delta in deltas(response.content):
                    yield delta
        except asyncio.TimeoutError as exc:
            raise DeadlineExceeded(f"{self._url} took more than {TIMEOUT_S:g} s") from exc
        except aiohttp.ClientError as exc:
            raise Unavailable(f"{self._url}: {exc}") from exc
        except (ValueError, LookupError, TypeError, AttributeError) as exc:
            raise EngineFailed(f"{self._url} sent what is no completion of OpenAI's: {exc!r}") from exc


async def deltas(lines: AsyncIterable[bytes]) -> AsyncGenerator[TokenDelta, None]:
    """Decode the events of one answer; the last delta has the finish reason, and the usage if it was sent. Raises
    EngineFailed: an error event, a stream that ends without a finish reason."""
    reason, tokens = None, 0
    usage: Usage | None = None
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


def http_error(status: int, text: str, retry_after_s: float | None = None) -> TridentError:
    """Return the error that an HTTP status stands for."""
    kind = _BY_HTTP_STATUS.get(status, EngineFailed)
    error = errors.make(kind, f"HTTP {status}: {text}")
    if isinstance(error, Overloaded | Unavailable):
        error.retry_after_s = retry_after_s
    return error
