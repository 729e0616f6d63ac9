"""What the endpoints share: the tenant of a key, admission, and the choices of an admitted request.

An endpoint calls ``Service.choices``, reads the choices and closes them. Whatever the end is, the permit is settled
once, the replicas are released, and metrics, spans and a log line record it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from typing import Any

from opentelemetry.trace import Span

from contract.background import Background
from contract.errors import Cancelled, InvalidArgument, NotFound, TridentError, Unavailable
from contract.generation import GenerationRequest, Usage, changed
from gateway import served_models
from gateway.admission.body_budget import BodyBudget
from gateway.admission.budget_store import BudgetStore, MemoryStore, RedisStore, connect
from gateway.admission.budgets import Reservation
from gateway.admission.concurrency import Caps, Concurrency
from gateway.admission.fair_admission import FairAdmission, Permit
from gateway.admission.hub_link import HubLink, SharedBudgets, SharedCaps
from gateway.admission.pool_slots import PoolSlots
from gateway.admission.prompt_tokens import PromptTokens
from gateway.admission.request_class import HEADER as CLASS_HEADER
from gateway.admission.request_class import classified
from gateway.admission.shared_state import GatewayCaps, SharedState
from gateway.choices import Choices
from gateway.config import release_file
from gateway.config.configuration import Configuration
from gateway.config.policy import ModelRules, Policy, ShadowRules
from gateway.config.settings import Settings
from gateway.config.tenant import LOWEST_PRIORITY, Tenant
from gateway.encoding import Encoding
from gateway.generation import LEFT, GenerationRuntime
from gateway.hooks.hooks import Hooks
from gateway.identity.authentication import Authentication
from gateway.live_generations import LiveGenerations
from gateway.models import HEADER, Models, ServedModel
from gateway.prompts import registry
from gateway.releases import Releases
from gateway.request_context import RequestContext
from gateway.routing.circuit_breaker import BreakerPolicy
from gateway.routing.overflow import Overflow
from gateway.routing.registrations import Entry
from gateway.routing.replicas import Replicas
from gateway.routing.shadow import Shadow
from gateway.routing.succession import Succession
from gateway.samples.recorder import Samples
from gateway.telemetry import request_log
from gateway.telemetry.budget_watch import BudgetWatch
from gateway.telemetry.content import ResponseTrace
from gateway.telemetry.metrics import ENGINE, Metrics
from gateway.telemetry.state_metrics import PoolState, ReplicaSeconds, StateMetrics
from gateway.telemetry.tracing import Tracing, end_span, request_attributes
from gateway.usage.store import UsageRecord, UsageStore
from gateway.usage.writer import Writer
from gateway.watchdog import Watchdog

CATCH_UP_S = 1.0  # until another worker tells what it knows, and as long for the first probe of a replica
_LOG = logging.getLogger(__name__)


class Service:
    """Holds the components of one gateway. ``start`` and ``close`` it on the loop that serves; drain before closing.

    link: to the other workers; None without any.
    """

    def __init__(
        self,
        settings: Settings,
        configuration: Configuration,
        *,
        replicas: Replicas | None = None,
        tracing: Tracing | None = None,
        link: HubLink | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.settings, self.configuration = settings, configuration
        self.metrics = Metrics()
        self.tracing = tracing or Tracing(settings.otlp_endpoint)
        self.watchdog = Watchdog(settings.shortest_timeout_s, self.metrics.lag.observe)
        self.live = LiveGenerations(self.watchdog, self.metrics.in_flight)
        self.bodies = BodyBudget(settings.own_max_bodies_bytes, settings.max_body_bytes)
        self.replicas = replicas or Replicas(settings)
        self.succession = Succession(self.replicas, link, settings.workers)
        breaker = BreakerPolicy(settings.breaker_failures, settings.breaker_open_s)
        policy, lease_s = configuration.policy, configuration.policy.lease_s(settings.request_timeout_s)
        self._redis = connect(policy.budgets.redis) if policy.budgets.redis else None
        self.usage = UsageStore(settings) if settings.usage_db else None
        own = SharedBudgets(link) if link else MemoryStore(time.monotonic, lease_s, None if self._redis else self.usage)
        self.budgets: BudgetStore = RedisStore(self._redis, lease_s=lease_s) if self._redis else own
        self.overflow = Overflow(self.replicas, breaker, self.budgets)
        self.link = link
        self._concurrency: Caps = SharedCaps(link) if link else Concurrency(settings.max_in_flight)
        self.shared_state = SharedState(settings.redis) if settings.redis else None
        self.authentication = Authentication(settings, configuration, self.shared_state)
        self.hooks = Hooks(self.authentication.named, self.metrics.registry)
        if self.shared_state is not None:
            self._concurrency = GatewayCaps(self._concurrency, self.shared_state)
        self.admission = FairAdmission(
            self.budgets,
            self._concurrency,
            time.monotonic,
            pools=self.replicas,
            target_pool=self.overflow.pool,
            make_slots=link.slots if link else PoolSlots,
            rng=rng,
        )
        self.budget_watch = BudgetWatch(self.metrics.registry)
        self.admission.on_reserved = self.budget_watch.observe
        if self.usage is not None:
            self.ledger = Writer[UsageRecord](list, self.usage.add, self.metrics.usage_lost.inc)
            self.admission.on_charged = self.ledger.add
        self.models = Models(settings, self.replicas.adapters)
        self.prompts = registry.opened(settings.prompts) if settings.prompts else None
        self._prepare(policy)
        self.models.change(self._table(policy))
        self.replica_seconds = ReplicaSeconds(lambda: len(self.replicas.ready()))
        self.releases = Releases(self.metrics.outcomes, self._rolled_back, self.tell_workers, self.replicas.ready_in)
        self.replicas.on_call, self.admission.on_refusal = self.metrics.called, self.metrics.refused
        self.state_metrics = StateMetrics(
            replicas=self.replicas.all,
            upstreams=lambda: self.overflow.upstreams.values(),
            pools=self._pool_states,
            body_bytes=lambda: self.bodies.held,
            counted=lambda: self._concurrency.in_flight,
            degraded=lambda: self.admission.degraded,
            replica_seconds=self.replica_seconds.total,
            tokens=lambda: self.metrics.engine_tokens,
            prices=lambda: self.configuration.policy.prices,
            releases=self.releases.judged,
        )
        self.samples = Samples(settings, self.metrics.registry, rng)
        self.shadow = Shadow(self.replicas, rng or random.Random(), self.metrics.copied, self.metrics.generated)
        self._runtime = GenerationRuntime(
            settings,
            self.replicas,
            self.overflow,
            self.live,
            self.metrics,
            self.tracing,
            self.shadow.begin,
            lambda: self.reports_cached_tokens,
            self.samples.begin,
        )
        self.replicas.encoders = configuration.pools.encoders
        self.encoding = Encoding(self._runtime, self.admission)
        self._background = Background()
        self._rollbacks: dict[str, asyncio.Task] = {}  # the last one's writing, by release

    async def start(self) -> None:
        self.overflow.start()
        self.apply()
        self.configuration.changed, self.configuration.prepare = self.apply, self._prepare
        self.configuration.noted = self._reloaded
        await self.authentication.start()
        self.metrics.registry.register(self.state_metrics)
        if self.link is not None:
            self.link.reported = self.replicas.reported
            registrations = self.replicas.registrations  # a beat reaches one worker
            self.link.topics |= {"register": registrations.put, "withdraw": registrations.withdraw}
            self.link.topics |= {"opened": self.replicas.suspect, "outcomes": self.metrics.outcomes.add}
            self.link.topics["rolled_back"] = self._rolled_back_elsewhere
            self.watchdog.add(self.link)
        if self.shared_state is not None:
            self.shared_state.suspect = self.replicas.suspect
            self.shared_state.start()
        self.replicas.on_open = self._opened
        await self.replicas.start()
        if self.link is not None:
            await self._catch_up(self.link)
        self.watchdog.add(self.replica_seconds, self.replicas.registrations, self.admission, self.releases)
        self._background.start(self.watchdog.run())
        self._background.start(self.configuration.watch())
        if self.prompts is not None:
            self._background.start(self.prompts.watch())

    async def _catch_up(self, link: HubLink) -> None:
        """Hear from the other workers what they were told, which a worker that was started again has missed."""
        registrations, heard = self.replicas.registrations, asyncio.Event()

        def known(registered: dict[str, Entry], rolled_back: dict[str, tuple[datetime | None, str]]) -> None:
            registrations.learn(registered)
            self.releases.stopped |= rolled_back
            self.releases.change(self.configuration.policy.releases)
            self._release()
            heard.set()

        if link.fullness:  # of pools that other workers have reported
            link.topics["known"] = known
            link.publish("began")
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(heard.wait(), CATCH_UP_S)
            await asyncio.gather(*(self.replicas.joined(pool, CATCH_UP_S) for pool in self.replicas.pools))
            del link.topics["known"]
        link.topics["began"] = lambda: link.publish("known", registrations.known(), self.releases.stopped)

    def apply(self) -> None:
        """Apply the current configuration to later requests."""
        self.hooks.change()
        self.authentication.hook = self.hooks.authenticated if self.hooks.authenticate else None
        policy, pools = self.configuration.policy, self.configuration.pools
        self.authentication.apply()
        self.models.change(self._table(policy))
        self.replicas.encoders, self.replicas.held = pools.encoders, pools.held
        self.releases.change(policy.releases)
        self.replicas.change(pools.sources, pools.shares, self.models.pools)
        rules = policy.admission
        if self.configuration.keyless:  # one tenant: there are no others to keep slots free for
            every_class = (LOWEST_PRIORITY + 1) * rules.max_waiting_per_class
            alone = {"tenant_share": 1.0, "short_reserve": 0.0, "max_waiting_per_tenant": every_class}
            rules = rules.model_copy(update=alone)
        preferred = policy.degradation.overflow if policy.degradation is not None else ()
        self.overflow.change(policy.overflow, preferred)
        self.admission.change(rules, policy.degradation, tuple(pools.sources))
        if self.link is not None:
            self.link.change(rules, tuple(pools.sources))
        self.samples.change(policy.samples, self.configuration.keyless, self.configuration.sampled())
        self._release()

    def _reloaded(self, problem: str, sections: Sequence[str]) -> None:
        if self.link is None or self.link.number == 0:  # all workers read the file
            self._audit("reload", str(self.configuration.path), problem or "ok", after={"sections": sections})

    def _audit(self, action: str, target: str, result: str, **more: Any) -> None:
        writing = self.authentication.audit.write("this gateway", "operator", action, target, result, **more)
        self._background.start(writing)

    def _release(self) -> None:
        self.replicas.releases, shadow = self.releases.current, self.configuration.policy.shadow
        copied = [rules for rules in self.replicas.releases.values() if rules.kind == "shadow" and rules.share]
        copies = {rules.stable: ShadowRules(pool=rules.candidate, fraction=rules.share) for rules in copied}
        self.shadow.rules = copies | ({None: shadow} if shadow is not None else {})

    async def change_release(self, name: str, action: str, fields: Mapping[str, Any]) -> None:
        """Change a release, here at once and in the file before this returns; a rollback also where the file cannot be
        written. Raises: what release_file.apply raises, and NotFound without a configuration file.
        """
        path = self.configuration.path
        if path is None:
            raise NotFound("this gateway has no configuration file, in which releases stand")
        if action == "rollback" and fields.keys() <= {"reason"} and name in self.releases.current:
            self.releases.roll_back(name, release_file.rollback_reason(fields))
            if name in self._rollbacks:
                await asyncio.wait([self._rollbacks[name]])
            return
        check, shares = self.configuration.check, self.configuration.pools.generating
        await asyncio.to_thread(release_file.apply, path, action, name, fields, check, shares)
        await self.configuration.reload()

    def _rolled_back(self, name: str, reason: str, judged: bool) -> None:
        """Send nothing to the candidate of a release any more, and say so in the file, where it can be written."""
        self._release()
        self.tell_workers("rolled_back", name, reason)
        if judged:  # the request of an operator is recorded with who sent it
            self._audit("release.rollback", name, "ok", reason=reason)
        self._rollbacks[name] = self._background.start(self._write_rollback(name, reason))

    def _rolled_back_elsewhere(self, name: str, reason: str) -> None:
        """Follow another worker, which records the rollback."""
        self.releases.stop(name, reason)
        self._release()

    async def _write_rollback(self, name: str, reason: str) -> None:
        assert self.configuration.path is not None, "releases stand in the file"
        try:
            await asyncio.to_thread(release_file.apply, self.configuration.path, "rollback", name, {"reason": reason})
        except TridentError as error:
            _LOG.error("release %s: the rollback holds in this gateway only: %s", name, error)

    def _opened(self, url: str) -> None:
        self.tell_workers("opened", url)
        if self.shared_state is not None:
            self.shared_state.opened(url)

    def tell_workers(self, topic: str, *message: Any) -> None:
        """Tell the other workers of this gateway what only this one was told."""
        if self.link is not None:
            self.link.publish(topic, *message)

    def _table(self, policy: Policy) -> Mapping[str, ModelRules]:
        return served_models.table(self.settings, policy, self.configuration.pools)

    def _prepare(self, policy: Policy) -> None:
        self.hooks.prepare(policy.hooks)
        served_models.check(self.settings, policy, self.configuration.pools)

    @property
    def draining(self) -> bool:
        return self.live.draining

    async def drain(self, timeout_s: float) -> int:
        """Admit nothing new, waits for what is in flight, cuts off the rest; returns the number cut off."""
        self.live.draining = True
        self.admission.end_held()
        return await self.live.drain(timeout_s)

    async def close(self) -> None:
        await self._background.cancel()
        await self.hooks.close()
        await self.authentication.close()
        await self.shadow.tasks.cancel()
        await self.samples.close()
        await self.replicas.close()
        await self.overflow.close()
        self.models.close()
        await self.budgets.aclose()
        if self.usage is not None:
            await self.ledger.aclose()
            self.usage.close()
        if self.shared_state is not None:
            await self.shared_state.close()
        if self._redis is not None:
            await self._redis.aclose()
        self.tracing.close()

    def ready(self) -> bool:
        """Return whether a pool that callers are sent to has a healthy replica, or holds its requests until it has one;
        pools for shadow copies and overflow alone do not count."""
        return not self.draining and any(
            self.replicas.ready_in(pool) or pool in self.replicas.held for pool in self.serving_pools()
        )

    def serving_pools(self) -> list[str]:
        """Return the pools that callers are sent to: public ones, and those of tenants and models."""
        pinned = self.configuration.pinned_pools().union(self.replicas.encoders, *self.models.pools.values())
        pinned |= {rule.candidate for rule in self.releases.current.values() if rule.served_share}
        return [pool for pool in self.replicas.pools if pool in self.replicas.public or pool in pinned]

    async def tenant(self, headers: Mapping[str, str]) -> Tenant:
        return await self.authentication.tenant(headers)

    async def routed(
        self, model: str, requests: Sequence[GenerationRequest], context: RequestContext, default_length: bool = False
    ) -> RequestContext:
        """Return the context of ``requests`` with their class, the model of that name or of a router's choice, and its
        pool. default_length: as Models.serving. Raises: as ``classified`` and Models.serving, and Unavailable if
        nothing can serve the model.
        """
        context = self.classified(context)
        tenant = context.tenant
        if not self.models.configured:
            return changed(context, model=self.models.find(model, tenant))
        accepts = self.overflow.accepting(context)

        def ready(candidate: ServedModel) -> bool:
            return self.replicas.serves(candidate.pool) or any(
                accepts(target, requests) for target in candidate.rules.fallbacks
            )

        served = await self.models.serving(model, requests, tenant, context.carrier, ready, default_length)
        if served.rules.pools:  # a tenant's own pool is kept where it serves the model
            pool = tenant.pool if tenant.pool in served.rules.pools else served.pool
        elif ready(served):
            pool = served.pool
        elif context.protocol != "http" and not any(map(self.overflow.pool, served.rules.fallbacks)):
            raise InvalidArgument("model", f"must be one with replicas for this protocol, got {served.name}")
        else:
            error = Unavailable(f"no upstream of the model {served.name} accepts requests")
            error.retry_after_s = self.overflow.retry_after_s(replace(context, model=served), requests[0], error)
            raise error
        return changed(context, model=served, tenant=tenant if pool == tenant.pool else replace(tenant, pool=pool))

    def classified(self, context: RequestContext) -> RequestContext:
        """Return the context with the request's class. Raises InvalidArgument."""
        classes, requested = self.configuration.policy.classes, context.carrier.get(CLASS_HEADER, "")
        if not classes and not requested:
            return context
        return replace(context, tenant=classified(classes, context.tenant, context.operation, requested))

    def models_of(self, tenant: Tenant) -> list[ServedModel]:
        """Return the models that a tenant may use; an encoder that no model names is one of its pool's name."""
        named = {pool for pools in self.models.pools.values() for pool in pools}
        own = sorted(pool for pool in self.replicas.encoders - named if not tenant.models or pool in tenant.models)
        table = [found for found in self.models.of(tenant) if found.rules.pools or found.name not in own]
        return table + [ServedModel(pool, pool, "", served_models.encoder(pool)) for pool in own]

    def model_of(self, name: str, tenant: Tenant) -> ServedModel:
        """Return the model of a name or alias. Raises NotFound, also for one that the tenant may not use."""
        found = next((candidate for candidate in self.models_of(tenant) if candidate.name == name), None)
        return found or self.models.find(name, tenant)

    def encoder_pool(self, model: str, capability: str, tenant: Tenant) -> str:
        """Return the pool of an encoder's model. Raises NotFound, and InvalidArgument for a model that cannot do it."""
        served, encoders = self.model_of(model, tenant), self.replicas.encoders
        pools = [pool for pool in served.rules.pools if pool in encoders]
        if not pools or not served.can(frozenset({capability})):
            known = [candidate for candidate in self.models_of(tenant) if encoders.intersection(candidate.rules.pools)]
            able = [candidate.name for candidate in known if candidate.can(frozenset({capability}))]
            there = ", ".join(able) or "no model of this gateway"
            raise InvalidArgument("model", f"must be one with {capability}: {there}; got {model}")
        return next((pool for pool in pools if self.replicas.ready_in(pool)), pools[0])

    async def choices(self, requests: Sequence[GenerationRequest], context: RequestContext) -> Choices:
        """Admit the requests of one caller together; return their choices, which the caller must close in any case.

        Nothing is sent to a replica before the choices are read.
        Raises what FairAdmission.admit raises, and Unavailable while the gateway drains.
        """
        began_s = time.monotonic()
        span = self.request_span(context, requests, ENGINE)
        queue_span = self.tracing.child(span, "queue")
        try:
            permit = await self.admit(requests, context)
            end_span(queue_span)
            return Choices(self._runtime, permit, self._prompt_tokens(context), context, began_s, span)
        except BaseException as exc:  # CancelledError too: the caller left the queue
            end_span(queue_span, exc)
            end_span(span, exc)
            if isinstance(exc, asyncio.CancelledError):
                self.refused(context, Cancelled(LEFT), began_s)
            elif isinstance(exc, TridentError):
                self.refused(context, exc, began_s)
                self.samples.refused(requests, context, exc, began_s)
            raise

    async def charge_for_other(
        self, reservation: Reservation | None, usage: Usage | None, context: RequestContext
    ) -> None:
        """Charge what a gateway that is gone used of a request, and settle its reservation."""
        charge, cost = context.charge(), context.charge().micros(usage)
        if usage is not None:
            self.metrics.used(context.tenant.name, usage, model=context.model.name, cost=cost / 1e6)
            if self.admission.on_charged is not None:
                self.admission.on_charged(charge.record(time.time(), context.tenant.levels, usage))
        if reservation is not None and isinstance(self.budgets, RedisStore):
            tokens = usage.input_tokens + usage.output_tokens if usage is not None else 0
            await self.budgets.settle_for_other(reservation, tokens, cost)

    def context_headers(self, context: RequestContext) -> dict[str, str]:
        """Return the response headers: the model, where there is a table of models, the class, the notes."""
        headers = {HEADER: context.model.name} if self.models.configured else {}
        headers |= {f"x-trident-{name.replace('_', '-')}": text for name, text in context.notes.items()}
        return headers | ({CLASS_HEADER: context.tenant.request_class} if context.tenant.class_rules else {})

    async def admit(self, requests: Sequence[GenerationRequest], context: RequestContext) -> Permit:
        """Return the permit of one caller's requests. Raises as ``choices``."""
        tenant, accepts = context.tenant, self.overflow.accepting(context)
        metrics, began_s = self.metrics, time.monotonic()
        metrics.waiting.inc()
        try:
            with self.live.admitting():
                targets, tokens = context.model.rules.fallbacks or None, self._prompt_tokens(context)
                elsewhere = targets is not None or self.configuration.policy.degradation is not None
                down = elsewhere and not self.replicas.serves(tenant.pool)
                more = (down, context.caller, targets, tokens, context.charge())
                permit = await self.admission.admit(requests, tenant, accepts, *more)
                try:
                    self.live.check_not_cut_off()
                except TridentError:
                    permit.settle(None)
                    raise
        finally:
            metrics.waiting.dec()
            metrics.queue.observe(time.monotonic() - began_s)
        permit.headers.update(self.context_headers(context))
        return permit

    def _prompt_tokens(self, context: RequestContext) -> PromptTokens:
        return context.model.prompt_tokens or self.admission.prompt_tokens

    def request_span(
        self, context: RequestContext, requests: Sequence[GenerationRequest], source: str, **more: Any
    ) -> Span | None:
        """Start the span of a request. source: ENGINE, or where a reused answer comes from. more: attributes."""
        if not self.tracing.on:
            return None
        attributes = request_attributes(requests, context.model.name, context.session, context.protocol != "grpc")
        attributes |= {f"trident.{name}": text for name, text in context.notes.items()}
        own = {"trident.source": source, "trident.operation": context.operation, "trident.tenant": context.tenant.name}
        name = f"{attributes['gen_ai.operation.name']} {context.model.name}"
        span = self.tracing.start(name, context.carrier, {**attributes, **own, **more})
        if context.trace is not None:
            context.trace.began(span)
        return span

    def response_trace(self, context: RequestContext) -> AbstractContextManager[ResponseTrace | None]:
        """Return what reads a response for its span; None without tracing."""
        if not self.tracing.on:
            return nullcontext()
        return ResponseTrace(self.tracing, context.tenant.within(self.configuration.policy.tracing.content))

    @property
    def reports_cached_tokens(self) -> bool:
        """Whether callers see prefix cache hits; see GenerationRuntime."""
        return self.configuration.keyless

    def refused(self, context: RequestContext, error: TridentError, began_s: float) -> None:
        """Count and logs a request that was refused before generation."""
        self.metrics.rejected(error)
        request_log.write(context, error, began_s)

    def _pool_states(self) -> Iterator[PoolState]:
        for pool in self.replicas.pools:
            starting = self.replicas.registrations.starting(pool)
            yield PoolState(pool, self.admission.slots(pool), self.replicas.ready_in(pool), starting)
