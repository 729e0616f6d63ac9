"""The servers that load can be sent to. The ensemble is here; ``engine_target``, ``openai_target`` and the byte-level
ones in ``gateway/`` are the others."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Protocol

from benchmarks.record import Record
from benchmarks.workload import PlannedRequest
from clients import NO_RETRY, AsyncClient
from clients.wire.request import build
from contract.generation import TokenDelta

if TYPE_CHECKING:
    from typing_extensions import Self

TIMEOUT_S = 120.0  # of a request


class Target(ABC):
    """A server under load. Requests are never retried: a failure is a result."""

    @abstractmethod
    async def send(self, request: PlannedRequest, record: Record) -> None:
        """Send one request and fill ``record`` with what comes back. Raises TridentError."""

    async def close(self) -> None:  # noqa: B027 - not every target holds a connection
        """Close the connections."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class DeltaStream(Protocol):
    """An answer as it arrives."""

    def __aiter__(self) -> AsyncIterator[TokenDelta]: ...

    async def aclose(self) -> None:
        """Cancel the request if it still runs."""


class DeltaTarget(Target):
    """A target whose answers are streams of TokenDeltas."""

    @abstractmethod
    def open(self, request: PlannedRequest) -> DeltaStream:
        """Return the answer; closing the iterator cancels the request. Raises TridentError."""

    async def send(self, request: PlannedRequest, record: Record) -> None:
        """As ``Target.send``; cancel after ``request.cancel_after_tokens``."""
        tokens, stream = 0, self.open(request)
        async for delta in stream:
            if count := len(delta.token_ids):
                record.messages.append((time.monotonic(), count))
                tokens += count
            if delta.finish_reason is not None:
                record.ended_s = time.monotonic()
                record.finish_reason = delta.finish_reason.value
                record.timings = delta.timings
                if delta.usage is not None:
                    record.input_tokens = delta.usage.input_tokens
                    record.usage_tokens = delta.usage.output_tokens
            elif request.cancel_after_tokens is not None and tokens >= request.cancel_after_tokens:
                record.cancelled = True
                await stream.aclose()
                return


class EnsembleTarget(DeltaTarget):
    """An ensemble over KServe gRPC, by one client of the library. model: "" for the client's choice."""

    def __init__(self, url: str, timings: bool = True, model: str = "") -> None:
        self._url, self._timings, self._model = url, timings, model
        self._client: AsyncClient | None = None  # made in the event loop that uses it

    def open(self, request: PlannedRequest) -> DeltaStream:
        self._client = self._client or AsyncClient(self._url, retry=NO_RETRY, model=self._model)
        built = build(
            request.prompt,
            max_tokens=request.max_tokens,
            temperature=0.0,
            ignore_eos=request.ignore_eos,
            stream=request.stream,
            timeout_s=TIMEOUT_S,
        )
        return self._client.open(built, timings=self._timings)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
