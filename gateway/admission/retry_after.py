"""When to send a refused request again: the waiting tokens divided by the rate at which they are processed. Pure."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

UNKNOWN_S, LEAST_S, JITTER = 1.0, 0.1, 0.25


@dataclass(eq=False)
class DrainRate:
    """The pace of the last ``memory_s`` seconds or so, in tokens settled per second (an exponential average,
    corrected for the short time at the start)."""

    memory_s: float = 10.0
    _sum: float = 0.0
    _began_s: float | None = None
    _at_s: float = 0.0

    def observe(self, tokens: float, now_s: float) -> None:
        """Count ``tokens`` as processed at ``now_s``."""
        if self._began_s is None:
            self._began_s = self._at_s = now_s
        self._decay(now_s)
        self._sum += tokens

    def tokens_per_s(self, now_s: float) -> float:
        """Return the rate; 0 if nothing was observed yet."""
        if self._began_s is None:
            return 0.0
        self._decay(now_s)
        watched = 1.0 - math.exp(-max(now_s - self._began_s, 1.0) / self.memory_s)
        return self._sum / (self.memory_s * watched)

    def _decay(self, now_s: float) -> None:
        if now_s > self._at_s:
            self._sum *= math.exp((self._at_s - now_s) / self.memory_s)
            self._at_s = now_s


def retry_after_s(backlog_tokens: float, tokens_per_s: float, rng: random.Random, most_s: float = 60.0) -> float:
    """Return the seconds until the backlog is processed, from LEAST_S to ``most_s``, and up to JITTER of it more, so
    that callers that were refused together do not retry together. UNKNOWN_S while nothing was measured."""
    wait_s = backlog_tokens / tokens_per_s if tokens_per_s > 0 else UNKNOWN_S
    return min(max(wait_s, LEAST_S), most_s) * (1.0 + JITTER * rng.random())


def headers(wait_s: float) -> dict[str, str]:
    """Return ``retry-after`` in whole seconds, at least 1 and rounded up, and ``retry-after-ms``."""
    return {"retry-after": str(max(1, math.ceil(wait_s))), "retry-after-ms": str(max(1, math.ceil(wait_s * 1000)))}
