"""What generations use, over scripted replicas and without any endpoint of the gateway."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from contract.generation import GenerationRequest
from gateway.admission.budget_store import MemoryStore
from gateway.admission.concurrency import Concurrency
from gateway.admission.fair_admission import FairAdmission, Permit
from gateway.choices import Choices
from gateway.config.policy import OverflowTarget
from gateway.config.settings import Settings
from gateway.config.tenant import Tenant
from gateway.generation import Generation, GenerationRuntime
from gateway.live_generations import LiveGenerations
from gateway.request_context import RequestContext
from gateway.routing.circuit_breaker import BreakerPolicy
from gateway.routing.overflow import Overflow
from gateway.routing.replicas import Replicas
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.tracing import Tracing
from gateway.watchdog import Watchdog

CONTEXT = RequestContext(Tenant(), "http", "chat", "request-1")


def requests(count: int = 1, text: str = "one two", **options: Any) -> list[GenerationRequest]:
    """``count`` choices of one prompt."""
    return [GenerationRequest(text, **{"max_tokens": 3, **options}) for _ in range(count)]


@dataclass
class Runtime:
    """admission: charges a tenant without limits."""

    generations: GenerationRuntime
    admission: FairAdmission

    async def permit(self, admitted: Sequence[GenerationRequest]) -> Permit:
        return await self.admission.admit(admitted, CONTEXT.tenant)

    async def choices(self, admitted: Sequence[GenerationRequest], context: RequestContext = CONTEXT) -> Choices:
        permit = await self.permit(admitted)
        return Choices(self.generations, permit, self.admission.prompt_tokens, context, time.monotonic(), None)

    async def generation(self, request: GenerationRequest, context: RequestContext = CONTEXT) -> Generation:
        return (await self.choices([request], context)).generations[0]

    @property
    def degraded(self) -> Counter[str]:
        """Moves to overflow targets."""
        return self.admission.degraded

    @property
    def idle(self) -> bool:
        """Whether no generation is in flight and no slot is held."""
        return not len(self.generations.live) and not self.admission.running

    def metric(self, name: str, **labels: str) -> float:
        return self.generations.metrics.registry.get_sample_value(name, labels) or 0.0


@contextlib.asynccontextmanager
async def runtime(
    pools: str, targets: dict[str, OverflowTarget] | None = None, reports_cached_tokens: bool = True, **options: Any
) -> AsyncIterator[Runtime]:
    """pools: as the setting ``replicas``. targets: overflow targets, in order of preference."""
    settings = Settings(
        **{"replicas": pools, "metrics_port": 0, "deep_probes": False, "probe_timeout_s": 60.0, "slow_start_s": 0.0}
        | {"continuations": 0}
        | options
    )
    replicas, metrics = Replicas(settings), Metrics()
    overflow = Overflow(replicas, BreakerPolicy())
    overflow.start()
    overflow.change(targets or {}, tuple(targets or ()))
    await replicas.start()
    generations = GenerationRuntime(
        settings,
        replicas,
        overflow,
        LiveGenerations(Watchdog(1.0), metrics.in_flight),
        metrics,
        Tracing(),
        reports_cached_tokens=lambda: reports_cached_tokens,
    )
    store, concurrency = MemoryStore(time.monotonic), Concurrency(100)
    admission = FairAdmission(store, concurrency, time.monotonic, pools=replicas, target_pool=overflow.pool)
    try:
        yield Runtime(generations, admission)
    finally:
        await replicas.close()
        await overflow.close()


def grpc_context(context: RequestContext = CONTEXT) -> RequestContext:
    return replace(context, protocol="grpc")
