"""The pools of a gateway with a single one."""

from __future__ import annotations

from collections.abc import Callable

from gateway.admission.sharing import UNKNOWN, Capacity


class OnePool:
    """A single pool without a name, that can run ``capacity``."""

    def __init__(self, capacity: Callable[[], Capacity] = lambda: UNKNOWN) -> None:
        self._capacity = capacity

    def prompt_weight(self) -> float:
        return 1.0

    def draw(self, pinned: str, session: str = "", without: str | None = None) -> str:
        return pinned

    def capacity(self, pool: str) -> Capacity:
        return self._capacity()
