"""The signals that set the pace of batches, read from the counters behind /metrics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from gateway.batch.aimd import Signals
from gateway.service import Service
from gateway.telemetry.metrics import ENGINE

OPERATION = "batch"  # label of batch requests in every metric, which keeps them out of interactive objectives
TTFT_OBJECTIVE_S = 0.5  # a bound of the histogram's buckets
WINDOW_S = 60.0
# Admission's reasons that mean a lack of capacity; a budget or a key's own limit does not.
_NO_CAPACITY = ("pressure", "queue")


class InteractiveSignals:
    """Return the signals of the last ``WINDOW_S``. Call it once a tick; ``forget`` after the pace was cut."""

    def __init__(self, service: Service, clock: Callable[[], float] = time.monotonic) -> None:
        self._service, self._clock = service, clock
        self._history: deque[tuple[float, int, int]] = deque([(clock(), *self._first_tokens())])
        self._refused_before = self._refusals()

    def __call__(self) -> Signals:
        now_s, (total, late) = self._clock(), self._first_tokens()
        while len(self._history) > 1 and self._history[1][0] <= now_s - WINDOW_S:
            self._history.popleft()
        _, total_before, late_before = self._history[0]
        self._history.append((now_s, total, late))
        refused = self._refusals()
        degraded, self._refused_before = refused > self._refused_before, refused
        healthy = [
            replica for pool in self._service.serving_pools() for replica in self._service.replicas.ready_in(pool)
        ]
        slots = sum(replica.metrics.max_running for replica in healthy)
        running = sum(replica.metrics.running for replica in healthy)
        kv_usage = sum(replica.metrics.kv_usage for replica in healthy) / max(1, len(healthy))
        in_engines = sum(replica.metrics.waiting for replica in healthy)
        return Signals(
            waiting=in_engines + getattr(self._service.admission, "waiting", 0),
            first_tokens=total - total_before,
            late=late - late_before,
            fullness=max(running / max(1, slots), kv_usage),
            degraded=degraded,
            healthy=bool(healthy) and not self._service.draining,
        )

    def forget(self) -> None:
        """Start a new window, so that the same late tokens do not cut the pace twice."""
        self._history = deque([self._history[-1]])

    def _first_tokens(self) -> tuple[int, int]:
        """Return the number of interactive requests' first tokens so far: all, and those after the objective."""
        total = in_time = 0.0
        for family in self._service.metrics.first_token.collect():
            for sample in family.samples:
                labels = sample.labels
                if not sample.name.endswith("_bucket") or labels["source"] != ENGINE:
                    continue
                if labels["operation"] != OPERATION:
                    bound = float(sample.labels["le"])
                    total += sample.value if bound == float("inf") else 0
                    in_time += sample.value if bound == TTFT_OBJECTIVE_S else 0
        return round(total), round(total - in_time)

    def _refusals(self) -> int:
        """Return the number of requests so far that were degraded or rejected for lack of capacity."""
        admission = self._service.admission
        rejected, degraded = getattr(admission, "rejected", {}), getattr(admission, "degraded", {})
        return sum(degraded.values()) + sum(rejected.get(reason, 0) for reason in _NO_CAPACITY)
