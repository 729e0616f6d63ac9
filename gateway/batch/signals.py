"""What the pace of batch work looks at, read from a running service: the same counters that /metrics shows."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from gateway.batch.aimd import Signals
from gateway.service import Service
from gateway.telemetry.metrics import ENGINE

OPERATION = "batch"  # the label of batch work in every metric, which keeps it out of interactive objectives
TTFT_OBJECTIVE_S = 0.5  # a bound of the histogram's buckets
WINDOW_S = 60.0
# Of admission's reasons, those that mean there is no room for anybody; a budget or a key's own cap does not.
_NO_ROOM = ("pressure", "queue")


class InteractiveSignals:
    """Call it once a tick; ``forget`` what was late before, once it has been acted on."""

    def __init__(self, service: Service, clock: Callable[[], float] = time.monotonic) -> None:
        self._service, self._clock = service, clock
        self._history: deque[tuple[float, int, int]] = deque([(clock(), *self._first_tokens())])
        self._given_up = self._refusals()

    def __call__(self) -> Signals:
        now_s, (total, late) = self._clock(), self._first_tokens()
        while len(self._history) > 1 and self._history[1][0] <= now_s - WINDOW_S:
            self._history.popleft()
        _, total_before, late_before = self._history[0]
        self._history.append((now_s, total, late))
        given_up = self._refusals()
        degraded, self._given_up = given_up > self._given_up, given_up
        fit = [one for pool in self._service.serving_pools() for one in self._service.replicas.fit_in(pool)]
        slots = sum(replica.page.max_running for replica in fit)
        running = sum(replica.page.running for replica in fit)
        kv_usage = sum(replica.page.kv_usage for replica in fit) / max(1, len(fit))
        in_engines = sum(replica.page.waiting for replica in fit)
        return Signals(
            waiting=in_engines + getattr(self._service.admission, "waiting", 0),
            first_tokens=total - total_before,
            late=late - late_before,
            fullness=max(running / max(1, slots), kv_usage),
            degraded=degraded,
            fit=bool(fit) and not self._service.draining,
        )

    def forget(self) -> None:
        self._history = deque([self._history[-1]])

    def _first_tokens(self) -> tuple[int, int]:
        """Interactive ones of engines so far: all, and those that came after the objective."""
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
        """Requests so far that were cut short, sent elsewhere or refused for lack of room."""
        admission = self._service.admission
        rejected, degraded = getattr(admission, "rejected", {}), getattr(admission, "degraded", {})
        return sum(degraded.values()) + sum(rejected.get(reason, 0) for reason in _NO_ROOM)
