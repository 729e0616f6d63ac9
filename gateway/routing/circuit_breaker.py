"""The circuit breaker of a replica or upstream: it observes real requests and reacts at once where probes
(``replica_set.replica``) need half a minute. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from contract.errors import DeadlineExceeded, EngineFailed, TridentError, Unavailable

SILENCE_S = 5.0  # what a replica may need for a first token behind others' requests
LONGEST_OPEN = 6.0  # times the first pause: how far an open breaker's pauses grow


class BreakerState(Enum):
    """closed: all requests go through. open: none. half_open: one trial may be made, or is under way."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


@dataclass(frozen=True)
class BreakerPolicy:
    """failures: in a row, that open it. open_s: the first pause; each failed trial doubles it."""

    failures: int = 5
    open_s: float = 10.0


@dataclass(frozen=True)
class Breaker:
    """A breaker. until_s: end of the pause in which it allows no request; half open: when the trial was sent."""

    state: BreakerState = BreakerState.CLOSED
    failures: int = 0
    pause_s: float = 0.0
    until_s: float = 0.0

    def allows(self, now_s: float) -> bool:
        """Return whether a request may be sent; half-open allows none beyond its one trial."""
        return self.state is BreakerState.CLOSED or (self.state is BreakerState.OPEN and now_s >= self.until_s)

    def state_at(self, now_s: float) -> BreakerState:
        """Return the state as of ``now_s``: an open breaker whose pause is over is half open."""
        if self.state is BreakerState.OPEN and now_s >= self.until_s:
            return BreakerState.HALF_OPEN
        return self.state

    def sent(self, now_s: float) -> Breaker:
        """Return the breaker after a request was sent; after a pause that request is the trial."""
        if self.state is BreakerState.OPEN and now_s >= self.until_s:
            return Breaker(BreakerState.HALF_OPEN, self.failures, self.pause_s, now_s)
        return self

    def began(self, policy: BreakerPolicy, sent_s: float) -> Breaker:
        """Return the breaker after the first tokens of a request. Those of the trial, which may last for minutes, close
        it; the next failure opens it as that of a trial would."""
        if self.state is BreakerState.HALF_OPEN and sent_s >= self.until_s:
            return Breaker(BreakerState.CLOSED, policy.failures - 1, self.pause_s)
        return self

    def left(self, now_s: float, sent_s: float = math.inf) -> Breaker:
        """Return the breaker after an inconclusive request: another trial is allowed."""
        if self.state is BreakerState.HALF_OPEN and sent_s >= self.until_s:
            return Breaker(BreakerState.OPEN, self.failures, self.pause_s, now_s)
        return self

    def suspected(self, policy: BreakerPolicy) -> Breaker:
        """Return the breaker after another gateway's has opened: the next failure opens a closed one."""
        if self.state is not BreakerState.CLOSED:
            return self
        return Breaker(BreakerState.CLOSED, max(self.failures, policy.failures - 1))

    def over(
        self, error: TridentError | None, silent_s: float, now_s: float, policy: BreakerPolicy, sent_s: float = math.inf
    ) -> Breaker:
        """Return the breaker after a request ended; see blames_replica and ``after``."""
        bad = blames_replica(error, silent_s)
        return self.left(now_s, sent_s) if bad is None else self.after(not bad, now_s, policy, sent_s)

    def after(self, ok: bool, now_s: float, policy: BreakerPolicy, sent_s: float = math.inf) -> Breaker:
        """Return the breaker after a success or failure. sent_s: when the request was sent, a trial not before ``sent``
        was called."""
        if self.state is BreakerState.OPEN or (self.state is BreakerState.HALF_OPEN and sent_s < self.until_s):
            return self  # the request began before the breaker opened, and is no trial
        if ok:
            return Breaker()
        failures = self.failures + 1
        if self.state is BreakerState.CLOSED and failures < policy.failures:
            return Breaker(BreakerState.CLOSED, failures, self.pause_s)
        pause_s = min(self.pause_s * 2, policy.open_s * LONGEST_OPEN) or policy.open_s
        return Breaker(BreakerState.OPEN, failures, pause_s, now_s + pause_s)


def blames_replica(error: TridentError | None, silent_s: float) -> bool | None:
    """Return whether the end of a request is a failure of its replica, which a refusal is not; None if inconclusive: a
    deadline of a millisecond or a cancellation, so that one client cannot open the breaker for all.

    silent_s: seconds without a response; 0 after the first one.
    """
    if error is None:
        return False
    if isinstance(error, DeadlineExceeded) and silent_s < SILENCE_S:
        return None
    return True if isinstance(error, (Unavailable, EngineFailed, DeadlineExceeded)) else None


def token_digest(token_ids: Iterable[int]) -> str:
    """Return the SHA-256 of the ids in decimal, joined by commas."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()
