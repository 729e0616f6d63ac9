"""How many requests may be under way: one hard cap, caps by class, caps of every level.

A request over a cap is refused at once. A part of the hard cap is kept for every pool, so that one does not block the
others; caps of classes apply to each pool.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from contract.errors import InvalidArgument, Overloaded
from gateway.config.tenant import Levels


@dataclass(eq=False)
class Slot:
    """A place under the caps. ``release`` gives it back; further calls do nothing."""

    give_back: Callable[[], None]
    taken: bool = True

    def release(self) -> None:
        if self.taken:
            self.taken = False
            self.give_back()


class Caps(Protocol):
    """Caps as admission needs them; see Concurrency."""

    @property
    def in_flight(self) -> int: ...  # requests of this process that count under them

    def change(self, class_limits: Mapping[int, int], pools: Collection[str]) -> None: ...
    def fullness(self, pool: str) -> float: ...
    async def acquire(self, levels: Levels, priority: int, requests: int = 1, pool: str = "") -> Slot: ...


@dataclass(eq=False)
class Concurrency:
    """The caps of one gateway.

    limit: all requests, waiting ones included. class_limits: of a priority class at each pool.
    pools: all pools; with several, each has a guaranteed part of the limit.
    """

    limit: int
    class_limits: Mapping[int, int] = field(default_factory=dict)
    pools: Collection[str] = ()

    def __post_init__(self) -> None:
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._of_pool: defaultdict[str, int] = defaultdict(int)
        self.in_flight = 0

    def change(self, class_limits: Mapping[int, int], pools: Collection[str]) -> None:
        self.class_limits, self.pools = class_limits, pools

    def fullness(self, pool: str) -> float:
        """Return the part that is taken of what the pool may have now: 0 is empty, 1 is full."""
        return self._of_pool.get(pool, 0) / max(1, self._most(pool))

    async def acquire(self, levels: Levels, priority: int, requests: int = 1, pool: str = "") -> Slot:
        return self.try_acquire(levels, priority, requests, pool)

    def try_acquire(self, levels: Levels, priority: int, requests: int = 1, pool: str = "") -> Slot:
        """Count ``requests`` under every cap or under none. Raises: Overloaded that names the cap; InvalidArgument if
        the cap is smaller than ``requests``."""
        if self._of_pool.get(pool, 0) + requests > self._most(pool):
            kept = self._kept * sum(other != pool for other in self.pools)
            _check_possible("the gateway", self.limit - kept, requests)
            raise Overloaded(f"{self.in_flight} requests are in flight, the most allowed")
        found = caps(levels, priority, pool, self.class_limits)
        for name, limit in found.items():
            if limit is not None and self._counts.get(name, 0) + requests > limit:
                _check_possible(holder(name), limit, requests)
                raise Overloaded(f"{holder(name)} has {self._counts[name]} requests under way and may have {limit}")
        self._add(found, pool, requests)
        return Slot(partial(self._add, found, pool, -requests))

    @property
    def _kept(self) -> int:
        """What is kept for each pool: a tenth, less with more than five pools, so that half of the limit is shared."""
        return self.limit // max(10, 2 * len(self.pools)) if len(self.pools) > 1 else 0

    def _most(self, pool: str) -> int:
        """Return how many requests the pool may have with those that the other pools have now."""
        left = self.limit - self.in_flight + self._of_pool.get(pool, 0)
        kept = self._kept
        return left - sum(max(0, kept - self._of_pool.get(other, 0)) for other in self.pools if other != pool)

    def _add(self, names: Collection[str], pool: str, requests: int) -> None:
        self.in_flight += requests
        for counts, name in ((self._of_pool, pool), *((self._counts, name) for name in names)):
            counts[name] += requests
            if not counts[name]:  # tenants come and go; their names must not stay
                del counts[name]


def caps(levels: Levels, priority: int, pool: str, of_class: Mapping[int, int]) -> dict[str, int | None]:
    """Return the caps of a request by name: of its class at the pool and of its levels; None is unlimited."""
    found = {f"class {priority}\0{pool}": of_class.get(priority)}
    return found | {f"level {level.name}": level.limits.max_in_flight for level in levels}


def holder(name: str) -> str:
    """Return what callers are told of a cap by its name."""
    return name.removeprefix("level ").partition("\0")[0]


def _check_possible(holder: str, limit: int, requests: int) -> None:
    if requests > limit:
        raise InvalidArgument(
            "n", f"must be at most {limit}, the requests that {holder} may have in flight, got {requests}"
        )
