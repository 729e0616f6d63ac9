"""The one path behind both doors: tenant → permit → replica → deltas, watched and settled to the end.

A door asks for ``Service.choices``, reads them, and leaves them; whatever the end is, the permit is settled once, the
replicas are released, and metrics, spans and log lines say how it ended.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import time
from collections.abc import Collection, Sequence

from contract.errors import InvalidArgument, NotFound, PermissionDenied, TridentError, Unavailable
from contract.generation import GenerationRequest
from gateway.admission.body_budget import BodyBudget
from gateway.admission.budget_store import BudgetStore, MemoryStore, RedisStore, connect
from gateway.admission.concurrency import Concurrency
from gateway.admission.degradation import Stage
from gateway.admission.fair_admission import FairAdmission, Takes
from gateway.admission.permit import Keys, Tenant
from gateway.admission.prompt_tokens import PromptTokens
from gateway.api import vocabulary
from gateway.choices import Choices
from gateway.config.configuration import Configuration
from gateway.config.settings import Settings
from gateway.generation import Generation
from gateway.request_context import RequestContext
from gateway.routing.circuit_breaker import BreakerPolicy
from gateway.routing.overflow import Overflow
from gateway.routing.replicas import Replicas
from gateway.routing.shadow import Shadow
from gateway.telemetry import observability
from gateway.telemetry.observability import Metrics, ReplicaSeconds, StateMetrics, Tracing, end_span
from gateway.watchdog import Watchdog

_LOG = logging.getLogger("gateway.request")
SETTLING_S = 60.0  # longer than a settlement takes that is tried again


class Service:
    """What the doors share. ``start`` and ``close`` on the loop that serves; drained before it is closed."""

    def __init__(
        self,
        settings: Settings,
        configuration: Configuration,
        *,
        keys: Keys | None = None,
        replicas: Replicas | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.settings, self.configuration = settings, configuration
        self.keys = keys or configuration
        self.metrics = Metrics(settings.model)
        self.tracing = tracing or Tracing(settings.otlp_endpoint)
        shortest_s = min(
            settings.heartbeat_s, settings.stall_timeout_s, settings.idle_timeout_s, settings.first_token_timeout_s
        )
        self.watchdog = Watchdog(shortest_s, self.metrics.lag.observe)
        self.bodies = BodyBudget(settings.own_max_bodies_bytes, settings.max_body_bytes)
        self.draining = self._cutting = False
        self._replicas = replicas
        self.overflow = Overflow(
            lambda: self.replicas.fit(), BreakerPolicy(settings.breaker_failures, settings.breaker_open_s)
        )
        policy = configuration.policy
        lease_s = settings.request_timeout_s + policy.admission.max_wait_s + SETTLING_S
        self._redis = connect(policy.budgets.redis) if policy.budgets.redis else None
        self.budgets: BudgetStore = (
            RedisStore(self._redis, lease_s=lease_s) if self._redis else MemoryStore(time.monotonic, lease_s)
        )
        self._concurrency = Concurrency(settings.max_in_flight)
        self.admission = FairAdmission(
            self.budgets,
            self._concurrency,
            time.monotonic,
            target_pool=lambda target: self.overflow.pool(target),
            prompt_tokens=PromptTokens(vocabulary.load(settings.tokenizer) if settings.tokenizer else None),
        )
        self.replica_seconds = ReplicaSeconds(lambda: len(self.replicas.fit()))
        self.shadow: Shadow | None = None
        self._live: set[Generation] = set()
        self._entering = 0  # callers in admission
        self._idle = asyncio.Event()
        self._tasks: list[asyncio.Task] = []

    @property
    def replicas(self) -> Replicas:
        assert self._replicas is not None, "start() comes first"
        return self._replicas

    async def start(self) -> None:
        self._replicas = self._replicas or Replicas(self.settings)
        self.admission.pools = self._replicas
        self.overflow.start()
        self.apply()
        self.configuration.changed = self.apply
        self.metrics.registry.register(StateMetrics(self))
        await self._replicas.start()
        self.watchdog.add(self.replica_seconds)
        self.watchdog.add(self.admission)
        self._tasks = [asyncio.create_task(self.watchdog.run()), asyncio.create_task(self.configuration.watch())]

    def apply(self) -> None:
        """The configuration's rules, from now on."""
        policy, pools = self.configuration.policy, self.configuration.pools
        self.replicas.change(pools.places, pools.shares)
        rules, shares, per_tenant = policy.admission, policy.shares, policy.admission.max_waiting_per_tenant
        if self.configuration.keyless:  # there are no others to keep places for
            shares = dataclasses.replace(shares, tenant_share=1.0, short_reserve=0.0)
            per_tenant = rules.max_waiting_per_class
        self._concurrency.pools = tuple(pools.places)
        self.overflow.change(policy.overflow)
        bounds = {
            "max_per_class": rules.max_waiting_per_class,
            "max_per_tenant": per_tenant,
            "quantum_tokens": rules.quantum_tokens,
            "aging_s": rules.aging_s,
        }
        self.admission.change(shares, policy.ladder, rules.max_in_flight_of_class, bounds)
        if policy.shadow is None:
            self.shadow = None
        elif self.shadow is None or self.shadow.rules != policy.shadow:
            self.shadow = Shadow(policy.shadow, self.replicas, self.metrics, random.Random())

    async def drain(self, patience_s: float) -> int:
        """Takes nothing new and waits for what is under way; returns how many had to be cut off."""
        self.draining = True
        self._tell_if_idle()
        try:
            await asyncio.wait_for(self._idle.wait(), patience_s)
        except asyncio.TimeoutError:
            self._cutting = True
            left = tuple(self._live)
            for generation in left:
                generation.cut(Unavailable("the gateway is stopping"))
            return len(left)
        return 0

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.shadow is not None:
            await self.shadow.close()
        await self.replicas.close()
        await self.overflow.close()
        self.admission.prompt_tokens.close()
        await self.budgets.aclose()
        if self._redis is not None:
            await self._redis.aclose()
        self.tracing.close()

    def ready(self) -> bool:
        """Whether callers can be served: a pool that they are sent to, by weight or because it is their own, has a fit
        replica. Pools for copies and overflow alone do not count."""
        return not self.draining and any(self.replicas.fit_in(pool) for pool in self.serving_pools())

    def serving_pools(self) -> list[str]:
        """The pools that callers are sent to: public ones, and those of tenants."""
        pinned = self.configuration.pinned_pools()
        public = self.replicas.public()
        return [pool for pool in self.replicas.pools if pool in public or pool in pinned]

    def tenant(self, api_key: str) -> Tenant:
        """Raises Unauthenticated."""
        return self.keys.tenant(api_key)

    def check_model(self, model: str, tenant: Tenant) -> None:
        """Raises NotFound for a model that is not served, PermissionDenied for one the tenant may not use."""
        if model not in (self.settings.model, self.settings.triton_model):
            raise NotFound(f"the model {model!r:.100} does not exist; there is {self.settings.model}")
        if not self.may_use(model, tenant):
            raise PermissionDenied(f"this key may not use the model {model}")

    def may_use(self, model: str, tenant: Tenant) -> bool:
        return not tenant.models or not {self.settings.model, model}.isdisjoint(tenant.models)

    async def choices(self, wanted: Sequence[GenerationRequest], asking: RequestContext) -> Choices:
        """The admitted generations of one caller. Nothing is sent before they are read; leave them with ``close``,
        whatever happens.

        Raises what admission raises, and Unavailable while the gateway drains.
        """
        began_s, asked = time.monotonic(), wanted[0]
        attributes = {
            "gen_ai.operation.name": asking.operation,
            "gen_ai.provider.name": "trident",
            "gen_ai.request.model": self.settings.model,
            "gen_ai.request.max_tokens": asked.max_tokens,
            "gen_ai.request.stream": asked.stream,
            "gen_ai.request.choice.count": len(wanted),
            "trident.source": observability.ENGINE,
        }
        span = self.tracing.start(f"{asking.operation} {self.settings.model}", asking.carrier, attributes)
        queue_span = self.tracing.child(span, "queue")
        self._entering += 1
        try:
            with self.metrics.waiting.track_inprogress(), self.metrics.queue.time():
                self.check_open()
                down = not self.replicas.serves(asking.tenant.pool)
                permit = await self.admission.admit(wanted, asking.tenant, self.takes(asking), down, asking.session)
                if self._cutting:
                    permit.settle(None)
                    self.check_open()
            end_span(queue_span)
            return Choices(self, permit, asking, began_s, span)
        except BaseException as exc:  # or the caller left the queue
            end_span(queue_span, exc)
            end_span(span, exc)
            if isinstance(exc, TridentError):
                self.refused(asking, exc, began_s)
            raise
        finally:
            self._entering -= 1
            self._tell_if_idle()

    def takes(self, asking: RequestContext) -> Takes:
        """What says whether an overflow target takes requests. What came as tensors goes on as tensors, which no
        upstream understands."""
        return self.overflow.takes if asking.protocol == "http" else self.overflow.has_pool

    def next_place(self, asking: RequestContext, request: GenerationRequest, tried: Collection[str]) -> str | None:
        """Where a request may go that could not be served in ``tried``: the first overflow target that takes it, then
        "", the usual replicas, then None."""
        ladder, takes = self.configuration.policy.ladder, self.takes(asking)
        for target in ladder.overflow if ladder is not None else ():
            if target not in tried and takes(target, (request,)):
                return target
        return "" if "" not in tried and self.replicas.serves(asking.tenant.pool) else None

    def retry_after_s(self, asking: RequestContext, request: GenerationRequest, error: TridentError) -> float | None:
        """What a refusal says of the time to come back, when every place has failed: with the tenant's pool down, when
        the first upstream may be asked again."""
        said = getattr(error, "retry_after_s", None)
        ladder = self.configuration.policy.ladder
        if ladder is None or asking.protocol != "http" or self.replicas.serves(asking.tenant.pool):
            return said
        wait_s = self.overflow.wait_s(ladder.overflow, request)
        return said if wait_s is None else max(1.0, wait_s)

    def moved(self, asking: RequestContext, generation_id: str, before: str, after: str, error: TridentError) -> None:
        """A request goes on elsewhere before its first token. after: an overflow target, or "replicas"."""
        if after != "replicas":
            self.admission.degraded[Stage.OVERFLOW.value] += 1
        fields = {"request_id": asking.request_id, "generation_id": generation_id, "from": before, "to": after}
        _LOG.warning("request is tried elsewhere", extra={"fields": {**fields, "error": str(error)}})

    @property
    def tells_cached_tokens(self) -> bool:
        """Whether callers hear how much of their prompt a replica had in its prefix cache. All tenants share it, so it
        would tell one what another has asked."""
        return self.configuration.keyless

    def check_open(self) -> None:
        if self.draining:
            raise Unavailable("the gateway is stopping; another one may serve you", 1.0)

    def refused(self, asking: RequestContext, error: TridentError, began_s: float) -> None:
        """Nothing was made for the caller; it is counted and logged."""
        self.metrics.rejections.labels(observability.reason(error)).inc()
        self.log(asking, error, began_s)

    def opened(self, generation: Generation) -> None:
        self._live.add(generation)
        self.metrics.in_flight.inc()
        self.watchdog.add(generation)

    def closed(self, generation: Generation) -> None:
        self.watchdog.discard(generation)
        self.metrics.in_flight.dec()
        self._live.discard(generation)
        self._tell_if_idle()

    def _tell_if_idle(self) -> None:
        if not self._live and not self._entering:
            self._idle.set()
        else:
            self._idle.clear()

    def log(self, asking: RequestContext, error: TridentError | None, began_s: float, **more: object) -> None:
        fields = {
            "request_id": asking.request_id,
            "tenant": asking.tenant.name,
            "protocol": asking.protocol,
            "operation": asking.operation,
            "error_type": type(error).__name__ if error else "",
            "error": str(error) if error and (error.internal or not isinstance(error, InvalidArgument)) else "",
            "duration_s": round(time.monotonic() - began_s, 6),
            **more,
        }
        level = logging.ERROR if error and error.http_status == 500 else logging.INFO
        said = f"generation failed: {error}" if level == logging.ERROR else "generation"
        _LOG.log(level, said.replace("%", "%%"), extra={"fields": fields})
