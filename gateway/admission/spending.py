"""What the endpoints of upstreams have cost, for their bounds of a day."""

from __future__ import annotations

import math
import time


class Spending:
    """Of one endpoint, in the currency of its prices.

    total: in all. running: what the running requests may cost.
    """

    def __init__(self) -> None:
        self.total = self.running = 0.0
        self._day, self._before = -1, 0.0  # the UTC day, and what was spent before it

    def today(self) -> float:
        day = int(time.time() // 86_400)
        if day != self._day:
            self._day, self._before = day, self.total
        return self.total - self._before

    def used(self) -> float:
        """Return what of the day's bound is spent, or may be by what runs."""
        return self.today() + self.running

    def try_reserve(self, cost: float, limit: float | None) -> bool:
        """Reserve the cost of a request, unless the day would cost more than ``limit``."""
        if self.used() + cost > (math.inf if limit is None else limit):
            return False
        self.running += cost
        return True

    async def reserve(self, cost: float, limit: float | None) -> int | None:
        """Do as ``try_reserve``; return the number to settle it with, or None."""
        return 0 if self.try_reserve(cost, limit) else None

    def settle(self, number: int, cost: float, spent: float) -> None:
        """Take note of what a request with a reserved cost did cost."""
        self.running -= cost
        self.add(spent)

    def add(self, spent: float) -> None:
        self.today()  # before the first of a day
        self.total += spent
