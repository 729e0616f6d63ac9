"""Metrics of batches. Tokens and durations of their requests are in the gateway's metrics, with the operation
``batch``."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.batch.aimd import Reason
from gateway.batch.store import UNFINISHED


class BatchMetrics:
    """stalled_s: returns for how long pending lines have made no progress, in seconds; called at every scrape."""

    def __init__(self, registry: CollectorRegistry, stalled_s: Callable[[], float]) -> None:
        self.lines = Counter(
            "trident_gateway_batch_lines",
            "Batch lines by outcome: completed and failed have a result, retried and preempted run again",
            ("outcome",),
            registry=registry,
        )
        self.cuts = Counter(
            "trident_gateway_batch_pace_cuts",
            "Ticks at which the pace was cut, by reason",
            ("reason",),
            registry=registry,
        )
        self.webhooks = Counter(
            "trident_gateway_batch_webhooks",
            "Webhook calls by outcome: taken, retried, given_up",
            ("outcome",),
            registry=registry,
        )
        self.allowed = Gauge("trident_gateway_batch_allowed", "Batch lines that may run at once", registry=registry)
        self.running = Gauge("trident_gateway_batch_running", "Batch lines running", registry=registry)
        self.pending = Gauge("trident_gateway_batch_pending_lines", "Batch lines without a result", registry=registry)
        unfinished = Gauge("trident_gateway_batches", "Unfinished batches by status", ("status",), registry=registry)
        self.unfinished = {status: unfinished.labels(status) for status in UNFINISHED}
        stalled = Gauge(
            "trident_gateway_batch_stalled_seconds",
            "Seconds since a line got its result while lines are pending; else 0",
            registry=registry,
        )
        stalled.set_function(stalled_s)
        for outcome in ("completed", "failed", "retried", "preempted"):
            self.lines.labels(outcome)
        for reason in (Reason.QUEUE, Reason.LATE, Reason.DEGRADED, Reason.UNHEALTHY):
            self.cuts.labels(reason.value)
        for outcome in ("taken", "retried", "given_up"):
            self.webhooks.labels(outcome)
