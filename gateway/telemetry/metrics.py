"""Prometheus metrics of the gateway's own work. They hold no prompt and no generated text."""

from __future__ import annotations

import math
import time
from functools import lru_cache, partial
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from contract.errors import Cancelled, InvalidArgument, Overloaded, TridentError
from contract.generation import Usage
from gateway.config.tenant import Tenant
from gateway.telemetry.pool_outcomes import PoolOutcomes
from gateway.telemetry.series import Counter, Gauge, Histogram

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


class Metrics:
    """Holds the metrics of one gateway in a registry of its own."""

    def __init__(self) -> None:
        self.engine_tokens = 0
        registry = self.registry = CollectorRegistry()
        counter, gauge = partial(_labelled, Counter, registry), partial(Gauge, registry=registry)
        histogram = partial(_labelled, Histogram, registry)
        # source and pool: see ``ended``
        generation = ("operation", "model", "source", "pool")
        text = "Arrival to the last token, with queueing"
        labels: tuple[str, ...] = (*generation, "error_type")
        self.duration = histogram("gen_ai_server_request_duration_seconds", text, labels, buckets=DURATION_S)
        text = "Arrival to the first token, with queueing"
        self.first_token = histogram(
            "gen_ai_server_time_to_first_token_seconds", text, generation, buckets=FIRST_TOKEN_S
        )
        text = "Mean time per token after the first, per engine generation"
        self.per_token = histogram("gen_ai_server_time_per_output_token_seconds", text, generation, buckets=PER_TOKEN_S)
        text = "Time in admission, to the permit or the refusal"
        self.queue = histogram("trident_gateway_admission_seconds", text, buckets=FIRST_TOKEN_S)
        labels = ("protocol", "operation", "code")
        self.requests = counter("trident_gateway_requests", "Answered requests by protocol and status", labels)
        text = "Requests refused before generation, by reason"
        self.rejections = counter("trident_gateway_rejections", text, ("reason",))
        text = "Ended generations by finish reason or error, pool or overflow target, and source"
        self.ends = counter("trident_gateway_generations", text, ("end", "pool", "source"))
        text = "Tokens by tenant, direction and source of the answer"
        self.tokens = counter("trident_gateway_tokens", text, ("tenant", "direction", "source"))
        text = "What engine answers cost the tenant by the model's price, in the currency of [prices]"
        self.charges = counter("trident_gateway_charges", text, ("tenant", "model"))
        text = "Ended generations of classes with objectives (ttft, itl), by whether they met them"
        self.objectives = counter("trident_gateway_objectives", text, ("class", "objective", "met"))
        text = "Calls to the replicas of a pool: ok, error, refused; those that a caller ended are not counted"
        self.calls = counter("trident_gateway_pool_calls", text, ("pool", "result"))
        text = "Refused requests of a pool, by reason; Overloaded, InvalidArgument: a replica refused"
        self.pool_refusals = counter("trident_gateway_pool_refusals", text, ("pool", "reason"))
        text = "Tokens of the generations of a pool or overflow target"
        self.pool_tokens = counter("trident_gateway_pool_tokens", text, ("pool", "direction"))
        text = "Records of ended requests that were lost, since the usage database could not be written"
        self.usage_lost = counter("trident_gateway_usage_lost", text)
        self.by_tenant = [
            histogram(f"trident_gateway_tenant_{name}", text, ("tenant", "operation"), buckets=buckets)
            for name, text, buckets in _BY_TENANT
        ]
        self.outcomes = PoolOutcomes()
        self.retries = counter("trident_gateway_retries", "Attempts after the first of a generation")
        text = "Generations that lost their replica: continued, refused, suspect, no_replica"
        self.continuations = counter("trident_gateway_continuations", text, ("result",))
        text = "Requests by reuse result: hit, semantic, coalesced, replayed, miss, bypass"
        self.reuse = counter("trident_gateway_reuse", text, ("result",))
        self.shadow = counter("trident_gateway_shadow", "Shadow copies of requests, by result", ("result",))
        self.in_flight = gauge("trident_gateway_in_flight", "Admitted requests in flight")
        self.waiting = gauge("trident_gateway_waiting", "Requests in admission")
        text = "Event loop lag: how late timers fire"
        self.lag = histogram("trident_gateway_event_loop_lag_seconds", text, buckets=LAG_S)
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
        operation: str,
        model: str,
        *,
        pool: str,
        began_s: float,
        first_s: float,
        finish_reason: str,
        error_type: str,
        input_tokens: int = 0,
        output_tokens: int = 0,
        whole: bool = False,
        attempts: int = 0,
        source: str = ENGINE,
        tenant: Tenant | None = None,
    ) -> None:
        """Count a generation, or a reused answer, that ends now. Times are ``time.monotonic()``.

        operation: ``chat``, ``text_completion`` or ``batch``.
        model: that served it, by the name of the configuration.
        pool: of the replicas, or the overflow target; "" where neither is known.
        began_s: arrival of the request.
        first_s: first token; 0 for none.
        finish_reason: "" if it did not finish.
        error_type: class of its error; "" for none.
        input_tokens, output_tokens: as the engine counted them; 0 if unknown.
        whole: all tokens came at once, and say nothing of the time between them.
        attempts: calls to replicas and upstreams.
        source: ENGINE, or where a reused answer came from.
        tenant: with the request's class; None for none.
        """
        labels, ended_s = (operation, model, source, pool), time.monotonic()
        self.duration.labels(*labels, error_type).observe(ended_s - began_s)
        self.ends.labels(finish_reason or error_type, pool, source).inc()
        if attempts > 1:
            self.retries.inc(attempts - 1)
        rules = tenant.class_rules if tenant is not None else None
        ttft_s = first_s - began_s if first_s else math.inf
        itl_s = (ended_s - first_s) / (output_tokens - 1) if first_s and output_tokens > 1 and not whole else None
        left = not first_s and error_type == Cancelled.__name__  # the caller did not wait for the token
        if tenant is not None and rules is not None and rules.ttft_s is not None and not left:
            self.objectives.labels(tenant.request_class, "ttft", _met(ttft_s <= rules.ttft_s)).inc()
        if source == ENGINE:
            self.generated(pool, input_tokens, output_tokens, ttft_s if first_s else None, itl_s)
            if tenant is not None and first_s:
                name, values = self.tenant(tenant.name), (input_tokens, output_tokens, ended_s - began_s, ttft_s)
                for metric, value in zip(self.by_tenant, values, strict=True):
                    metric.labels(name, operation).observe(value)
        if not first_s:
            return
        self.first_token.labels(*labels).observe(ttft_s)
        if source == ENGINE and itl_s is not None:
            self.per_token.labels(*labels).observe(itl_s)
            if tenant is not None and rules is not None and rules.itl_s is not None:
                self.objectives.labels(tenant.request_class, "itl", _met(itl_s <= rules.itl_s)).inc()

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


def _labelled(kind: Any, registry: CollectorRegistry, *arguments: Any, **options: Any) -> Any:
    """Return a metric that remembers the series of its labels: the library takes 2 µs each, ten times a request."""
    metric = kind(*arguments, registry=registry, **options)
    metric.labels = lru_cache(SERIES)(metric.labels)
    return metric


def _met(met: bool) -> str:
    return "yes" if met else "no"


def error_type(error: TridentError | None) -> str:
    """Return the label of an error; "" for none."""
    return type(error).__name__ if error else ""


def refusal_reason(error: TridentError) -> str:
    """Return the label of a refusal: the reason that admission set, else the class of the error."""
    return error.reason or type(error).__name__
