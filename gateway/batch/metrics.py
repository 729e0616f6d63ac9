"""What /metrics says of batch work. The tokens and durations of its requests stand among everybody's, with the
operation ``batch``."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.batch.aimd import Reason
from gateway.batch.store import UNFINISHED


class BatchMetrics:
    """stalled_s: how long no line has got its result although some are pending; asked when the page is read."""

    def __init__(self, registry: CollectorRegistry, stalled_s: Callable[[], float]) -> None:
        self.lines = Counter(
            "trident_gateway_batch_lines",
            "Lines of batches: completed and failed have their result, retried and preempted run again",
            ("outcome",),
            registry=registry,
        )
        self.cuts = Counter(
            "trident_gateway_batch_pace_cuts", "Ticks at which the pace was cut, by why", ("reason",), registry=registry
        )
        self.webhooks = Counter(
            "trident_gateway_batch_webhooks",
            "Calls of webhooks: taken, retried, given_up",
            ("outcome",),
            registry=registry,
        )
        self.allowed = Gauge("trident_gateway_batch_allowed", "Lines that may run at once now", registry=registry)
        self.running = Gauge("trident_gateway_batch_running", "Lines that run", registry=registry)
        self.pending = Gauge("trident_gateway_batch_pending_lines", "Lines without a result", registry=registry)
        unfinished = Gauge("trident_gateway_batches", "Batches that are not over", ("status",), registry=registry)
        self.unfinished = {status: unfinished.labels(status) for status in UNFINISHED}
        stalled = Gauge(
            "trident_gateway_batch_stalled_seconds",
            "Since a line got its result, while some are pending; otherwise 0",
            registry=registry,
        )
        stalled.set_function(stalled_s)
        for outcome in ("completed", "failed", "retried", "preempted"):
            self.lines.labels(outcome)
        for reason in (Reason.QUEUE, Reason.LATE, Reason.DEGRADED, Reason.UNFIT):
            self.cuts.labels(reason.value)
        for outcome in ("taken", "retried", "given_up"):
            self.webhooks.labels(outcome)
