"""The signals that set the pace of batches, read from the counters behind /metrics."""

from __future__ import annotations

import operator
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
    """Return the signals of the last ``WINDOW_S``, of all workers of this gateway. Call it once a tick in each of them;
    ``forget`` after the pace was cut."""

    def __init__(self, service: Service, clock: Callable[[], float] = time.monotonic) -> None:
        self._service, self._clock = service, clock
        self._told = total, late, self._refused_before = self._own()
        self._elsewhere = [0, 0, 0]  # counted by other workers
        self._history: deque[tuple[float, int, int]] = deque([(clock(), total, late)])
        if service.link is not None:
            service.link.topics["interactive"] = self._heard

    def __call__(self) -> Signals:
        now_s, (total, late, refused) = self._clock(), self._counts()
        while len(self._history) > 1 and self._history[1][0] <= now_s - WINDOW_S:
            self._history.popleft()
        _, total_before, late_before = self._history[0]
        self._history.append((now_s, total, late))
        degraded, self._refused_before = refused > self._refused_before, refused
        healthy = [
            replica for pool in self._service.serving_pools() for replica in self._service.replicas.ready_in(pool)
        ]
        slots = sum(replica.metrics.max_running for replica in healthy)
        running = sum(replica.metrics.running for replica in healthy)
        kv_usage = sum(replica.metrics.kv_usage for replica in healthy) / max(1, len(healthy))
        in_engines = sum(replica.metrics.waiting for replica in healthy)
        return Signals(
            waiting=in_engines + self._service.admission.waiting,
            first_tokens=total - total_before,
            late=late - late_before,
            fullness=max(running / max(1, slots), kv_usage),
            degraded=degraded,
            healthy=bool(healthy) and not self._service.draining,
        )

    def forget(self) -> None:
        """Start a new window, so that the same late tokens do not cut the pace twice."""
        self._history = deque([self._history[-1]])

    def _counts(self) -> list[int]:
        """Return the counts of all workers, and tell the others what came here since the last call."""
        own = self._own()
        self._service.tell_workers("interactive", *map(operator.sub, own, self._told))
        self._told = own
        return list(map(operator.add, own, self._elsewhere))

    def _heard(self, *counts: int) -> None:
        self._elsewhere = list(map(operator.add, self._elsewhere, counts))

    def _own(self) -> tuple[int, int, int]:
        """Return the counts of this worker so far: first tokens of interactive requests, those after the objective, and
        requests that were degraded or rejected for lack of capacity."""
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
        admission = self._service.admission
        refused = sum(admission.degraded.values()) + sum(admission.rejected[reason] for reason in _NO_CAPACITY)
        return round(total), round(total - in_time), refused
