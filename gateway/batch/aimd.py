"""How much batch work may run at once, so that interactive callers never notice. Pure: signals in, a pace out.

Additive increase, multiplicative decrease (Chiu and Jain, 1989): one more line at a time while everybody is served
in time, half as many at once when somebody is not, nothing at all while the gateway gives up quality or refuses.
Between the two lies a band where nothing changes: replicas this full have no room for more batch work, because the
rest is for interactive requests that have not come yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from contract.errors import InvalidArgument


@dataclass(frozen=True)
class Signals:
    """What is seen of interactive traffic and of the replicas.

    waiting: requests in the gateway's queue or in an engine's. first_tokens, late: of interactive requests since the
    pace was last cut, and how many of them came after the objective. fullness: the share of slots or of the KV cache
    in use, the fuller of the two, on the replicas together. degraded: requests are cut short, sent elsewhere or
    refused for lack of room. fit: a replica can serve.
    """

    waiting: int = 0
    first_tokens: int = 0
    late: int = 0
    fullness: float = 0.0
    degraded: bool = False
    fit: bool = True


class Reason(str, Enum):
    """Why the pace is what it is."""

    GROWS = "grows"
    FULL = "full"  # nothing changes
    QUEUE = "queue"
    LATE = "late"
    DEGRADED = "degraded"
    UNFIT = "unfit"


@dataclass(frozen=True)
class PacePolicy:
    """most: lines at once, at best. step: what a tick adds. headroom: how full replicas may get by batch work.
    late_share: first tokens that may be late; 0.05 holds a P95."""

    most: int = 64
    step: float = 1.0
    headroom: float = 0.8
    late_share: float = 0.05

    def __post_init__(self) -> None:
        if self.most < 1 or not 0 < self.step <= self.most:
            raise InvalidArgument("step", f"got {self.step} of {self.most}; allowed is more than 0, at most `most`")
        if not 0 < self.headroom <= 1 or not 0 <= self.late_share < 1:
            shares = f"{self.headroom} and {self.late_share}"
            raise InvalidArgument("headroom", f"got {shares}; allowed are shares between 0 and 1")


@dataclass(frozen=True)
class Pace:
    """rate: lines that may run at once, of which a fraction waits for its tick."""

    rate: float = 0.0
    reason: Reason = Reason.GROWS

    @property
    def allowed(self) -> int:
        return int(self.rate)

    @property
    def cut(self) -> bool:
        return self.reason in (Reason.QUEUE, Reason.LATE, Reason.DEGRADED, Reason.UNFIT)

    def after(self, seen: Signals, policy: PacePolicy, running: int | None = None) -> Pace:
        """The pace one tick later. running: batch lines under way; a pace that is not used does not grow."""
        if not seen.fit:
            return replace(self, rate=0.0, reason=Reason.UNFIT)
        if seen.degraded:
            return replace(self, rate=0.0, reason=Reason.DEGRADED)
        if seen.waiting > 0:
            return replace(self, rate=self._half(), reason=Reason.QUEUE)
        if seen.late > policy.late_share * seen.first_tokens:
            return replace(self, rate=self._half(), reason=Reason.LATE)
        if seen.fullness >= policy.headroom:
            return replace(self, reason=Reason.FULL)
        if running is not None and running < self.allowed:
            return replace(self, reason=Reason.GROWS)
        return replace(self, rate=min(float(policy.most), self.rate + policy.step), reason=Reason.GROWS)

    def _half(self) -> float:
        return self.rate / 2 if self.rate >= 2 else 0.0
