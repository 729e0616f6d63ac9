"""Overflow targets: pools of replicas and OpenAI upstreams that take requests under pressure, or where one has failed.

An upstream may have several endpoints, its keys or regions: each is an upstream named TARGET/ENDPOINT.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence

import aiohttp

from contract.errors import TridentError
from contract.generation import GenerationRequest
from gateway.admission.budget_store import BudgetStore
from gateway.config.policy import OverflowTarget
from gateway.request_context import RequestContext
from gateway.routing.circuit_breaker import BreakerPolicy
from gateway.routing.replicas import Replicas
from gateway.routing.upstream import MAX_CONNECTIONS, Upstream

REPLICAS = ""  # the target name of the request's own pool


class Overflow:
    """The targets by name. ``start`` it on the loop that uses it. budgets: of what the upstreams' days may cost."""

    def __init__(self, replicas: Replicas, breaker: BreakerPolicy, budgets: BudgetStore | None = None) -> None:
        self._replicas, self._breaker, self._budgets = replicas, breaker, budgets
        self._session: aiohttp.ClientSession | None = None
        self._targets: Mapping[str, OverflowTarget] = {}
        self._preferred: Sequence[str] = ()
        self.upstreams: dict[str, Upstream] = {}
        self._totals: dict[str, float] = {}  # of upstreams, also of those whose streams outlast a change
        self._members: dict[str, tuple[str, ...]] = {}  # the upstreams of each target
        self._rng = random.Random()

    def start(self) -> None:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS))

    def change(self, targets: Mapping[str, OverflowTarget], preferred: Sequence[str]) -> None:
        """Set the targets. An unchanged upstream keeps its breaker, every one what it has spent; requests in flight
        continue. preferred: targets of models that have none of their own, in order."""
        assert self._session is not None, "start() comes first"
        members, upstreams = dict[str, tuple[str, ...]](), dict[str, Upstream]()
        for target, rules in targets.items():
            before = self._targets.get(target)
            for name, endpoint in rules.upstreams.items():
                full = f"{target}/{name}" if name else target
                members[target] = (*members.get(target, ()), full)
                if before is not None and before.model == rules.model and before.upstreams.get(name) == endpoint:
                    upstreams[full] = self.upstreams[full]
                    continue
                kept = (self._breaker, self._budgets, self._totals)
                upstreams[full] = Upstream(self._session, full, endpoint, rules.model, *kept)
        self._targets, self.upstreams, self._members, self._preferred = targets, upstreams, members, preferred

    def accepts(self, target: str, requests: Sequence[GenerationRequest]) -> bool:
        """Return whether the target can serve all of ``requests`` now."""
        members = self._members.get(target) or ((target,) if target in self.upstreams else ())
        if not members:
            return self.has_pool(target, requests)
        return any(all(self.upstreams[name].accepts(request) for request in requests) for name in members)

    def members(self, target: str, request: GenerationRequest) -> list[str]:
        """Return the upstreams of a target in the order to try them for ``request``; a pool alone."""
        names = self._members.get(target, ())
        if len(names) < 2:
            return [*names] or [target]
        upstreams = [self.upstreams[name] for name in names]
        # Weighted sampling without replacement (Efraimidis and Spirakis, 2006).
        slowest_s = max(upstream.first_s for upstream in upstreams)
        keys = {up.name: self._rng.random() ** (1.0 / up.weight(slowest_s)) for up in upstreams}
        if self._targets[target].prefer == "cheapest":
            return sorted(names, key=lambda name: (self.upstreams[name].cost(request), -keys[name]))
        return sorted(names, key=lambda name: -keys[name])

    def wait_s(self, targets: Sequence[str], request: GenerationRequest) -> float | None:
        """Return the seconds until an upstream of ``targets`` can serve ``request``; None without one."""
        named = [self.upstreams[name] for target in targets for name in self._members.get(target, ())]
        return min((max(0.0, upstream.wait_s()) for upstream in named if upstream.understands(request)), default=None)

    def has_pool(self, target: str, requests: Sequence[GenerationRequest]) -> bool:
        """Return whether the target is a pool with a ready replica."""
        pool = self.pool(target)
        return bool(pool) and bool(self._replicas.ready_in(pool))

    def accepting(self, context: RequestContext) -> Callable[[str, Sequence[GenerationRequest]], bool]:
        """Return the test whether a target can serve requests of this protocol; of KServe, which upstreams do not
        understand, only pools can."""
        return self.accepts if context.protocol == "http" else self.has_pool

    def next_target(self, context: RequestContext, request: GenerationRequest, tried: Collection[str]) -> str | None:
        """Return the first overflow target that accepts the request, then REPLICAS, then None; never one of
        ``tried``."""
        accepts = self.accepting(context)
        for target in context.model.rules.fallbacks or self._preferred:
            for member in self.members(target, request):
                if member not in tried and accepts(member, (request,)):
                    return member
        return REPLICAS if REPLICAS not in tried and self._replicas.serves(context.tenant.pool) else None

    def retry_after_s(self, context: RequestContext, request: GenerationRequest, error: TridentError) -> float | None:
        """Return the ``retry-after`` when all targets failed: of the first upstream where the pool is down."""
        own_s = error.retry_after_s
        if context.protocol != "http" or self._replicas.serves(context.tenant.pool):
            return own_s
        wait_s = self.wait_s(context.model.rules.fallbacks or self._preferred, request)
        return own_s if wait_s is None else max(1.0, wait_s)

    def first(self, target: str, request: GenerationRequest) -> str:
        """Return the upstream of a target that serves ``request`` first; a pool is its own."""
        members = self.members(target, request)
        return next((name for name in members if self.accepts(name, (request,))), members[0])

    def pool(self, target: str) -> str:
        """Return the pool of a target; "" for an upstream."""
        return self._targets[target].pool if target in self._targets else ""

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
