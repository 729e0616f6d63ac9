"""What load is driven at: the ensemble, through the client library.

A target opens one request and yields TokenDeltas; ``engine_door`` and ``openai_door`` are the others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from benchmarks.workload import PlannedRequest
from clients import NO_RETRY, AsyncClient
from clients.wire.request import build
from contract.generation import TokenDelta

TENANT_HEADER = "x-tenant-id"


class Target(Protocol):
    def open(self, asked: PlannedRequest, *, ignore_eos: bool, stream: bool) -> AsyncIterator[TokenDelta]:
        """The answer; leaving the iteration (aclose) cancels the request. Raises TridentError."""

    async def close(self) -> None: ...


class Ensemble:
    """One connection per tenant. Requests are never retried: a failure is a figure, not something to hide."""

    def __init__(self, url: str, timeout_s: float = 120.0, timings: bool = True) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._timings = timings
        self._clients: dict[str, AsyncClient] = {}

    def open(self, asked: PlannedRequest, *, ignore_eos: bool, stream: bool) -> AsyncIterator[TokenDelta]:
        request = build(
            asked.prompt,
            max_tokens=asked.max_tokens,
            temperature=0.0,
            ignore_eos=ignore_eos,
            stream=stream,
            timeout_s=self._timeout_s,
        )
        return self._client(asked.tenant).open(request, timings=self._timings)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    def _client(self, tenant: str) -> AsyncClient:
        if tenant not in self._clients:
            metadata = {TENANT_HEADER: tenant} if tenant else {}
            self._clients[tenant] = AsyncClient(self._url, metadata=metadata, retry=NO_RETRY)
        return self._clients[tenant]
