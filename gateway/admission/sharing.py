"""How many requests one gateway may have at the replicas of a pool, of which other gateways may use a part.

Pure. Every gateway reads the replicas' metrics and knows its own requests there; what is reported beyond them is the
load of others. A gateway that is alone may send a quarter more than the replicas can run, so that a slot that becomes
free is used at once. While there are others, its limit is ``slots - others / 1.25``. Of N gateways with enough
requests each then gets ``slots / (1 + 0.8 * (N - 1))``: equal parts, which add up to at least the slots and to less
than a quarter more. What one does not use is free for the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

AHEAD = 1.25  # times what the replicas can run
UNKNOWN_CAPACITY = 256  # slots of a pool whose replicas do not report them
# Of a new measurement; the rest is the mean of those before. Many gateways that all react to the same free slots must
# not react at full strength, or they overshoot together.
SMOOTHING = 0.2
# A mean below this is a probe or a request that just ended, not another gateway.
ALONE = 0.5


@dataclass(frozen=True)
class Capacity:
    """slots: requests that this gateway can count on being run. limit: requests that it may have sent."""

    slots: int
    limit: int


UNKNOWN = Capacity(UNKNOWN_CAPACITY, UNKNOWN_CAPACITY)


def capacity(slots: int, others: float, dither: float = 0.0) -> Capacity:
    """The part of ``slots`` that is this gateway's while ``others`` requests of others are under way; one at least.

    dither: at random in [0, 1), drawn anew with every measurement. Always rounded down, few slots would stay divided
    as they happened to be at first; rounded by chance, the parts are equal on average.
    """
    if others < ALONE:
        return Capacity(slots, math.ceil(slots * AHEAD))
    part = max(1, math.floor(slots - others / AHEAD + dither))
    return Capacity(part, part)


@dataclass(eq=False)
class OthersLoad:
    """Requests that others have at one replica: a moving average over the metrics that were read.

    Of two readings in a row the lower one counts: while a request ends and another begins in its place, both may be
    reported for a moment.
    """

    requests: float = 0.0
    _before: int = 0
    _known: bool = False

    def observe(self, reported: int, own: int) -> None:
        """reported: requests running and waiting there. own: of which so many can be this gateway's."""
        seen = max(0, reported - own)
        now, self._before = min(seen, self._before), seen
        self.requests += (now - self.requests) * (SMOOTHING if self._known else 1.0)
        self._known = now > 0 or self._known and self.requests > 0
        if not now and self.requests < ALONE / 10:
            self.requests = 0.0

    def forget(self) -> None:
        """The replica does not report its load any more."""
        self.requests, self._before, self._known = 0.0, 0, False
