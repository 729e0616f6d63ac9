"""What can be seen from outside: metrics and spans. No prompt and no answer appears in any of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry.propagate import extract, inject
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from contract.errors import TridentError
from contract.generation import Usage

if TYPE_CHECKING:
    from gateway.generation import Generation
    from gateway.request_context import RequestContext
    from gateway.service import Service

# The buckets OpenTelemetry advises for gen_ai.server.*, in seconds.
DURATION_S = tuple(0.01 * 2**n for n in range(14))
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
LAG_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
ENGINE = "engine"  # the source of an answer that was made for its request, by a replica or an upstream
REUSE = ("hit", "semantic", "coalesced", "replayed", "miss", "bypass")
MAX_TENANTS = 100  # that have a label of their own; later ones share "other"


class Metrics:
    """Every metric of one gateway, in a registry of its own."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.tokens_made = 0
        registry = self.registry = CollectorRegistry()
        # source: ENGINE, or where an answer came from that needed none; pool: of replicas, or the overflow target.
        generation = ("operation", "model", "source", "pool")
        self.duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "Arrival to the last token, queueing included",
            (*generation, "error_type"),
            buckets=DURATION_S,
            registry=registry,
        )
        self.first_token = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Arrival to the first token, queueing included",
            generation,
            buckets=FIRST_TOKEN_S,
            registry=registry,
        )
        self.per_token = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Per generation of an engine, mean of the tokens after the first",
            generation,
            buckets=PER_TOKEN_S,
            registry=registry,
        )
        self.queue = Histogram(
            "trident_gateway_admission_seconds",
            "Time in admission, until the permit or the refusal",
            buckets=FIRST_TOKEN_S,
            registry=registry,
        )
        self.requests = Counter(
            "trident_gateway_requests",
            "Answered requests by protocol and status",
            ("protocol", "operation", "code"),
            registry=registry,
        )
        self.rejections = Counter(
            "trident_gateway_rejections", "Refused before anything was made, by reason", ("reason",), registry=registry
        )
        self.ends = Counter(
            "trident_gateway_generations",
            "Ended answers by how they ended, the pool or target that made them, and their source",
            ("end", "pool", "source"),
            registry=registry,
        )
        self.tokens = Counter(
            "trident_gateway_tokens",
            "Tokens by tenant, direction and source of the answer",
            ("tenant", "direction", "source"),
            registry=registry,
        )
        self.retries = Counter(
            "trident_gateway_retries", "Calls to replicas beyond a generation's first", registry=registry
        )
        self.reuse = Counter(
            "trident_gateway_reuse",
            "Requests by whether an answer was there: hit, semantic, coalesced, replayed, miss, bypass",
            ("result",),
            registry=registry,
        )
        self.shadow = Counter(
            "trident_gateway_shadow", "Copies of requests by what came of them", ("result",), registry=registry
        )
        self.in_flight = Gauge("trident_gateway_in_flight", "Admitted answers under way", registry=registry)
        self.waiting = Gauge("trident_gateway_waiting", "Generations waiting in admission", registry=registry)
        self.lag = Histogram(
            "trident_gateway_event_loop_lag_seconds", "How late timers fire", buckets=LAG_S, registry=registry
        )
        self._tenants: set[str] = set()
        for result in REUSE:  # so that rates are there before the first of them
            self.reuse.labels(result)

    def tenant(self, name: str) -> str:
        """The label of a tenant, one of a bounded set."""
        if name in self._tenants:
            return name
        if len(self._tenants) >= MAX_TENANTS:
            return "other"
        self._tenants.add(name)
        return name

    def ended(self, generation: Generation, asking: RequestContext, pool: str, attempts: int) -> None:
        """A generation is over."""
        now_s, labels = time.monotonic(), (asking.operation, self._model, ENGINE, pool)
        error, usage, first_s = generation.error, generation.usage, generation.first_s
        self.duration.labels(*labels, end_of(error)).observe(now_s - generation.began_s)
        self.ends.labels(generation.finish_reason or end_of(error), pool, ENGINE).inc()
        self.retries.inc(max(0, attempts - 1))
        if first_s:
            self.first_token.labels(*labels).observe(first_s - generation.began_s)
        if usage is not None and first_s and usage.output_tokens > 1:
            self.per_token.labels(*labels).observe((now_s - first_s) / (usage.output_tokens - 1))

    def reused(
        self, operation: str, source: str, began_s: float, first_s: float, end: str, error: TridentError | None
    ) -> None:
        """Count a reused response that has ended. first_s: when its first token was sent; 0 for never."""
        labels = (operation, self._model, source, "")
        self.duration.labels(*labels, end_of(error)).observe(time.monotonic() - began_s)
        self.ends.labels(end, "", source).inc()
        if first_s:
            self.first_token.labels(*labels).observe(first_s - began_s)

    def used(self, tenant: str, usage: Usage, source: str = ENGINE) -> None:
        """Tokens of one caller's answer: a prompt once, however many choices were made of it. Those of an engine are
        what the caller is charged with, and what replicas cost."""
        tenant = self.tenant(tenant)
        self.tokens.labels(tenant, "input", source).inc(usage.input_tokens)
        self.tokens.labels(tenant, "output", source).inc(usage.output_tokens)
        if source == ENGINE:
            self.tokens_made += usage.input_tokens + usage.output_tokens

    def page(self) -> bytes:
        return generate_latest(self.registry)


class StateMetrics:
    """A collector of how things stand at the moment the page is read: replicas, upstreams, queue, refusals, cost."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> list:
        return []

    def collect(self) -> Iterator[Metric]:
        service, admission = self._service, self._service.admission
        labels = ("replica", "pool")
        healthy = GaugeMetricFamily("trident_gateway_replica_healthy", "1 if probes say so", labels=labels)
        breaker = GaugeMetricFamily("trident_gateway_breaker_state", "0 closed, 1 half open, 2 open", labels=labels)
        outstanding = GaugeMetricFamily(
            "trident_gateway_replica_outstanding", "Requests this gateway has there", labels=labels
        )
        waiting = GaugeMetricFamily("trident_gateway_replica_waiting", "Waiting, by its page", labels=labels)
        kv_usage = GaugeMetricFamily(
            "trident_gateway_replica_kv_usage_ratio", "KV cache in use, by its page", labels=labels
        )
        now_s = time.monotonic()
        for replica in service.replicas.all():
            values = (replica.url, replica.pool)
            healthy.add_metric(values, float(bool(replica.health.healthy)))
            breaker.add_metric(values, replica.breaker.state_at(now_s).value)
            outstanding.add_metric(values, replica.work.outstanding)
            waiting.add_metric(values, replica.page.waiting)
            kv_usage.add_metric(values, replica.page.kv_usage)
        for upstream in service.overflow.upstreams():
            breaker.add_metric((upstream.url, upstream.name), upstream.breaker.state_at(now_s).value)
            outstanding.add_metric((upstream.url, upstream.name), upstream.outstanding)
        yield from (healthy, breaker, outstanding, waiting, kv_usage)
        yield GaugeMetricFamily("trident_gateway_body_bytes", "Bytes of requests under way", service.bodies.held)
        yield from self._pools()
        degraded = CounterMetricFamily(
            "trident_gateway_degraded", "Requests that were given less, by stage", labels=("stage",)
        )
        for stage, count in admission.degraded.items():
            degraded.add_metric((stage,), count)
        yield degraded
        yield CounterMetricFamily(
            "trident_gateway_replica_seconds", "Time of fit replicas", service.replica_seconds.total()
        )
        prices = service.configuration.policy.prices
        if prices is not None:
            cost = service.replica_seconds.total() * prices.replica_hour / 3600
            spent = CounterMetricFamily("trident_gateway_cost", "Of the fit replicas' time", labels=("currency",))
            spent.add_metric((prices.currency,), cost)
            per_1000 = GaugeMetricFamily(
                "trident_gateway_cost_per_1000_tokens",
                "Since the start, input and output tokens together",
                labels=("currency",),
            )
            if service.metrics.tokens_made:
                per_1000.add_metric((prices.currency,), cost / service.metrics.tokens_made * 1000)
            yield from (spent, per_1000)

    def _pools(self) -> Iterator[Metric]:
        """Slots, queue and health of each pool."""
        service = self._service
        said = {
            "ready": "1 if it has a fit replica",
            "slots": "Requests its fit replicas can run at once, without what other gateways use",
            "limit": "Requests this gateway may have there at once",
            "running": "Requests that hold a slot",
            "waiting": "Requests that wait for a slot",
            "queued_tokens": "Tokens that waiting requests may use",
            "others": "Requests of other gateways there, by the replicas' metrics",
        }
        families = {
            name: GaugeMetricFamily(f"trident_gateway_pool_{name}", text, labels=("pool",))
            for name, text in said.items()
        }
        depth = GaugeMetricFamily(
            "trident_gateway_queue_depth", "Requests that wait, by class", labels=("pool", "priority")
        )
        for pool in service.replicas.pools:
            slots, fit = service.admission.slots(pool), service.replicas.fit_in(pool)
            capacity = slots.capacity
            values = {
                "ready": bool(fit),
                "slots": capacity.slots if fit else 0,
                "limit": capacity.limit if fit else 0,
                "running": slots.running,
                "waiting": slots.waiting,
                "queued_tokens": slots.queue.backlog_tokens,
                "others": sum(replica.others.requests for replica in fit),
            }
            for name, value in values.items():
                families[name].add_metric((pool,), float(value))
            for priority, count in sorted(slots.queue.depths().items()):
                depth.add_metric((pool, str(priority)), count)
        yield from (*families.values(), depth)


class ReplicaSeconds:
    """How long how many replicas were fit: the integral of their number. ``look`` now and then."""

    def __init__(self, fit: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._fit, self._clock = fit, clock
        self._at_s, self._count, self._total = clock(), 0, 0.0

    def total(self) -> float:
        """Seconds of replicas so far. Looks."""
        now_s = self._clock()
        self._total += self._count * (now_s - self._at_s)
        self._at_s, self._count = now_s, self._fit()
        return self._total

    def check(self, now_s: float) -> None:
        self.total()


class Tracing:
    """Spans of requests, exported over OTLP, or none at all.

    Without an endpoint a caller's trace context is handed on as it is, so that its trace still reaches the engine.
    """

    def __init__(self, endpoint: str = "", exporter: SpanExporter | None = None) -> None:
        self._provider: TracerProvider | None = None
        if endpoint and exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(endpoint=endpoint)
        if exporter is not None:
            self._provider = TracerProvider(resource=Resource.create({"service.name": "trident-gateway"}))
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
            self._tracer = self._provider.get_tracer("gateway")

    @property
    def on(self) -> bool:
        return self._provider is not None

    def start(self, name: str, carrier: Mapping[str, str], attributes: Mapping[str, Any]) -> Span | None:
        """The span of one request, below the caller's if its ``traceparent`` is in the carrier."""
        if self._provider is None:
            return None
        context = extract(dict(carrier))
        return self._tracer.start_span(name, context=context, kind=SpanKind.SERVER, attributes=dict(attributes))

    def child(self, parent: Span | None, name: str, kind: SpanKind = SpanKind.INTERNAL) -> Span | None:
        if parent is None:
            return None
        return self._tracer.start_span(name, context=set_span_in_context(parent), kind=kind)

    def past(self, parent: Span, name: str, start_ns: int, end_ns: int) -> Span:
        """A span of what is over already."""
        span = self._tracer.start_span(name, context=set_span_in_context(parent), start_time=start_ns)
        span.end(end_ns)
        return span

    def close(self) -> None:
        """Sends what is left."""
        if self._provider is not None:
            self._provider.shutdown()


def traceparent(span: Span | None, carrier: Mapping[str, str]) -> str:
    """The context to hand on: the span's, else the caller's own if it is well-formed, else none."""
    if span is None and "traceparent" not in carrier:
        return ""
    handed: dict[str, str] = {}
    inject(handed, context=set_span_in_context(span) if span else extract(dict(carrier)))
    return handed.get("traceparent", "")


def end_span(
    span: Span | None, error: BaseException | None = None, *, end_ns: int | None = None, **attributes: Any
) -> None:
    """Ends a span. end_ns: when it ended, wall clock; None for now."""
    if span is None:
        return
    for key, value in attributes.items():
        span.set_attribute(key, value)
    if error is not None:
        span.set_attribute("error.type", type(error).__name__)
        span.set_status(Status(StatusCode.ERROR))
    span.end(end_ns)


def generation_attributes(usage: Usage | None, finish_reasons: Sequence[str]) -> dict[str, Any]:
    """The attributes OpenTelemetry's GenAI conventions name."""
    found: dict[str, Any] = {"gen_ai.response.finish_reasons": list(finish_reasons)} if finish_reasons else {}
    if usage is not None:
        found["gen_ai.usage.input_tokens"] = usage.input_tokens
        found["gen_ai.usage.output_tokens"] = usage.output_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    return found


def end_of(error: TridentError | None) -> str:
    """What the end of a generation that did not finish is called."""
    return type(error).__name__ if error else ""


def reason(error: TridentError) -> str:
    """The label of a refusal: the error's name, or the finer one admission gave it."""
    return getattr(error, "reason", "") or type(error).__name__
