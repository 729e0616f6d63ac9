"""Metrics of batches. Tokens and durations of their requests are in the gateway's metrics, with the operation
``batch``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.batch.aimd import Reason
from gateway.batch.store import UNFINISHED


class BatchMetrics:
    """stalled_s: returns for how long pending lines have made no progress, in seconds; called at every scrape."""

    def __init__(self, registry: CollectorRegistry, stalled_s: Callable[[], float]) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        text = "Batch lines by outcome: completed and failed have a result, retried and preempted run again"
        self.lines = counter("trident_gateway_batch_lines", text, ("outcome",))
        self.cuts = counter(
            "trident_gateway_batch_pace_cuts", "Ticks at which the pace was cut, by reason", ("reason",)
        )
        text = "Webhook calls by outcome: taken, retried, given_up"
        self.webhooks = counter("trident_gateway_batch_webhooks", text, ("outcome",))
        self.allowed = gauge("trident_gateway_batch_allowed", "Batch lines that may run at once")
        self.running = gauge("trident_gateway_batch_running", "Batch lines running")
        self.pending = gauge("trident_gateway_batch_pending_lines", "Batch lines without a result")
        unfinished = gauge("trident_gateway_batches", "Unfinished batches by status", ("status",))
        self.unfinished = {status: unfinished.labels(status) for status in UNFINISHED}
        stalled = gauge(
            "trident_gateway_batch_stalled_seconds",
            "Seconds since a line got its result while lines are pending; else 0",
        )
        stalled.set_function(stalled_s)
        for outcome in ("completed", "failed", "retried", "preempted"):
            self.lines.labels(outcome)
        for reason in (Reason.QUEUE, Reason.LATE, Reason.DEGRADED, Reason.UNHEALTHY):
            self.cuts.labels(reason.value)
        for outcome in ("taken", "retried", "given_up"):
            self.webhooks.labels(outcome)
