"""What requests met at each pool during the last minutes, kept in this process for decisions and for operators."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

SLICE_S = 5.0
LONGEST_S = 3600.0
_COUNTS = ("requests", "errors", "refusals", "input_tokens", "output_tokens")
_GROWTH = math.log(1.1)  # of the bounds of a distribution: percentiles are at most 10 % too high


class Distribution(Counter[int]):
    """Durations in seconds, counted by logarithmic buckets."""

    def add(self, seconds: float) -> None:
        self[math.ceil(math.log(max(seconds, 1e-6)) / _GROWTH)] += 1

    def percentile(self, fraction: float) -> float:
        """Return the upper bound of the bucket with that quantile, in seconds; 0 without durations."""
        left = fraction * self.total()
        for bucket in sorted(self):
            left -= self[bucket]
            if left <= 1e-9:
                return math.exp(bucket * _GROWTH)
        return 0.0

    def above(self, seconds: float) -> int:
        """Return how many durations are in buckets wholly above ``seconds``."""
        return sum(count for bucket, count in self.items() if (bucket - 1) * _GROWTH >= math.log(seconds))


@dataclass
class Outcomes:
    """Sums over a window.

    requests: calls to replicas that ended well or failed. errors: those that failed, also where the request then went
        on elsewhere. refusals: by a replica, or by the gateway for lack of room.
    first: time to the first token, with queueing. token: mean time between tokens. copies: shadow copies, by result.
    """

    requests: int = 0
    errors: int = 0
    refusals: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    first: Distribution = field(default_factory=Distribution)
    token: Distribution = field(default_factory=Distribution)
    copies: Counter[str] = field(default_factory=Counter)

    def add(self, other: Outcomes) -> None:
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first.update(other.first)
        self.token.update(other.token)
        self.copies.update(other.copies)

    def summary(self) -> dict[str, Any]:
        """Return the figures that operators see; times in seconds, 0 where there are none."""
        return {
            **{name: getattr(self, name) for name in _COUNTS},
            "copies": dict(self.copies),
            "ttft_p50_s": round(self.first.percentile(0.5), 6),
            "ttft_p95_s": round(self.first.percentile(0.95), 6),
            "itl_p50_s": round(self.token.percentile(0.5), 6),
            "itl_p95_s": round(self.token.percentile(0.95), 6),
        }


class PoolOutcomes:
    """The outcomes of every pool, in slices of SLICE_S, for LONGEST_S. ``fold`` them once a second."""

    # The clock is looked up at every call: simulator/virtual_time.py replaces it.
    def __init__(self, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        self._clock = clock
        self._fresh: defaultdict[str, Outcomes] = defaultdict(Outcomes)
        self._slices: defaultdict[str, deque[tuple[int, Outcomes]]] = defaultdict(
            lambda: deque(maxlen=int(LONGEST_S / SLICE_S) + 1)
        )

    def now(self, pool: str) -> Outcomes:
        """Return what to count in."""
        return self._fresh[pool]

    def fold(self) -> dict[str, Outcomes]:
        """Close what was counted since the last call, and return it."""
        fresh, self._fresh = dict(self._fresh), defaultdict(Outcomes)
        self.add(fresh)
        return fresh

    def add(self, counted: Mapping[str, Outcomes]) -> None:
        """Add what was counted just now, here or by another worker."""
        number = int(self._clock() / SLICE_S)
        for pool, outcomes in counted.items():
            slices = self._slices[pool]
            if not slices or slices[-1][0] != number:
                slices.append((number, Outcomes()))
            slices[-1][1].add(outcomes)

    def forget(self, pool: str) -> None:
        self._slices.pop(pool, None)
        self._fresh.pop(pool, None)

    def window(self, pool: str, seconds: float) -> Outcomes:
        """Return the sums over the last ``seconds``, up to a slice more."""
        first, total = int((self._clock() - seconds) / SLICE_S), Outcomes()
        for number, slice_ in reversed(self._slices.get(pool, ())):
            if number < first:
                break
            total.add(slice_)
        if pool in self._fresh:
            total.add(self._fresh[pool])
        return total
