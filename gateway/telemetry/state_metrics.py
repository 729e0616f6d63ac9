"""Metrics that are computed at each scrape: replicas, upstreams, pools, degraded requests, cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.admission.pool_slots import PoolSlots
from gateway.config.policy import Prices
from gateway.config.release import ReleaseRules
from gateway.routing.replicas import RoutedReplica
from gateway.routing.upstream import Upstream
from gateway.telemetry.burn_rate import Verdict


class PoolState(NamedTuple):
    """name: of the pool. slots: its slots and queue. healthy: its replicas that can serve now.

    starting: for each registered replica that starts the seconds until it is ready, None where unknown.
    """

    name: str
    slots: PoolSlots
    healthy: list[RoutedReplica]
    starting: Sequence[float | None] = ()


class ReplicaSeconds:
    """Integrates the number of healthy replicas, which ``healthy`` returns, over time. Call ``check`` periodically."""

    # The clock is looked up at every call: simulator/virtual_time.py replaces it.
    def __init__(self, healthy: Callable[[], int], clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        self._healthy, self._clock = healthy, clock
        self._at_s, self._count, self._total = clock(), 0, 0.0

    def total(self) -> float:
        """Return the replica-seconds so far."""
        now_s = self._clock()
        self._total += self._count * (now_s - self._at_s)
        self._at_s, self._count = now_s, self._healthy()
        return self._total

    def check(self, now_s: float) -> None:
        self.total()


@dataclass(frozen=True, eq=False)
class StateMetrics:
    """A Prometheus collector. Every field returns the state at the time of the scrape.

    body_bytes: that request bodies hold. counted: requests under caps. degraded: requests by stage.
    tokens: that engines read and made.
    prices: None where none is set; then no cost is reported.
    """

    replicas: Callable[[], Iterable[RoutedReplica]]
    upstreams: Callable[[], Iterable[Upstream]]
    pools: Callable[[], Iterable[PoolState]]
    body_bytes: Callable[[], int]
    counted: Callable[[], int]
    degraded: Callable[[], Mapping[str, int]]
    replica_seconds: Callable[[], float]
    tokens: Callable[[], int]
    prices: Callable[[], Prices | None]
    releases: Callable[[], Iterable[tuple[str, ReleaseRules, Verdict]]] = tuple

    def describe(self) -> list[Metric]:
        return []  # or registering would collect before the state exists

    def collect(self) -> Iterator[Metric]:
        yield from self._backends()
        yield GaugeMetricFamily("trident_gateway_body_bytes", "Bytes of request bodies in flight", self.body_bytes())
        text = "Requests that count under max_in_flight of gateway, classes and tenants, those in admission included"
        yield GaugeMetricFamily("trident_gateway_counted_requests", text, self.counted())
        yield from self._pools()
        yield from self._releases()
        degraded = _counter("degraded", "Degraded requests, by stage", "stage")
        for stage, count in self.degraded().items():
            degraded.add_metric((stage,), count)
        seconds, prices = self.replica_seconds(), self.prices()
        total = _counter("replica_seconds", "Healthy replicas integrated over time, seconds")
        total.add_metric((), seconds)
        yield from (degraded, total)
        if prices is not None and prices.replica_hour is not None:
            cost, tokens = seconds * prices.replica_hour / 3600, self.tokens()
            spent = _counter("cost", "Cost of the replica-seconds", "currency")
            spent.add_metric((prices.currency,), cost)
            per_1000 = _gauge("cost_per_1000_tokens", "Since the start, input and output tokens", "currency")
            if tokens:
                per_1000.add_metric((prices.currency,), cost / tokens * 1000)
            yield from (spent, per_1000)

    def _releases(self) -> Iterator[Metric]:
        families = _gauges(
            ("release",),
            release_weight="Percent of the requests, or of the copies, that the candidate gets now",
            release_rolled_back="1 if the release was rolled back",
        )
        text = "How fast the candidate burns a budget; 1 uses it up"
        burn_rates = _gauge("release_burn_rate", text, "release", "objective", "window")
        for name, rules, verdict in self.releases():
            values = {"release_weight": rules.share * 100, "release_rolled_back": bool(rules.rolled_back)}
            _add(families, (name,), values)
            for objective, burn in verdict.burns.items():
                for window, value in burn._asdict().items():
                    burn_rates.add_metric((name, objective, window), value)
        yield from (*families.values(), burn_rates)

    def _backends(self) -> Iterator[Metric]:
        families = _gauges(
            ("replica", "pool"),
            replica_healthy="1 if health probes succeed",
            breaker_state="0 closed, 1 half open, 2 open",
            replica_outstanding="Requests of this gateway at the replica",
            replica_waiting="Requests waiting at the replica, by its metrics",
            replica_kv_usage_ratio="KV cache blocks in use, by the replica's metrics",
            replica_slots="Requests that the replica runs at once, by its metrics; 0 if unknown",
            replica_tokens_per_second="Tokens of decoding per second with all slots taken, 0 if unknown",
        )
        text = "Output tokens that the gateway relayed from the replica"
        tokens = _counter("replica_tokens", text, "replica", "pool")
        now_s = time.monotonic()
        for replica in self.replicas():
            tokens.add_metric((replica.url, replica.pool), replica.tokens)
            values = {
                "replica_healthy": bool(replica.health.healthy),
                "breaker_state": replica.breaker.state_at(now_s).value,
                "replica_outstanding": replica.work.outstanding,
                "replica_waiting": replica.metrics.waiting,
                "replica_kv_usage_ratio": replica.metrics.kv_usage,
                "replica_slots": replica.slots,
                "replica_tokens_per_second": replica.tokens_per_s(replica.slots),
            }
            _add(families, (replica.url, replica.pool), values)
        spent = _counter("upstream_spend", "What answers of upstreams cost", "pool")
        for upstream in self.upstreams():
            breaker = upstream.breaker.state_at(now_s).value
            values = {"breaker_state": breaker, "replica_outstanding": upstream.outstanding}
            _add(families, (upstream.url, upstream.name), values)
            spent.add_metric((upstream.name,), upstream.total)
        yield from (*families.values(), tokens, spent)

    def _pools(self) -> Iterator[Metric]:
        families = _gauges(
            ("pool",),
            pool_ready="1 if the pool has a healthy replica",
            pool_slots="Requests that its healthy replicas can run, less those of other gateways",
            pool_limit="Requests that this gateway may have there",
            pool_running="Requests that hold a slot",
            pool_waiting="Requests that wait for a slot",
            pool_queued_tokens="Tokens that waiting requests may use",
            pool_others="Requests of other gateways there, by the replicas' metrics",
            pool_token_cost="Work of a reserved token in tokens of decoding, as measured; 0 if unknown",
            pool_drain_tokens_per_second="Reserved tokens settled per second while requests wait; 0 if none waited",
            pool_starting="Registered replicas that start",
            pool_starting_seconds="Until the last of them is ready, by their last starts; absent while one is unknown",
        )
        depth = _gauge("queue_depth", "Requests that wait for a slot, by priority class", "pool", "priority")
        text = "Prompt and max_tokens of requests, by priority class and whether they are queued or running"
        backlog = _gauge("pool_backlog_tokens", text, "pool", "priority", "state")
        arrived = _counter("pool_arrived_tokens", "Tokens that all requests so far might use", "pool")
        for pool in self.pools():
            slots, healthy, capacity = pool.slots, pool.healthy, pool.slots.capacity
            values = {
                "pool_ready": bool(healthy),
                "pool_slots": capacity.slots if healthy else 0,
                "pool_limit": capacity.limit if healthy else 0,
                "pool_running": slots.running,
                "pool_waiting": slots.waiting,
                "pool_queued_tokens": slots.queue.backlog_tokens,
                "pool_others": sum(replica.others.requests for replica in healthy),
                "pool_token_cost": slots.token_cost,
                "pool_drain_tokens_per_second": slots.drain_tokens_per_s,
                "pool_starting": len(pool.starting),
            }
            if None not in pool.starting:
                values["pool_starting_seconds"] = max(map(float, filter(None, pool.starting)), default=0.0)
            _add(families, (pool.name,), values)
            for priority, count in sorted(slots.queue.by_class.items()):
                depth.add_metric((pool.name, str(priority)), count)
            for state, tokens in (("queued", slots.queue.backlog), ("running", slots.running_tokens)):
                for priority, amount in sorted(tokens.items()):
                    backlog.add_metric((pool.name, str(priority), state), amount)
            arrived.add_metric((pool.name,), slots.arrived_tokens)
        yield from (*families.values(), depth, backlog, arrived)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"trident_gateway_{name}", text, labels=labels)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"trident_gateway_{name}", text, labels=labels)


def _gauges(labels: tuple[str, ...], **help_texts: str) -> dict[str, GaugeMetricFamily]:
    return {name: _gauge(name, text, *labels) for name, text in help_texts.items()}


def _add(families: Mapping[str, GaugeMetricFamily], labels: tuple[str, ...], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        families[name].add_metric(labels, float(value))
