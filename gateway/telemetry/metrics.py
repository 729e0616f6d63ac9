"""Prometheus metrics of the gateway's own work. They hold no prompt and no generated text."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from contract.errors import TridentError
from contract.generation import Usage

# The buckets OpenTelemetry advises for gen_ai.server.*, in seconds.
DURATION_S = tuple(0.01 * 2**n for n in range(14))
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
LAG_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
ENGINE = "engine"  # source of an answer that a replica or an upstream generated for its request
REUSE = ("hit", "semantic", "coalesced", "replayed", "miss", "bypass")
MAX_TENANTS = 100  # with labels of their own; further tenants share the label "other"


@dataclass(frozen=True)
class GenerationRecord:
    """Describes a generation, or a reused answer, that has ended. Times are ``time.monotonic()``.

    operation: ``chat``, ``text_completion`` or ``batch``.
    model: that served it, by the name of the configuration.
    pool: of the replicas, or the overflow target; "" where neither is known.
    began_s: arrival of the request.
    ended_s: when it ended.
    first_s: first token; 0 for none.
    finish_reason: "" if it did not finish.
    error_type: class of its error; "" for none.
    output_tokens: as the engine counted them; 0 if unknown.
    attempts: calls to replicas and upstreams.
    source: ENGINE, or where a reused answer came from.
    """

    operation: str
    model: str
    pool: str
    began_s: float
    ended_s: float
    first_s: float = 0.0
    finish_reason: str = ""
    error_type: str = ""
    output_tokens: int = 0
    attempts: int = 0
    source: str = ENGINE


class Metrics:
    """Holds the metrics of one gateway in a registry of its own."""

    def __init__(self) -> None:
        self.engine_tokens = 0
        registry = self.registry = CollectorRegistry()
        # source and pool: see GenerationRecord
        generation = ("operation", "model", "source", "pool")
        self.duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "Arrival to the last token, with queueing",
            (*generation, "error_type"),
            buckets=DURATION_S,
            registry=registry,
        )
        self.first_token = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Arrival to the first token, with queueing",
            generation,
            buckets=FIRST_TOKEN_S,
            registry=registry,
        )
        self.per_token = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time per token after the first, per engine generation",
            generation,
            buckets=PER_TOKEN_S,
            registry=registry,
        )
        self.queue = Histogram(
            "trident_gateway_admission_seconds",
            "Time in admission, to the permit or the refusal",
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
            "trident_gateway_rejections",
            "Requests refused before generation, by reason",
            ("reason",),
            registry=registry,
        )
        self.ends = Counter(
            "trident_gateway_generations",
            "Ended generations by finish reason or error, pool or overflow target, and source",
            ("end", "pool", "source"),
            registry=registry,
        )
        self.tokens = Counter(
            "trident_gateway_tokens",
            "Tokens by tenant, direction and source of the answer",
            ("tenant", "direction", "source"),
            registry=registry,
        )
        self.charges = Counter(
            "trident_gateway_charges",
            "What engine answers cost the tenant by the model's price, in the currency of [prices]",
            ("tenant", "model"),
            registry=registry,
        )
        self.retries = Counter("trident_gateway_retries", "Attempts after the first of a generation", registry=registry)
        self.continuations = Counter(
            "trident_gateway_continuations",
            "Generations that lost their replica: continued, refused, suspect, no_replica",
            ("result",),
            registry=registry,
        )
        self.reuse = Counter(
            "trident_gateway_reuse",
            "Requests by reuse result: hit, semantic, coalesced, replayed, miss, bypass",
            ("result",),
            registry=registry,
        )
        self.shadow = Counter(
            "trident_gateway_shadow", "Shadow copies of requests, by result", ("result",), registry=registry
        )
        self.in_flight = Gauge("trident_gateway_in_flight", "Admitted requests in flight", registry=registry)
        self.waiting = Gauge("trident_gateway_waiting", "Requests in admission", registry=registry)
        self.lag = Histogram(
            "trident_gateway_event_loop_lag_seconds",
            "Event loop lag: how late timers fire",
            buckets=LAG_S,
            registry=registry,
        )
        self._tenants: set[str] = set()
        for result in REUSE:  # rates need the series before its first increment
            self.reuse.labels(result)

    def tenant(self, name: str) -> str:
        """Return the tenant's label, one of a bounded set."""
        if name in self._tenants:
            return name
        if len(self._tenants) >= MAX_TENANTS:
            return "other"
        self._tenants.add(name)
        return name

    def ended(self, record: GenerationRecord) -> None:
        """Count a generation, or a reused answer, that has ended."""
        labels = (record.operation, record.model, record.source, record.pool)
        self.duration.labels(*labels, record.error_type).observe(record.ended_s - record.began_s)
        self.ends.labels(record.finish_reason or record.error_type, record.pool, record.source).inc()
        self.retries.inc(max(0, record.attempts - 1))
        if not record.first_s:
            return
        self.first_token.labels(*labels).observe(record.first_s - record.began_s)
        if record.source == ENGINE and record.output_tokens > 1:
            per_token_s = (record.ended_s - record.first_s) / (record.output_tokens - 1)
            self.per_token.labels(*labels).observe(per_token_s)

    def used(self, tenant: str, usage: Usage, source: str = ENGINE, model: str = "", cost: float = 0.0) -> None:
        """Count the tokens and the cost of one request; a prompt counts once for all its choices."""
        tenant = self.tenant(tenant)
        self.tokens.labels(tenant, "input", source).inc(usage.input_tokens)
        self.tokens.labels(tenant, "output", source).inc(usage.output_tokens)
        if cost:
            self.charges.labels(tenant, model).inc(cost)
        if source == ENGINE:
            self.engine_tokens += usage.input_tokens + usage.output_tokens

    def exposition(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)


def error_type(error: TridentError | None) -> str:
    """Return the label of an error; "" for none."""
    return type(error).__name__ if error else ""


def refusal_reason(error: TridentError) -> str:
    """Return the label of a refusal: the reason that admission set, else the class of the error."""
    return error.reason or type(error).__name__
