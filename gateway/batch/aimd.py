"""How many batch lines may run at once without delaying interactive requests. Pure: signals in, a pace out.

Additive increase, multiplicative decrease (Chiu and Jain, 1989): one more line per tick while interactive requests meet
their objective, half as many when they do not, none while the gateway degrades or rejects requests. In between the pace
stays: above ``HEADROOM`` the rest of the replicas' capacity is kept for interactive requests to come.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

HEADROOM = 0.8  # fullness of the replicas above which nothing is added
LATE_SHARE = 0.05  # share of first tokens that may be late: holds a P95


@dataclass(frozen=True)
class Signals:
    """The load of interactive traffic and of the replicas.

    waiting: requests in the gateway's queue or in an engine's.
    first_tokens: of interactive requests since the pace was last cut.
    late: first tokens that came after the objective.
    fullness: share of slots or of the KV cache in use, the larger of the two, over all replicas.
    degraded: requests are shortened, sent to overflow targets or rejected for lack of capacity.
    healthy: whether a replica can serve.
    """

    waiting: int = 0
    first_tokens: int = 0
    late: int = 0
    fullness: float = 0.0
    degraded: bool = False
    healthy: bool = True


class Reason(str, Enum):
    """Why the pace is what it is, as a metric label."""

    GROWS = "grows"
    FULL = "full"  # the pace stays
    QUEUE = "queue"
    LATE = "late"
    DEGRADED = "degraded"
    UNHEALTHY = "unfit"


@dataclass(frozen=True)
class PacePolicy:
    """Bounds of the pace.

    max_running: lines at once.
    step: lines added per tick.
    """

    max_running: int = 64
    step: float = 1.0


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

    def after(self, signals: Signals, policy: PacePolicy, running: int | None = None) -> Pace:
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
        return replace(self, rate=min(float(policy.max_running), self.rate + policy.step), reason=Reason.GROWS)

    def _half(self) -> float:
        return self.rate / 2 if self.rate >= 2 else 0.0
