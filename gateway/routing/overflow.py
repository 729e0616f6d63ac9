"""Overflow targets: pools of replicas and OpenAI upstreams that take requests under pressure.

An upstream may have several endpoints, its keys or regions: each is an upstream named TARGET/ENDPOINT.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import aiohttp

from contract.generation import GenerationRequest
from gateway.admission.budget_store import BudgetStore
from gateway.config.policy import OverflowTarget
from gateway.routing.circuit_breaker import BreakerPolicy
from gateway.routing.replicas import RoutedReplica
from gateway.routing.upstream import MAX_CONNECTIONS, Upstream


class Overflow:
    """The targets by name. ``start`` it on the loop that uses it.

    ready: returns the replicas that can serve now.
    breaker: the circuit breaker policy of upstreams. budgets: of what their days may cost.
    """

    def __init__(
        self,
        ready: Callable[[], list[RoutedReplica]],
        breaker: BreakerPolicy,
        budgets: BudgetStore | None = None,
    ) -> None:
        self._ready, self._breaker, self._budgets = ready, breaker, budgets
        self._session: aiohttp.ClientSession | None = None
        self._targets: Mapping[str, OverflowTarget] = {}
        self._upstreams: dict[str, Upstream] = {}
        self._totals: dict[str, float] = {}  # of upstreams, also of those whose streams outlast a change
        self._members: dict[str, tuple[str, ...]] = {}  # the upstreams of each target
        self._rng = random.Random()

    def start(self) -> None:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS))

    def change(self, targets: Mapping[str, OverflowTarget]) -> None:
        """Set the targets. An unchanged upstream keeps its breaker, every one what it has spent; requests in flight
        continue."""
        assert self._session is not None, "start() comes first"
        members, upstreams = dict[str, tuple[str, ...]](), dict[str, Upstream]()
        for target, rules in targets.items():
            before = self._targets.get(target)
            for name, endpoint in rules.upstreams.items():
                full = f"{target}/{name}" if name else target
                members[target] = (*members.get(target, ()), full)
                if before is not None and before.model == rules.model and before.upstreams.get(name) == endpoint:
                    upstreams[full] = self._upstreams[full]
                    continue
                kept = (self._breaker, self._budgets, self._totals)
                upstreams[full] = Upstream(self._session, full, endpoint, rules.model, *kept)
        self._targets, self._upstreams, self._members = targets, upstreams, members

    def accepts(self, target: str, requests: Sequence[GenerationRequest]) -> bool:
        """Return whether the target can serve all of ``requests`` now."""
        members = self._members.get(target) or ((target,) if target in self._upstreams else ())
        if not members:
            return self.has_pool(target, requests)
        return any(all(self._upstreams[name].accepts(request) for request in requests) for name in members)

    def members(self, target: str, request: GenerationRequest) -> list[str]:
        """Return the upstreams of a target in the order to try them for ``request``; a pool alone."""
        names = self._members.get(target, ())
        if len(names) < 2:
            return [*names] or [target]
        upstreams = [self._upstreams[name] for name in names]
        # Weighted sampling without replacement (Efraimidis and Spirakis, 2006).
        slowest_s = max(upstream.first_s for upstream in upstreams)
        keys = {up.name: self._rng.random() ** (1.0 / up.weight(slowest_s)) for up in upstreams}
        if self._targets[target].prefer == "cheapest":
            return sorted(names, key=lambda name: (self._upstreams[name].cost(request), -keys[name]))
        return sorted(names, key=lambda name: -keys[name])

    def wait_s(self, targets: Sequence[str], request: GenerationRequest) -> float | None:
        """Return the seconds until an upstream of ``targets`` can serve ``request``; None without one."""
        named = [self._upstreams[name] for target in targets for name in self._members.get(target, ())]
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
