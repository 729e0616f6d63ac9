"""Releases in the configuration file: a candidate pool beside a stable one, and when it is rolled back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Set
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from contract import gate_result
from contract.errors import InvalidArgument
from gateway.config.rules import PoolName, PositiveFraction, Rules

Kind = Literal["canary", "blue_green", "shadow"]
MAX_REASON = 500  # characters
UNGATED_SHARE = 0.05  # what a release with a gate may serve before the gate has passed


class RollbackRules(Rules):
    """When a candidate is rolled back, as each gateway measures by itself (docs/releases.md).

    burn_rate: how many times faster than allowed a budget must burn, over both windows. errors, refusals, slow: the
        budgets, shares of the requests beyond the stable pool's own.
    first_token, token: a request is slow above so many times the stable pool's 95th percentile; 0 leaves that out.
    """

    automatic: bool = True
    burn_rate: Annotated[float, Field(gt=0, le=1000)] = 2.0
    errors: PositiveFraction = 0.01
    refusals: PositiveFraction = 0.05
    slow: PositiveFraction = 0.05
    first_token: Annotated[float, Field(ge=0, le=1000)] = 2.0
    token: Annotated[float, Field(ge=0, le=1000)] = 1.5
    min_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 20
    short_s: Annotated[float, Field(ge=1, le=3600)] = 60.0
    long_s: Annotated[float, Field(ge=1, le=3600)] = 300.0

    @model_validator(mode="after")
    def _rising(self) -> RollbackRules:
        if self.short_s > self.long_s:
            raise ValueError(f"short_s must be at most long_s, got {self.short_s:g} and {self.long_s:g}")
        return self


class ReleaseRules(Rules):
    """One release. Requests to ``stable``, whatever sends them there, go to ``candidate`` by the weight, in percent.

    kind: canary, any weight; blue_green, all requests or none; shadow, copies only, whose responses no caller sees.
    gate: a file beside the configuration file or absolute, which must say pass for more than UNGATED_SHARE.
    rolled_back: why; then the candidate has no traffic at any weight. started: a newer one lifts that.
    """

    kind: Kind = "canary"
    stable: PoolName
    candidate: PoolName
    weight: Annotated[float, Field(ge=0, le=100)] = 0.0
    gate: Annotated[str, Field(max_length=1000)] = ""
    candidate_sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    started: datetime | None = None
    rolled_back: Annotated[str, Field(max_length=MAX_REASON)] = ""
    rollback: RollbackRules = RollbackRules()

    @model_validator(mode="after")
    def _consistent(self) -> ReleaseRules:
        if self.stable == self.candidate:
            raise ValueError(f"candidate must be another pool than stable, got {self.candidate!r} twice")
        if self.kind == "blue_green" and self.weight not in (0, 100):
            raise ValueError(f"weight must be 0 or 100 for blue_green, got {self.weight:g}")
        if self.candidate_sha256 and not self.gate:
            raise ValueError("candidate_sha256 must stand beside gate, got no gate")
        return self

    @property
    def share(self) -> float:
        """The share of the stable pool's requests that the candidate gets, or gets copies of, 0 to 1."""
        return 0.0 if self.rolled_back else self.weight / 100

    @property
    def served_share(self) -> float:
        """The share of the requests whose callers get the candidate's answers."""
        return 0.0 if self.kind == "shadow" else self.share


def takes(name: str, session: str, share: float, drawn: float) -> bool:
    """Return whether the candidate gets a request.

    A session's place is a hash of its id, so that it stays at the candidate while the share grows.
    drawn: 0 to 1, by chance, for a request without a session.
    """
    if session:
        drawn = int.from_bytes(hashlib.sha256(f"{name}\n{session}".encode()).digest()[:8], "big") / 2**64
    return drawn < share


def check(path: str, releases: Mapping[str, ReleaseRules], weights: Mapping[str, float], encoders: Set[str]) -> None:
    """Raises InvalidArgument for pools that releases cannot use.

    weights: of the pools that the file or the environment sets. encoders: pools that generate nothing.
    """
    used: dict[str, str] = {}
    for name, rules in releases.items():
        for field, pool in (("stable", rules.stable), ("candidate", rules.candidate)):
            where = f"{path}: releases.{name}.{field}"
            if pool in encoders:
                raise InvalidArgument(where, f"must be a pool of a generating model, got {pool!r}")
            if pool in used:
                raise InvalidArgument(where, f"must be a pool of one release, got {pool!r}, which {used[pool]} has too")
            used[pool] = name
        if weights.get(rules.candidate, 0.0) > 0:
            problem = f"must have no weight of its own beside the release's, got {weights[rules.candidate]:g}"
            raise InvalidArgument(f"{path}: pools.{rules.candidate}", problem)


def check_gates(path: str, releases: Mapping[str, ReleaseRules]) -> None:
    """Raises InvalidArgument for a candidate that serves more than UNGATED_SHARE before its release's gate passed."""
    for name, rules in releases.items():
        if not rules.gate or rules.served_share <= UNGATED_SHARE:
            continue
        where = f"{path}: releases.{name}.gate"
        must = f"must be of a gate that passed before the candidate gets more than {UNGATED_SHARE:.0%}, not"
        try:
            found = gate_result.read(Path(path).parent / rules.gate)
        except InvalidArgument as exc:
            raise InvalidArgument(where, f"{must} {rules.weight:g}%: {exc}") from exc
        if found["verdict"] != gate_result.PASS:
            problem = f"{must} {rules.weight:g}%; {rules.gate} says {found['verdict']}: {'; '.join(found['reasons'])}"
            raise InvalidArgument(where, problem[:1000])
        if rules.candidate_sha256 not in ("", measured := found["candidate"]["manifest_sha256"]):
            problem = f"must be of the engine {rules.candidate_sha256[:12]}…, got {measured[:12] or 'none'}…"
            raise InvalidArgument(where, f"{problem} in {rules.gate}")
