"""Overflow targets: pools of replicas and OpenAI upstreams that take requests under pressure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import aiohttp

from contract.generation import GenerationRequest
from gateway.config.policy import OverflowTarget
from gateway.routing.circuit_breaker import BreakerPolicy
from gateway.routing.replicas import RoutedReplica
from gateway.routing.upstream import MAX_CONNECTIONS, Upstream


class Overflow:
    """The targets by name. ``start`` it on the loop that uses it.

    ready: returns the replicas that can serve now.
    breaker: the circuit breaker policy of upstreams.
    """

    def __init__(self, ready: Callable[[], list[RoutedReplica]], breaker: BreakerPolicy) -> None:
        self._ready, self._breaker = ready, breaker
        self._session: aiohttp.ClientSession | None = None
        self._targets: Mapping[str, OverflowTarget] = {}
        self._upstreams: dict[str, Upstream] = {}

    def start(self) -> None:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS))

    def change(self, targets: Mapping[str, OverflowTarget]) -> None:
        """Set the targets. An unchanged upstream keeps its breaker; requests in flight continue."""
        assert self._session is not None, "start() comes first"
        kept = {name: self._upstreams[name] for name in self._upstreams if targets.get(name) == self._targets[name]}
        new = {
            name: Upstream(self._session, name, target.url, target.model, target.api_key, self._breaker)
            for name, target in targets.items()
            if target.url and name not in kept
        }
        self._targets, self._upstreams = targets, kept | new

    def accepts(self, target: str, requests: Sequence[GenerationRequest]) -> bool:
        """Return whether the target can serve all of ``requests`` now."""
        upstream = self._upstreams.get(target)
        if upstream is None:
            return self.has_pool(target, requests)
        return all(upstream.accepts(request) for request in requests)

    def wait_s(self, targets: Sequence[str], request: GenerationRequest) -> float | None:
        """Return the seconds until an upstream of ``targets`` can serve ``request``; None without one."""
        named = [self._upstreams[name] for name in targets if name in self._upstreams]
        return min((max(0.0, upstream.wait_s()) for upstream in named if upstream.understands(request)), default=None)

    def has_pool(self, target: str, requests: Sequence[GenerationRequest]) -> bool:
        """Return whether the target is a pool with a ready replica."""
        pool = self.pool(target)
        return bool(pool) and any(replica.pool == pool for replica in self._ready())

    def pool(self, target: str) -> str:
        """Return the pool of a target; "" for an upstream."""
        return self._targets[target].pool if target in self._targets else ""

    def upstream(self, target: str) -> Upstream | None:
        return self._upstreams.get(target)

    def upstreams(self) -> list[Upstream]:
        return list(self._upstreams.values())

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
