"""How many batch lines may run at once without delaying interactive requests, by the counters behind /metrics.

Additive increase, multiplicative decrease (Chiu and Jain, 1989): one more line per tick while interactive requests meet
their objective, half as many when they do not, none while the gateway degrades or rejects requests. In between the pace
stays: above ``HEADROOM`` the rest of the replicas' capacity is kept for interactive requests to come.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from gateway.service import Service
from gateway.telemetry.metrics import ENGINE

STEP = 1.0  # lines added per tick
HEADROOM = 0.8  # fullness of the replicas above which nothing is added
LATE_SHARE = 0.05  # share of first tokens that may be late: holds a P95
OPERATION = "batch"  # label of batch requests in every metric, which keeps them out of interactive objectives
TTFT_OBJECTIVE_S = 0.5  # a bound of the histogram's buckets
WINDOW_S = 60.0
# Admission's reasons that mean a lack of capacity; a budget or a key's own limit does not.
_NO_CAPACITY = ("pressure", "queue")


@dataclass(frozen=True)
class Signals:
    """The load of interactive traffic and of the replicas."""

    waiting: int = 0  # requests in the gateway's queue or in an engine's
    first_tokens: int = 0  # of interactive requests since the pace was last cut
    late: int = 0  # those of them that came after the objective
    fullness: float = 0.0  # share of slots or of the KV cache in use, the larger of the two, over all replicas
    degraded: bool = False  # requests are shortened, sent to overflow targets or rejected for lack of capacity
    healthy: bool = True  # whether a replica can serve


class Reason(str, Enum):
    """Why the pace is what it is, as a metric label."""

    GROWS = "grows"
    FULL = "full"  # the pace stays
    QUEUE = "queue"
    LATE = "late"
    DEGRADED = "degraded"
    UNHEALTHY = "unfit"


@dataclass(frozen=True)
class Pace:
    """rate: lines that may run at once; its fraction adds up over ticks."""

    rate: float = 0.0
    reason: Reason = Reason.GROWS

    @property
    def allowed(self) -> int:
        return int(self.rate)

    @property
    def cut(self) -> bool:
        return self.reason in (Reason.QUEUE, Reason.LATE, Reason.DEGRADED, Reason.UNHEALTHY)

    def after(self, signals: Signals, max_running: int, running: int | None = None) -> Pace:
        """Return the pace one tick later. running: batch lines that run; a pace that is not used does not grow."""
        if not signals.healthy:
            return replace(self, rate=0.0, reason=Reason.UNHEALTHY)
        if signals.degraded:
            return replace(self, rate=0.0, reason=Reason.DEGRADED)
        if signals.waiting > 0:
            return replace(self, rate=self._half(), reason=Reason.QUEUE)
        if signals.late > LATE_SHARE * signals.first_tokens:
            return replace(self, rate=self._half(), reason=Reason.LATE)
        if signals.fullness >= HEADROOM:
            return replace(self, reason=Reason.FULL)
        if running is not None and running < self.allowed:
            return replace(self, reason=Reason.GROWS)
        return replace(self, rate=min(float(max_running), self.rate + STEP), reason=Reason.GROWS)

    def _half(self) -> float:
        return self.rate / 2 if self.rate >= 2 else 0.0


class InteractiveSignals:
    """Return all workers' signals of the last ``WINDOW_S``. Called once a tick; ``forget`` when the pace is cut."""

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
        """Return this worker's counts: first tokens, those after the objective, and requests degraded or rejected."""
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
