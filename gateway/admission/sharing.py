"""Divide the slots of a pool between gateways that know each other's load only from the replicas' metrics.

Every gateway scrapes the replicas' metrics and knows its own requests there; the rest is the load of others.
A gateway without others may send a quarter more requests than the replicas can run, so that a slot that becomes free
is used at once. While there are others its part is ``WEIGHT * (slots - others)``. N busy gateways then get equal parts,
``WEIGHT * slots / (1 + WEIGHT * (N - 1))`` each: together 0.89 of the slots with two, 0.92 with three. With WEIGHT = 1
any division would be stable, and the first gateway would keep all slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

AHEAD = 1.25  # times the slots, while there are no others
WEIGHT = 0.8
UNKNOWN_CAPACITY = 256  # slots of a pool whose replicas do not report them
# Weight of a new measurement, at least and at most; the rest is the mean of those before. Gateways that all react to
# the same free slots overshoot together if they react at full strength, and the more so the more they are. How many
# they are shows in the part of the requests that is this gateway's own.
SMOOTHING = 0.2, 0.4
# A mean below this is a probe or a request that has just ended, not another gateway.
ALONE = 0.5
# Scrapes after which others that cannot be told from own requests any more are taken to be gone.
PRESENT = 20


@dataclass(frozen=True)
class Capacity:
    """What one gateway may send to a pool.

    slots: requests that it can count on being run. limit: that it may have sent. others: of other gateways there.
    pool_slots: requests that the pool can run for all gateways; only set while there are others.
    hold_s: how long a request waits while the pool has no replica; 0: it has one, or requests do not wait.
    kv_usage: mean fraction of the replicas' KV blocks in use; 0 if unknown.
    """

    slots: int
    limit: int
    others: float = 0.0
    pool_slots: int = 0
    hold_s: float = 0.0
    kv_usage: float = 0.0


UNKNOWN = Capacity(UNKNOWN_CAPACITY, UNKNOWN_CAPACITY)


def capacity(slots: int, others: float, kv_usage: float = 0.0) -> Capacity:
    """Return what this gateway may send to ``slots`` slots while ``others`` requests of others are there."""
    if others < ALONE:
        return Capacity(slots, math.ceil(slots * AHEAD), kv_usage=kv_usage)
    rounded = round(part(slots, others))
    return Capacity(rounded, rounded, others, slots, kv_usage=kv_usage)


def part(slots: float, others: float) -> float:
    """Return this gateway's part of ``slots`` slots, at least 1, while there are others."""
    return max(1.0, WEIGHT * (slots - others))


@dataclass(eq=False)
class OthersLoad:
    """Estimate the requests of others at one replica: the moving average of what its metrics report beyond this
    gateway's own requests.

    A reported request may have ended meanwhile, and a sent one may not be reported yet: the average is over signed
    differences. That there are others at all is taken only from two scrapes in a row with more requests than
    this gateway had at any moment since the scrape before: a gateway without others never sees its own as theirs.
    """

    requests: float = 0.0
    _mean: float = 0.0
    _before: int = 0  # requests that cannot have been this gateway's, at the latest scrape
    _absent: int = PRESENT  # scrapes since others were seen for certain

    def observe(self, reported: int, own: float, most_own: int) -> None:
        """Take in one scrape. reported: requests running and waiting at the replica. own, most_own: of this gateway, at
        that moment and at most since the scrape before."""
        certain = max(0, reported - most_own)
        present, self._before = min(certain, self._before) > 0, certain
        if self._absent >= PRESENT:
            self._mean = reported - own
        else:
            least, most = SMOOTHING
            weight = min(most, max(least, 2 * most * own / max(1, reported)))
            self._mean += (reported - own - self._mean) * weight
        self._absent = 0 if present else min(PRESENT, self._absent + 1)
        self.requests = max(0.0, self._mean) if self._absent < PRESENT else 0.0

    def forget(self) -> None:
        """Forget the others: the replica does not report its load any more."""
        self.requests, self._mean, self._before, self._absent = 0.0, 0.0, 0, PRESENT
