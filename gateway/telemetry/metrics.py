"""Prometheus metrics of the gateway's own work. They hold no prompt and no generated text."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from functools import lru_cache
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest

from contract.errors import Cancelled, InvalidArgument, Overloaded, TridentError
from contract.generation import Usage
from gateway.request_context import RequestContext
from gateway.telemetry.pool_outcomes import PoolOutcomes

# The buckets OpenTelemetry advises for gen_ai.server.*, in seconds.
DURATION_S = tuple(0.01 * 2**n for n in range(14))
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKENS = tuple(2**n for n in range(3, 18))  # 8 to 131,072
LAG_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
ENGINE = "engine"  # source of an answer that a replica or an upstream generated for its request
REUSE = ("hit", "semantic", "coalesced", "replayed", "miss", "bypass")
_OF_TENANT = ("budget", "quota", "concurrency")  # reasons that say nothing of the pool
_BY_TENANT = (
    ("prompt_tokens", "Prompt tokens of the engine's generations, by tenant", TOKENS),
    ("completion_tokens", "Completion tokens of the engine's generations, by tenant", TOKENS),
    ("seconds", "Arrival to the last token of the engine's generations, by tenant", DURATION_S),
    ("first_token_seconds", "Arrival to the first token of the engine's generations, by tenant", FIRST_TOKEN_S),
)
SERIES = 1000  # of a metric that are found at once
MAX_TENANTS = 100  # with labels of their own; further tenants share the label "other"


# prometheus_client's metrics where one thread changes them: without its lock and checks, three quarters of the cost. A
# change is one statement, so that a scrape from another thread reads whole values.
class Counter(prometheus_client.Counter):
    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        self._value._value += amount


class Gauge(prometheus_client.Gauge):
    def inc(self, amount: float = 1) -> None:
        self._value._value += amount

    def dec(self, amount: float = 1) -> None:
        self._value._value -= amount


class Histogram(prometheus_client.Histogram):
    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        self._sum._value += amount
        self._buckets[bisect_left(self._upper_bounds, amount)]._value += 1


class Metrics:
    """Holds the metrics of one gateway in a registry of its own."""

    def __init__(self) -> None:
        self.engine_tokens = 0
        registry = self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Any:
            return _remembering(Counter(f"trident_gateway_{name}", text, labels, registry=registry))

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Any:
            return _remembering(Histogram(name, text, labels, registry=registry, buckets=buckets))

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"trident_gateway_{name}", text, registry=registry)

        # source and pool: see ``ended``
        generation = ("operation", "model", "source", "pool")
        name, text = "gen_ai_server_request_duration_seconds", "Arrival to the last token, with queueing"
        self.duration = histogram(name, text, DURATION_S, *generation, "error_type")
        name, text = "gen_ai_server_time_to_first_token_seconds", "Arrival to the first token, with queueing"
        self.first_token = histogram(name, text, FIRST_TOKEN_S, *generation)
        text = "Mean time per token after the first, per engine generation"
        self.per_token = histogram("gen_ai_server_time_per_output_token_seconds", text, PER_TOKEN_S, *generation)
        text = "Time in admission, to the permit or the refusal"
        self.queue = histogram("trident_gateway_admission_seconds", text, FIRST_TOKEN_S)
        text = "Event loop lag: how late timers fire"
        self.lag = histogram("trident_gateway_event_loop_lag_seconds", text, LAG_S)
        self.by_tenant = [
            histogram(f"trident_gateway_tenant_{name}", text, buckets, "tenant", "operation")
            for name, text, buckets in _BY_TENANT
        ]
        text = "Answered requests by protocol and status"
        self.requests = counter("requests", text, "protocol", "operation", "code")
        self.rejections = counter("rejections", "Requests refused before generation, by reason", "reason")
        text = "Ended generations by finish reason or error, pool or overflow target, and source"
        self.ends = counter("generations", text, "end", "pool", "source")
        self.retries = counter("retries", "Attempts after the first of a generation")
        text = "Generations that lost their replica: continued, refused, suspect, no_replica"
        self.continuations = counter("continuations", text, "result")
        text = "Tokens by tenant, direction and source of the answer"
        self.tokens = counter("tokens", text, "tenant", "direction", "source")
        text = "What engine answers cost the tenant by the model's price, in the currency of [prices]"
        self.charges = counter("charges", text, "tenant", "model")
        text = "Records of ended requests that were lost, since the usage database could not be written"
        self.usage_lost = counter("usage_lost", text)
        text = "Ended generations of classes with objectives (ttft, itl), by whether they met them"
        self.objectives = counter("objectives", text, "class", "objective", "met")
        text = "Calls to the replicas of a pool: ok, error, refused; those that a caller ended are not counted"
        self.calls = counter("pool_calls", text, "pool", "result")
        text = "Refused requests of a pool, by reason; Overloaded, InvalidArgument: a replica refused"
        self.pool_refusals = counter("pool_refusals", text, "pool", "reason")
        text = "Tokens of the generations of a pool or overflow target"
        self.pool_tokens = counter("pool_tokens", text, "pool", "direction")
        self.reuse = counter("reuse", f"Requests by reuse result: {', '.join(REUSE)}", "result")
        self.shadow = counter("shadow", "Shadow copies of requests, by result", "result")
        self.in_flight = gauge("in_flight", "Admitted requests in flight")
        self.waiting = gauge("waiting", "Requests in admission")
        self.outcomes = PoolOutcomes()
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

    def ended(
        self,
        context: RequestContext,
        error: TridentError | None,
        finish_reason: str,
        *,
        began_s: float,
        first_s: float,
        pool: str = "",
        usage: Usage | None = None,
        whole: bool = False,
        attempts: int = 1,
        source: str = ENGINE,
    ) -> None:
        """Count a generation, or a reused answer, that ends now. Times are ``time.monotonic()``.

        began_s: arrival of the request. first_s: first token; 0 for none. finish_reason: "" for none.
        pool: of the replicas, or the overflow target; "" where unknown. source: ENGINE, or where it was reused from.
        whole: all tokens came at once, and say nothing of the time between them.
        attempts: calls to replicas and upstreams.
        """
        labels, ended_s = (context.operation, context.model.name, source, pool), time.monotonic()
        failed, ttft_s = error_type(error), first_s - began_s if first_s else math.inf
        self.duration.labels(*labels, failed).observe(ended_s - began_s)
        self.ends.labels(finish_reason or failed, pool, source).inc()
        if first_s:
            self.first_token.labels(*labels).observe(ttft_s)
        if source != ENGINE:
            return
        if attempts > 1:
            self.retries.inc(attempts - 1)
        tenant, rules = context.tenant, context.tenant.class_rules
        tokens = (usage.input_tokens, usage.output_tokens) if usage is not None else (0, 0)
        itl_s = (ended_s - first_s) / (tokens[1] - 1) if first_s and tokens[1] > 1 and not whole else None
        self.generated(pool, *tokens, ttft_s if first_s else None, itl_s)
        if first_s:
            name, values = self.tenant(tenant.name), (*tokens, ended_s - began_s, ttft_s)
            for metric, value in zip(self.by_tenant, values, strict=True):
                metric.labels(name, context.operation).observe(value)
        if itl_s is not None:
            self.per_token.labels(*labels).observe(itl_s)
        # A caller who left before the first token did not wait for it.
        if rules is not None and rules.ttft_s is not None and (first_s or not isinstance(error, Cancelled)):
            self.objectives.labels(tenant.request_class, "ttft", "yes" if ttft_s <= rules.ttft_s else "no").inc()
        if rules is not None and rules.itl_s is not None and itl_s is not None:
            self.objectives.labels(tenant.request_class, "itl", "yes" if itl_s <= rules.itl_s else "no").inc()

    def generated(
        self, pool: str, input_tokens: int, output_tokens: int, first_s: float | None, per_token_s: float | None
    ) -> None:
        """Count a generation, or a shadow copy, at its pool. first_s, per_token_s: None where there is none."""
        outcomes = self.outcomes.now(pool)
        outcomes.input_tokens += input_tokens
        outcomes.output_tokens += output_tokens
        self.pool_tokens.labels(pool, "input").inc(input_tokens)
        self.pool_tokens.labels(pool, "output").inc(output_tokens)
        if first_s is not None:
            outcomes.first.add(first_s)
        if per_token_s is not None:
            outcomes.token.add(per_token_s)

    def called(self, pool: str, error: TridentError | None, failed: bool | None) -> None:
        """Count a call to a replica of the pool. failed: None if the end says nothing of the replica."""
        if isinstance(error, Overloaded | InvalidArgument):
            self.calls.labels(pool, "refused").inc()
            self.refused(pool, error_type(error))
        elif failed is not None:
            outcomes = self.outcomes.now(pool)
            outcomes.requests += 1
            outcomes.errors += failed
            self.calls.labels(pool, "error" if failed else "ok").inc()

    def copied(self, pool: str, result: str) -> None:
        """Count a shadow copy that was sent to the pool. result: see Shadow."""
        self.outcomes.now(pool).copies[result] += 1
        self.shadow.labels(result).inc()

    def refused(self, pool: str, reason: str) -> None:
        """Count a request that the pool refused, or had no room for."""
        if reason not in _OF_TENANT:
            self.outcomes.now(pool).refusals += 1
        self.pool_refusals.labels(pool, reason).inc()

    def rejected(self, error: TridentError) -> None:
        """Count a request that was refused before generation, by admission's reason, else by the class of the error."""
        self.rejections.labels(error.reason or type(error).__name__).inc()

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


def _remembering(metric: Any) -> Any:
    """Return a metric that remembers the series of its labels: the library takes 2 µs each, ten times a request."""
    metric.labels = lru_cache(SERIES)(metric.labels)
    return metric


def error_type(error: TridentError | None) -> str:
    """Return the label of an error; "" for none."""
    return type(error).__name__ if error else ""
