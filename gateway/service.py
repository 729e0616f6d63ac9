"""The one path behind both doors: tenant → permit → replica → deltas, watched and settled to the end.

A door asks ``Service.generation`` for each choice, iterates over it, and leaves it; whatever the end is, the permit
is settled once, the replica is released, and metrics, span and log line say how it ended.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from opentelemetry.trace import Span, SpanKind

from clients import costs
from clients.connection import new_request_id
from clients.token_stream import TokenStream
from contract.errors import Cancelled, DeadlineExceeded, NotFound, PermissionDenied, TridentError, Unavailable
from contract.generation import FinishReason, GenerationRequest, TokenDelta, Usage
from gateway import observability
from gateway.observability import Metrics, ReplicaMetrics, Tracing, end_span
from gateway.permit import Admission, Everyone, InFlightCap, Keys, Permit, Tenant
from gateway.replicas import Door, Replicas
from gateway.settings import Settings
from gateway.streaming import Sweeper

_LOG = logging.getLogger("gateway.request")


@dataclass(frozen=True)
class Asking:
    """Who asks and how. carrier: the caller's headers or metadata, keys in lower case.

    request_id: what the caller may quote; the engine's own ids are never a caller's, so that nobody can stop or
    attach to another's request by guessing. session: the conversation that affinity keeps together.
    """

    tenant: Tenant
    door: str
    operation: str
    request_id: str
    carrier: Mapping[str, str] = field(default_factory=dict)
    session: str = ""


class Service:
    """What the doors share. ``start`` and ``close`` on the loop that serves; drained before it is closed."""

    def __init__(
        self,
        settings: Settings,
        *,
        keys: Keys | None = None,
        admission: Admission | None = None,
        replicas: Replicas | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.settings = settings
        self.keys = keys or Everyone()
        self.admission = admission or InFlightCap(settings.max_in_flight)
        self.metrics = Metrics()
        self.tracing = tracing or Tracing(settings.otlp_endpoint)
        self.sweeper = Sweeper(settings, self.metrics.lag.observe)
        self.draining = False
        self._replicas = replicas
        self._live: set[Generation] = set()
        self._nothing_live = asyncio.Event()
        self._nothing_live.set()
        self._sweeping: asyncio.Task | None = None

    @property
    def replicas(self) -> Replicas:
        assert self._replicas is not None, "start() comes first"
        return self._replicas

    async def start(self) -> None:
        self._replicas = self._replicas or Replicas(self.settings)
        self.metrics.registry.register(ReplicaMetrics(self._replicas))
        await self._replicas.start()
        self._sweeping = asyncio.create_task(self.sweeper.run())

    async def drain(self, patience_s: float) -> int:
        """Takes nothing new and waits for what is under way; returns how many had to be cut off."""
        self.draining = True
        try:
            await asyncio.wait_for(self._nothing_live.wait(), patience_s)
        except asyncio.TimeoutError:
            left = tuple(self._live)
            for generation in left:
                generation.cut(Unavailable("the gateway is stopping"))
            return len(left)
        return 0

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        await self.replicas.close()
        self.tracing.close()

    def ready(self) -> bool:
        return not self.draining and bool(self.replicas.fit())

    def tenant(self, api_key: str) -> Tenant:
        """Raises Unauthenticated."""
        return self.keys.tenant(api_key)

    def check_model(self, model: str, tenant: Tenant) -> None:
        """Raises NotFound for a model that is not served, PermissionDenied for one the tenant may not use."""
        if model not in (self.settings.model, self.settings.triton_model):
            raise NotFound(f"the model {model!r:.100} does not exist; there is {self.settings.model}")
        if tenant.models and not {self.settings.model, model} & set(tenant.models):
            raise PermissionDenied(f"this key may not use the model {model}")

    async def generation(self, asked: GenerationRequest, asking: Asking) -> Generation:
        """One admitted generation. Nothing is sent before it is read; leave it with ``close``, whatever happens.

        Raises what admission raises, and Unavailable while the gateway drains.
        """
        began_s = time.monotonic()
        operation = f"{asking.operation} {self.settings.model}"
        attributes = {
            "gen_ai.operation.name": asking.operation,
            "gen_ai.provider.name": "trident",
            "gen_ai.request.model": self.settings.model,
            "gen_ai.request.max_tokens": asked.max_tokens,
            "gen_ai.request.stream": asked.stream,
        }
        span = self.tracing.start(operation, asking.carrier, attributes)
        queue_span = self.tracing.child(span, "admission")
        try:
            with self.metrics.waiting.track_inprogress(), self.metrics.queue.time():
                if self.draining:
                    raise Unavailable("the gateway is stopping; another one may serve you", 1.0)
                permit = await self.admission.admit(asked, asking.tenant)
        except TridentError as error:
            self.metrics.rejections.labels(observability.reason(error)).inc()
            end_span(queue_span, error)
            end_span(span, error)
            self.log(asking, error, began_s)
            raise
        except BaseException as exc:  # the caller left the queue
            end_span(queue_span, exc)
            end_span(span, exc)
            raise
        end_span(queue_span)
        return Generation(self, permit, asking, began_s, span)

    def opened(self, generation: Generation) -> None:
        self._live.add(generation)
        self._nothing_live.clear()
        self.metrics.in_flight.inc()
        self.sweeper.add(generation)

    def closed(self, generation: Generation) -> None:
        self.sweeper.discard(generation)
        self.metrics.in_flight.dec()
        self._live.discard(generation)
        if not self._live:
            self._nothing_live.set()

    def log(self, asking: Asking, error: TridentError | None, began_s: float, **more: object) -> None:
        fields = {
            "request_id": asking.request_id,
            "tenant": asking.tenant.name,
            "door": asking.door,
            "operation": asking.operation,
            "error_type": type(error).__name__ if error else "",
            "duration_s": round(time.monotonic() - began_s, 6),
            **more,
        }
        level = logging.ERROR if error and error.http_status == 500 else logging.INFO
        said = f"generation failed: {error}" if level == logging.ERROR else "generation"
        _LOG.log(level, said.replace("%", "%%"), extra={"fields": fields})


class Generation:
    """An admitted generation under way: an asynchronous iterator of TokenDelta that ends or raises TridentError.

    ``request`` is what is served, ``headers`` what the response says about it. The KServe door reads raw messages
    instead, and reports them by ``saw``.
    """

    def __init__(self, service: Service, permit: Permit, asking: Asking, began_s: float, span: Span | None) -> None:
        self._service, self._permit, self._asking, self._span = service, permit, asking, span
        self.request = permit.request
        self.id = new_request_id()
        self.headers = permit.headers
        self.began_s = began_s
        self.first_s = 0.0
        self.usage: Usage | None = None
        self.finish_reason = ""
        self.tokens = 0
        self._waiting_since_s = 0.0
        self._cut_error: TridentError | None = None
        self._replica_span: Span | None = None
        self._door: Door | None = None
        self._stream: TokenStream | None = None
        self._task: asyncio.Task | None = None
        self._closed = False
        service.opened(self)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> TokenDelta:
        if self._stream is None:
            self._stream = self._opened()
        self.awaits()
        try:
            delta = await self._stream.__anext__()
        except Cancelled:
            if self._cut_error is not None:
                raise self._cut_error from None
            raise
        except StopAsyncIteration:
            self._waiting_since_s = 0.0
            raise
        self.saw(len(delta.token_ids), delta.finish_reason.value if delta.finish_reason else "", delta.usage)
        if delta.finish_reason is FinishReason.CANCELLED:
            raise Unavailable("the replica ended the generation before it was done")
        return delta

    def awaits(self) -> None:
        """It is the replica's turn now, and its silence counts."""
        self._waiting_since_s = time.monotonic()

    def door(self, payload: bytes = b"") -> Door:
        """Where the generation may go; its span begins."""
        self._replica_span = self._service.tracing.child(self._span, "replica", SpanKind.CLIENT)
        carrier = self._asking.carrier
        handed = observability.traceparent(self._replica_span, carrier)
        self._door = self._service.replicas.door(
            self.request, self._asking.tenant.pool, self._asking.session, handed, payload
        )
        return self._door

    def saw(self, tokens: int, finish_reason: str, usage: Usage | None) -> None:
        """Something arrived from the replica."""
        self._waiting_since_s = 0.0
        self.tokens += tokens
        if not self.first_s and (tokens or finish_reason):
            self.first_s = time.monotonic()
        if finish_reason:
            self.finish_reason, self.usage = finish_reason, usage

    def watched_by(self, task: asyncio.Task) -> None:
        """The task that reads raw messages; ``cut`` cancels it."""
        self._task = task

    def sweep(self, now_s: float) -> None:
        patience_s = self._service.settings.idle_timeout_s
        if self._waiting_since_s and now_s - self._waiting_since_s > patience_s:
            self.cut(DeadlineExceeded(f"the engine was silent for {patience_s:g} s"))

    def cut(self, error: TridentError) -> None:
        """Ends it with ``error``, for its reader to see; the engine is freed at once."""
        if self._cut_error is None and not self._closed:
            self._cut_error = error
            if self._stream is not None:
                self._stream.cancel()
            elif self._task is not None:
                self._task.cancel()

    @property
    def cut_error(self) -> TridentError | None:
        return self._cut_error

    def close(self, error: BaseException | None = None, attempts: int = 0) -> None:
        """The end, whichever: ``error`` is what the caller saw, or Cancelled if the caller went. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._stream is not None:
            attempts = self._stream.attempts
            self._stream.cancel()
        service, metrics = self._service, self._service.metrics
        if error is None and not self.finish_reason:
            error = Cancelled("the caller went away")
        if error is not None and not isinstance(error, TridentError):
            error = Cancelled("the caller went away")
        usage = self.usage or self._usage_so_far()
        self._permit.settle(usage)
        service.closed(self)
        self._count(metrics, usage, error, attempts)
        finish = self.finish_reason or ("cancelled" if isinstance(error, Cancelled) else "error")
        attributes = observability.generation_attributes(usage, finish)
        replica = self._door.replica if self._door else ""
        end_span(self._replica_span, error, **{"server.address": replica})
        end_span(self._span, error, **attributes)
        service.log(
            self._asking,
            error,
            self.began_s,
            generation_id=self.id,
            replica=replica,
            attempts=attempts,
            finish_reason=finish,
            ttft_s=round(self.first_s - self.began_s, 6) if self.first_s else None,
            input_tokens=usage.input_tokens if usage else 0,
            output_tokens=usage.output_tokens if usage else 0,
        )

    def _count(self, metrics: Metrics, usage: Usage | None, error: TridentError | None, attempts: int) -> None:
        now_s, labels = time.monotonic(), (self._asking.operation, self._service.settings.model)
        metrics.duration.labels(*labels, type(error).__name__ if error else "").observe(now_s - self.began_s)
        metrics.ends.labels(self.finish_reason or type(error).__name__).inc()
        metrics.retries.inc(max(0, attempts - 1))
        if self.first_s:
            metrics.first_token.labels(*labels).observe(self.first_s - self.began_s)
        if usage is not None:
            tenant = metrics.tenant(self._asking.tenant.name)
            metrics.tokens.labels(tenant, "input").inc(usage.input_tokens)
            metrics.tokens.labels(tenant, "output").inc(usage.output_tokens)
            if self.first_s and usage.output_tokens > 1:
                metrics.per_token.labels(*labels).observe((now_s - self.first_s) / (usage.output_tokens - 1))

    def _usage_so_far(self) -> Usage | None:
        """Of a generation that was cut: what it produced, and its prompt by size. None if nothing was produced."""
        if not self.tokens:
            return None
        known = self._service.replicas.costs
        cost = known.estimate(costs.prompt_bytes(self.request), 1)
        return Usage(round(cost.prefill / known.prefill_weight), self.tokens)

    def _opened(self) -> TokenStream:
        asked = dataclasses.replace(self.request, request_id=self.id)
        return TokenStream(self.door(), asked, self._service.replicas.schedule())
