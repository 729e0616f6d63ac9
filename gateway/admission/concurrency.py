"""How many requests may be under way: one hard cap, caps by class, caps of every level. Taken at once or refused.

Nobody waits here: a caller over a cap is told so while it is still cheap to say. Of the hard cap a part is kept for
every pool, so that a flood at one of them does not shut out the callers of another; caps of classes are each pool's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from contract.errors import InvalidArgument, Overloaded
from gateway.config.tenant import Level


@dataclass(eq=False)
class Slot:
    """Places that were taken. ``release`` gives them back; only its first call does."""

    caps: Concurrency
    counted: tuple[str, ...]
    pool: str
    places: int = 1
    taken: bool = True

    def release(self) -> None:
        if self.taken:
            self.taken = False
            self.caps._give_back(self)


@dataclass(eq=False)
class Concurrency:
    """limit: all requests, those that wait included. class_limits: by priority, of each pool; a class without one has
    none. pools: those that requests are for; each is sure of a part of the limit, if there are several."""

    limit: int
    class_limits: Mapping[int, int] = field(default_factory=dict)
    pools: Collection[str] = ()

    def __post_init__(self) -> None:
        if self.limit < 1 or any(limit < 1 for limit in self.class_limits.values()):
            raise InvalidArgument("limit", f"got {self.limit} and {dict(self.class_limits)}; allowed is 1 or more")
        self._counts: Counter[str] = Counter()
        self._of_pool: Counter[str] = Counter()
        self._total = 0

    @property
    def in_flight(self) -> int:
        return self._total

    def fullness(self, pool: str) -> float:
        """The part that is taken of what the pool may have now: 0 is empty, 1 is full."""
        return self._of_pool[pool] / max(1, self._most(pool))

    def try_acquire(self, levels: Sequence[Level], priority: int, places: int = 1, pool: str = "") -> Slot:
        """``places`` under every cap, or none taken. Raises Overloaded that names the cap, InvalidArgument if there
        could never be so many."""
        if self._of_pool[pool] + places > self._most(pool):
            kept = self._kept * sum(other != pool for other in self.pools)
            _check_possible("the gateway", self.limit - kept, places)
            raise Overloaded(f"{self._total} requests are under way and no more are taken")
        caps = {f"class {priority}\0{pool}": self.class_limits.get(priority)}
        caps |= {f"level {level.name}": level.limits.max_in_flight for level in levels}
        for name, limit in caps.items():
            if limit is not None and self._counts[name] + places > limit:
                who = name.removeprefix("level ").partition("\0")[0]
                _check_possible(who, limit, places)
                raise Overloaded(f"{who} has {self._counts[name]} requests under way and may have {limit}")
        self._total += places
        self._of_pool[pool] += places
        for name in caps:
            self._counts[name] += places
        return Slot(self, tuple(caps), pool, places)

    @property
    def _kept(self) -> int:
        """What is kept for each pool: a tenth, and less if there are more than five, so that half is everybody's."""
        return self.limit // max(10, 2 * len(self.pools)) if len(self.pools) > 1 else 0

    def _most(self, pool: str) -> int:
        """What the pool may have while the others have what they have."""
        kept, of_others = self._kept, self._total - self._of_pool[pool]
        unused = sum(max(0, kept - self._of_pool[other]) for other in self.pools if other != pool) if kept else 0
        return self.limit - of_others - unused

    def _give_back(self, slot: Slot) -> None:
        self._total -= slot.places
        for counts, name in ((self._of_pool, slot.pool), *((self._counts, name) for name in slot.counted)):
            counts[name] -= slot.places
            if not counts[name]:  # tenants come and go; their names must not stay
                del counts[name]


def _check_possible(who: str, limit: int, places: int) -> None:
    if places > limit:
        problem = f"{places} choices are as many requests, and {who} may have {limit} under way"
        raise InvalidArgument("n", f"{problem}; allowed are {limit} choices")
