"""How fast a candidate burns its budgets of errors and slow requests, compared with the stable pool. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.config.release import RollbackRules
from gateway.telemetry.pool_outcomes import Distribution, Outcomes

_Z = 1.645  # of one-sided 95 % bounds
# Fewer stable requests say nothing of its errors now; then those before the traffic moved count.
LEAST_STABLE = 5


class Share(NamedTuple):
    """bad: of so many requests."""

    bad: int
    requests: int

    @property
    def value(self) -> float:
        return self.bad / self.requests if self.requests else 0.0

    def bounds(self) -> tuple[float, float]:
        """Return Wilson's bounds of the true share."""
        if not self.requests:
            return 0.0, 0.0
        z2 = _Z * _Z / self.requests
        centre = self.value + z2 / 2
        margin = _Z * math.sqrt(self.value * (1 - self.value) / self.requests + z2 / self.requests / 4)
        return max(0.0, (centre - margin) / (1 + z2)), min(1.0, (centre + margin) / (1 + z2))


def surely_more(candidate: Share, stable: Share) -> float:
    """Return by how much the candidate's share is above the stable pool's at least, at 95 % (Newcombe); 0 if unsure."""
    below, above = candidate.value - candidate.bounds()[0], stable.bounds()[1] - stable.value
    return max(0.0, candidate.value - stable.value - math.hypot(below, above))


class Burn(NamedTuple):
    """Multiples of the budget. short: as measured. long: surely, so that few requests decide nothing."""

    short: float
    long: float


@dataclass(frozen=True)
class Verdict:
    """burns: by objective: errors, refusals, first_token, token. reason: why to roll back; "" for no reason."""

    burns: dict[str, Burn] = field(default_factory=dict)
    reason: str = ""


def judge(rules: RollbackRules, candidate: tuple[Outcomes, Outcomes], stable: Outcomes) -> Verdict:
    """Return how fast each budget burns, and whether that is too fast in both windows.

    candidate: its short and its long window. stable: the long one, or an earlier one where it has no traffic now.
    """
    seen = (*candidate, stable)
    shares = {
        "errors": (rules.errors, [Share(window.errors, window.requests) for window in seen]),
        "refusals": (rules.refusals, [Share(window.refusals, window.requests + window.refusals) for window in seen]),
        "first_token": (rules.slow, _slow(rules.first_token, [window.first for window in seen])),
        "token": (rules.slow, _slow(rules.token, [window.token for window in seen])),
    }
    burns, reason = {}, ""
    for name, (budget, found) in shares.items():
        if not found:
            continue
        short, long, base = found
        burns[name] = Burn(max(0.0, short.value - base.value) / budget, surely_more(long, base) / budget)
        if not reason and long.requests >= rules.min_requests and min(burns[name]) >= rules.burn_rate:
            reason = (
                f"{name}: {long.bad} of {long.requests} requests in {rules.long_s:g} s, the stable pool "
                f"{base.bad} of {base.requests}; the budget burns {burns[name].long:.1f} times too fast"
            )
    return Verdict(burns, reason)


def _slow(ratio: float, windows: list[Distribution]) -> list[Share]:
    """Return the shares that are slower than ``ratio`` times the last window's 95th percentile; none if unknown."""
    if not ratio or windows[-1].total() < LEAST_STABLE:
        return []
    limit_s = ratio * windows[-1].percentile(0.95)
    return [Share(times.above(limit_s), times.total()) for times in windows]
