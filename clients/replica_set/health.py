"""Decide whether a replica is healthy: not after three failures in a row, again after two successes.

Pure: a state and an observation give the next state.
"""

from __future__ import annotations

from dataclasses import dataclass

from contract.errors import InvalidArgument


@dataclass(frozen=True)
class HealthPolicy:
    """fail_after: consecutive failures that take a replica out; recover_after: consecutive successes that bring
    it back. Probes run every ``interval_s``, spread by up to a tenth, and fail after ``timeout_s``."""

    fail_after: int = 3
    recover_after: int = 2
    interval_s: float = 10.0
    timeout_s: float = 2.0

    def __post_init__(self) -> None:
        for name in ("fail_after", "recover_after"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"health.{name}", f"must be 1 or more, got {getattr(self, name)}")
        for name in ("interval_s", "timeout_s"):
            if not getattr(self, name) > 0:
                raise InvalidArgument(f"health.{name}", f"must be more than 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class Health:
    """healthy None: never observed. run: consecutive observations of the opposite of ``healthy``."""

    healthy: bool | None = None
    run: int = 0

    def after(self, ok: bool, policy: HealthPolicy) -> Health:
        """Return the state after one more observation. The first one decides alone."""
        if self.healthy is None:
            return Health(ok)
        if ok is self.healthy:
            return Health(self.healthy)
        needed = policy.recover_after if ok else policy.fail_after
        return Health(ok) if self.run + 1 >= needed else Health(self.healthy, self.run + 1)
