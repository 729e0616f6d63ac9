"""How many requests may be under way: one hard cap, caps by class, caps of every level. Taken at once or refused.

Nobody waits here: a caller over a cap is told so while it is still cheap to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from contract.errors import InvalidArgument, Overloaded
from gateway.budgets import Level


@dataclass(eq=False)
class Slot:
    """Places that were taken. ``release`` gives them back; only its first call does."""

    caps: Concurrency
    counted: tuple[str, ...]
    places: int = 1
    taken: bool = True

    def release(self) -> None:
        if self.taken:
            self.taken = False
            self.caps._give_back(self.counted, self.places)


@dataclass(eq=False)
class Concurrency:
    """limit: all requests, those that wait included. class_limits: by priority; a class without one has none."""

    limit: int
    class_limits: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.limit < 1 or any(limit < 1 for limit in self.class_limits.values()):
            raise InvalidArgument("limit", f"got {self.limit} and {dict(self.class_limits)}; allowed is 1 or more")
        self._counts: Counter[str] = Counter()
        self._total = 0

    @property
    def in_flight(self) -> int:
        return self._total

    def in_flight_of(self, level: str) -> int:
        return self._counts[f"level {level}"]

    def try_acquire(self, levels: Sequence[Level], priority: int, places: int = 1) -> Slot:
        """``places`` under every cap, or none taken. Raises Overloaded that names the cap, InvalidArgument if there
        could never be so many."""
        if self._total + places > self.limit:
            _check_possible("the gateway", self.limit, places)
            raise Overloaded(f"{self._total} requests are under way and no more are taken")
        caps = {f"class {priority}": self.class_limits.get(priority)}
        caps |= {f"level {level.name}": level.limits.max_in_flight for level in levels}
        for name, limit in caps.items():
            if limit is not None and self._counts[name] + places > limit:
                who = name.removeprefix("level ")
                _check_possible(who, limit, places)
                raise Overloaded(f"{who} has {self._counts[name]} requests under way and may have {limit}")
        self._total += places
        for name in caps:
            self._counts[name] += places
        return Slot(self, tuple(caps), places)

    def _give_back(self, counted: tuple[str, ...], places: int) -> None:
        self._total -= places
        for name in counted:
            self._counts[name] -= places
            if not self._counts[name]:  # tenants come and go; their names must not stay
                del self._counts[name]


def _check_possible(who: str, limit: int, places: int) -> None:
    if places > limit:
        problem = f"{places} choices are as many requests, and {who} may have {limit} under way"
        raise InvalidArgument("n", f"{problem}; allowed are {limit} choices")
