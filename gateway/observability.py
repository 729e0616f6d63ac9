"""What can be seen from outside: metrics, spans and log lines. No prompt and no answer appears in any of them."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson
from opentelemetry.propagate import extract, inject
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from contract.errors import TridentError
from contract.generation import Usage

if TYPE_CHECKING:
    from gateway.replicas import Replicas

# The buckets OpenTelemetry advises for gen_ai.server.*, in seconds.
DURATION_S = tuple(0.01 * 2**n for n in range(14))
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
LAG_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
MAX_TENANTS = 100  # that have a label of their own; later ones share "other"


class Metrics:
    """Every metric of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        generation = ("operation", "model", "error_type")
        self.duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "Arrival to the last token, queueing included",
            generation,
            buckets=DURATION_S,
            registry=registry,
        )
        self.first_token = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Arrival to the first token, queueing included",
            generation[:2],
            buckets=FIRST_TOKEN_S,
            registry=registry,
        )
        self.per_token = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Per generation, mean of the tokens after the first",
            generation[:2],
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
            "Answered requests by door and status",
            ("door", "operation", "code"),
            registry=registry,
        )
        self.rejections = Counter(
            "trident_gateway_rejections", "Refused before anything was made, by reason", ("reason",), registry=registry
        )
        self.ends = Counter(
            "trident_gateway_generations", "Ended generations by how they ended", ("end",), registry=registry
        )
        self.tokens = Counter(
            "trident_gateway_tokens", "Tokens by tenant and direction", ("tenant", "direction"), registry=registry
        )
        self.retries = Counter(
            "trident_gateway_retries", "Calls to replicas beyond a generation's first", registry=registry
        )
        self.in_flight = Gauge("trident_gateway_in_flight", "Admitted generations under way", registry=registry)
        self.waiting = Gauge("trident_gateway_waiting", "Generations waiting in admission", registry=registry)
        self.lag = Histogram(
            "trident_gateway_event_loop_lag_seconds", "How late timers fire", buckets=LAG_S, registry=registry
        )
        self._tenants: set[str] = set()

    def tenant(self, name: str) -> str:
        """The label of a tenant, one of a bounded set."""
        if name in self._tenants:
            return name
        if len(self._tenants) >= MAX_TENANTS:
            return "other"
        self._tenants.add(name)
        return name

    def page(self) -> bytes:
        return generate_latest(self.registry)


class ReplicaMetrics:
    """A collector of what is known of the replicas at the moment the page is read."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def describe(self) -> list:
        return []

    def collect(self):
        labels = ("replica", "pool")
        families = {
            "healthy": GaugeMetricFamily("trident_gateway_replica_healthy", "1 if probes say so", labels=labels),
            "breaker": GaugeMetricFamily(
                "trident_gateway_breaker_state", "0 closed, 1 half open, 2 open", labels=labels
            ),
            "outstanding": GaugeMetricFamily(
                "trident_gateway_replica_outstanding", "Requests this gateway has there", labels=labels
            ),
            "waiting": GaugeMetricFamily("trident_gateway_replica_waiting", "Waiting, by its page", labels=labels),
            "kv": GaugeMetricFamily(
                "trident_gateway_replica_kv_usage_ratio", "KV cache in use, by its page", labels=labels
            ),
        }
        for replica in self._replicas.all():
            values = (replica.url, replica.pool)
            families["healthy"].add_metric(values, float(bool(replica.health.healthy)))
            families["breaker"].add_metric(values, replica.breaker.state.value)
            families["outstanding"].add_metric(values, replica.outstanding)
            families["waiting"].add_metric(values, replica.page.waiting)
            families["kv"].add_metric(values, replica.page.kv_usage)
        return list(families.values())


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

    def close(self) -> None:
        """Sends what is left."""
        if self._provider is not None:
            self._provider.shutdown()


def traceparent(span: Span | None, carrier: Mapping[str, str]) -> str:
    """The context to hand on: the span's, else the caller's own if it is well-formed, else none."""
    handed: dict[str, str] = {}
    inject(handed, context=set_span_in_context(span) if span else extract(dict(carrier)))
    return handed.get("traceparent", "")


def end_span(span: Span | None, error: BaseException | None = None, **attributes: Any) -> None:
    if span is None:
        return
    for key, value in attributes.items():
        span.set_attribute(key, value)
    if error is not None:
        span.set_attribute("error.type", type(error).__name__)
        span.set_status(Status(StatusCode.ERROR))
    span.end()


def generation_attributes(usage: Usage | None, finish_reason: str) -> dict[str, Any]:
    """The attributes OpenTelemetry's GenAI conventions name."""
    found: dict[str, Any] = {"gen_ai.response.finish_reasons": [finish_reason]} if finish_reason else {}
    if usage is not None:
        found["gen_ai.usage.input_tokens"] = usage.input_tokens
        found["gen_ai.usage.output_tokens"] = usage.output_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    return found


def reason(error: TridentError) -> str:
    """The label of a refusal: the error's name, or the finer one admission gave it."""
    return getattr(error, "reason", "") or type(error).__name__


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the fields given as ``extra={"fields": {...}}``."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def log_as_json(level: str) -> None:
    """Every logger of the process writes JSON lines to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
