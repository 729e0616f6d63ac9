"""Where a request goes next when its replicas, or an overflow target, failed before its first token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from contract.errors import TridentError
from contract.generation import GenerationRequest
from gateway.request_context import RequestContext
from gateway.routing.overflow import Overflow
from gateway.routing.replicas import Replicas

REPLICAS = ""  # the target name of the request's own pool


class Fallback:
    """Chooses the next target of a failed request.

    targets: returns the names of the overflow targets, in order of preference, for models that have none of their own.
    degraded: counts requests by stage; a move to a target is one of OVERFLOW.
    """

    def __init__(
        self, overflow: Overflow, replicas: Replicas, targets: Callable[[], Sequence[str]], degraded: Counter[str]
    ) -> None:
        self.overflow, self._replicas, self._targets, self.degraded = overflow, replicas, targets, degraded

    def accepts(self, context: RequestContext) -> Callable[[str, Sequence[GenerationRequest]], bool]:
        """Return the test whether a target can serve requests of this protocol.

        KServe requests go to replica pools only: they stay tensors, which OpenAI upstreams do not understand.
        """
        return self.overflow.accepts if context.protocol == "http" else self.overflow.has_pool

    def next_target(self, context: RequestContext, request: GenerationRequest, tried: Collection[str]) -> str | None:
        """Return the first overflow target that accepts the request, then REPLICAS, then None; never one of
        ``tried``."""
        accepts = self.accepts(context)
        for target in context.model.rules.fallbacks or self._targets():
            for member in self.overflow.members(target, request):
                if member not in tried and accepts(member, (request,)):
                    return member
        return REPLICAS if REPLICAS not in tried and self._replicas.serves(context.tenant.pool) else None

    def retry_after_s(self, context: RequestContext, request: GenerationRequest, error: TridentError) -> float | None:
        """Return the ``retry-after`` when all targets failed: of the first upstream where the pool is down."""
        own_s = error.retry_after_s
        if context.protocol != "http" or self._replicas.serves(context.tenant.pool):
            return own_s
        wait_s = self.overflow.wait_s(context.model.rules.fallbacks or self._targets(), request)
        return own_s if wait_s is None else max(1.0, wait_s)

    def first(self, target: str, request: GenerationRequest) -> str:
        """Return the upstream of a target that serves ``request`` first; a pool is its own."""
        members = self.overflow.members(target, request)
        return next((name for name in members if self.overflow.accepts(name, (request,))), members[0])
