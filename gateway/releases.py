"""The releases as they stand in this gateway: what the file says, and what was rolled back since."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from gateway.config.release import ReleaseRules
from gateway.telemetry import burn_rate
from gateway.telemetry.burn_rate import LEAST_STABLE, Verdict
from gateway.telemetry.pool_outcomes import Outcomes, PoolOutcomes

_LOG = logging.getLogger(__name__)
PERIOD_S = 1.0
_JUDGED = ("started", "stable", "candidate")  # what changes these begins anew


@dataclass
class _Watched:
    """baseline: of the stable pool when it last had traffic. verdict: the latest one."""

    baseline: Outcomes = field(default_factory=Outcomes)
    verdict: Verdict = field(default_factory=Verdict)


class Releases:
    """Judges the candidates once a second and rolls back the bad ones.

    outcomes: of all pools. rolled_back: called with the name and the reason of a release that was rolled back here, and
        whether its figures were why.
    stopped: by release, the start that was rolled back in this gateway, and why.
    tell: publishes the outcomes to the other workers of the gateway. ready_in: returns the ready replicas of a pool.
    """

    def __init__(
        self,
        outcomes: PoolOutcomes,
        rolled_back: Callable[[str, str, bool], None],
        tell: Callable[..., None] = lambda topic, *message: None,
        ready_in: Callable[[str], Sized] = lambda pool: "some",
    ) -> None:
        self._outcomes, self._rolled_back, self._tell, self._ready_in = outcomes, rolled_back, tell, ready_in
        self._rules: Mapping[str, ReleaseRules] = {}
        self.stopped: dict[str, tuple[datetime | None, str]] = {}
        self._watched: dict[str, _Watched] = {}
        self._checked_s = 0.0

    def change(self, rules: Mapping[str, ReleaseRules]) -> None:
        """Take over the rules of the file. A release that was rolled back here stays so until it is started again."""
        for name, new in rules.items():
            known = self._rules.get(name)
            if known is None or any(getattr(known, field) != getattr(new, field) for field in _JUDGED):
                self._outcomes.forget(new.candidate)
                same = known is not None and known.stable == new.stable
                self._watched[name] = _Watched(self._watched[name].baseline) if same else _Watched()
        self._rules = rules
        self.stopped = {
            name: stop for name, stop in self.stopped.items() if name in rules and rules[name].started == stop[0]
        }

    @property
    def current(self) -> dict[str, ReleaseRules]:
        """The releases as they hold now."""
        return {
            name: rules.model_copy(update={"rolled_back": self.stopped[name][1]}) if name in self.stopped else rules
            for name, rules in self._rules.items()
        }

    def stop(self, name: str, reason: str) -> ReleaseRules | None:
        """Roll back one release in this process and return its rules; None for one that was rolled back."""
        rules = self.current.get(name)
        if rules is None or rules.rolled_back:
            return None
        self.stopped[name] = (rules.started, reason)
        return rules

    def roll_back(self, name: str, reason: str, judged: bool = False) -> None:
        """Roll back one release in this gateway, now. Nothing happens to one that was rolled back."""
        if rules := self.stop(name, reason):
            _LOG.error("release %s: rolled back from %g %% of %s: %s", name, rules.weight, rules.candidate, reason)
            self._rolled_back(name, reason, judged)

    def check(self, now_s: float) -> None:
        """Judge every running candidate, at most once in PERIOD_S."""
        if now_s - self._checked_s < PERIOD_S:
            return
        self._checked_s = now_s
        if fresh := self._outcomes.fold():
            self._tell("outcomes", fresh)
        for name, rules in self.current.items():
            watched, rollback = self._watched[name], rules.rollback
            stable = self._outcomes.window(rules.stable, rollback.long_s)
            # Without recent requests the window only shrinks: the traffic has moved.
            if stable.requests >= LEAST_STABLE and self._outcomes.window(rules.stable, rollback.short_s).requests:
                watched.baseline = stable
            if not rules.share:
                continue
            short, long = (self._outcomes.window(rules.candidate, s) for s in (rollback.short_s, rollback.long_s))
            watched.verdict = burn_rate.judge(rollback, (short, long), watched.baseline)
            # Bad answers are better than none: no request goes back to a pool that is gone.
            if watched.verdict.reason and rollback.automatic and self._ready_in(rules.stable):
                self.roll_back(name, watched.verdict.reason, judged=True)

    def judged(self) -> list[tuple[str, ReleaseRules, Verdict]]:
        """Return each release as it holds now, with the latest verdict."""
        return [(name, rules, self._watched[name].verdict) for name, rules in self.current.items()]

    def status(self) -> list[dict[str, Any]]:
        """Return every release with the figures of both pools over the long window."""
        found = []
        for name, rules, verdict in self.judged():
            pools = {
                role: {"pool": pool, **self._outcomes.window(pool, rules.rollback.long_s).summary()}
                for role, pool in (("stable", rules.stable), ("candidate", rules.candidate))
            }
            burns = {objective: burn._asdict() for objective, burn in verdict.burns.items()}
            fields = rules.model_dump(mode="json", exclude={"stable", "candidate"})
            state = "rolled back" if rules.rolled_back else "running" if rules.weight else "waiting"
            found.append({"name": name, "state": state, **fields, **pools, "burn_rates": burns})
        return found
