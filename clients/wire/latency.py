"""What a caller waits for: time to first token, time between tokens, tokens per second."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from contract.generation import TokenDelta


@dataclass
class Stopwatch:
    """Times one stream. Started when it is made; ``observe`` every delta as it arrives.

    A delta that carries several tokens (the server coalesces under load) counts its gap once, divided by its
    tokens: that is the pace the caller reads at.
    """

    clock: Callable[[], float] = time.perf_counter
    started_s: float = field(init=False)
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    gaps_s: list[tuple[float, int]] = field(default_factory=list)  # (time since the delta before, tokens it brought)

    def __post_init__(self) -> None:
        self.started_s = self.clock()

    def observe(self, delta: TokenDelta) -> None:
        count = len(delta.token_ids) or (1 if delta.text else 0)
        if not count:
            return
        now_s = self.clock()
        if self.first_s is None or self.last_s is None:
            self.first_s = now_s
        else:
            self.gaps_s.append((now_s - self.last_s, count))
        self.last_s = now_s
        self.tokens += count

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token, or None before it."""
        return None if self.first_s is None else self.first_s - self.started_s

    @property
    def total_s(self) -> float:
        """From the start to the last token, or to now before the first."""
        return (self.clock() if self.last_s is None else self.last_s) - self.started_s

    @property
    def tokens_per_s(self) -> float | None:
        """The pace after the first token; None with fewer than two deltas."""
        if self.first_s is None or self.last_s is None or self.last_s <= self.first_s:
            return None
        return sum(count for _, count in self.gaps_s) / (self.last_s - self.first_s)

    def inter_token_s(self, fraction: float) -> float | None:
        """The quantile of the time between tokens, each token counted; None with fewer than two deltas."""
        times_s = sorted(gap_s / count for gap_s, count in self.gaps_s for _ in range(count))
        return times_s[max(0, math.ceil(fraction * len(times_s)) - 1)] if times_s else None
