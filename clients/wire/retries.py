"""Decide when to retry. Pure: randomness and time come from the caller.

Only errors that ``contract.errors`` marks retryable are retried, only before the first token, only until
the deadline, and only while the budget lasts, so that retries never multiply an outage.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from clients.wire.failures import RetryHint
from contract.errors import InvalidArgument, TridentError

_RANDOM = random.Random()


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with full jitter: the n-th wait is uniform in [0, min(cap_s, base_s * 2**n)].

    attempts: calls in all, the first included; 1 never retries. A server's hint is the lower end of the
    wait, so that clients which get the same hint do not all return at the same instant.
    """

    attempts: int = 4
    base_s: float = 0.05
    cap_s: float = 2.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise InvalidArgument("retry.attempts", f"must be 1 (no retry) or more, got {self.attempts}")
        if not 0 <= self.base_s <= self.cap_s:
            raise InvalidArgument("retry.base_s", f"must be from 0 to cap_s, {self.cap_s}, got {self.base_s}")

    def wait_s(self, failures: int, hint: RetryHint, rng: random.Random) -> float:
        """Return how long to wait after ``failures`` (1, 2, …) failed attempts."""
        ceiling_s = min(self.cap_s, self.base_s * 2.0 ** min(failures - 1, 60))
        return (hint.after_s or 0.0) + rng.uniform(0.0, ceiling_s)


NO_RETRY = RetryPolicy(attempts=1)


@dataclass
class RetryBudget:
    """The retries that a client may still make: every request adds ``ratio``, every retry costs 1.

    It starts full at ``reserve``, so a quiet client may retry; under an outage retries settle at ``ratio`` of
    the requests. One budget may be shared by several clients.
    """

    ratio: float = 0.2
    reserve: float = 10.0
    tokens: float = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.reserve

    def earn(self) -> None:
        self.tokens = min(self.reserve, self.tokens + self.ratio)

    def spend(self) -> bool:
        """Take one retry from the budget; return False if none is left."""
        if self.tokens < 1.0:
            return False
        self.tokens -= 1.0
        return True


class RetrySchedule:
    """The retries of one request."""

    def __init__(self, policy: RetryPolicy, budget: RetryBudget | None = None, rng: random.Random = _RANDOM) -> None:
        self._policy, self._budget, self._rng = policy, budget or RetryBudget(), rng
        self.failures = 0
        self._budget.earn()

    def wait_s(
        self, error: TridentError, hint: RetryHint, remaining_s: float, alternative: bool = False
    ) -> float | None:
        """Return how long to wait before the next attempt, None for no further attempt.

        remaining_s: until the deadline.
        alternative: another replica is available, so there is no wait. An attempt at another replica because the first
        could not be reached does not count against the budget, which protects servers from load.
        """
        self.failures += 1
        if not error.retryable or (hint.never and not alternative) or self.failures >= self._policy.attempts:
            return None
        wait_s = 0.0 if alternative else self._policy.wait_s(self.failures, hint, self._rng)
        if wait_s >= remaining_s:
            return None
        free = alternative and hint.unsent
        return wait_s if free or self._budget.spend() else None
