"""One periodic check of all live streams, in place of a timer per stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Watched(Protocol):
    """An object that the watchdog checks."""

    def check(self, now_s: float) -> None:
        """End or resumes what is due. Must not block or raise. now_s: ``time.monotonic()``."""


class Watchdog:
    """Calls ``check`` of every added object each ``period_s``. Streams arm no timers per token.

    shortest_timeout_s: the shortest timeout that the objects enforce; the period is a quarter of it, 10 ms to 1 s.
    on_lag: receives how late each round began, in seconds: the event loop's lag.
    """

    def __init__(self, shortest_timeout_s: float, on_lag: Callable[[float], object] = lambda lag_s: None) -> None:
        self.period_s = min(1.0, max(0.01, shortest_timeout_s / 4))
        self._on_lag = on_lag
        self._watched: dict[Watched, None] = {}  # in the order they were added

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, *watched: Watched) -> None:
        self._watched |= dict.fromkeys(watched)

    def discard(self, watched: Watched) -> None:
        self._watched.pop(watched, None)

    async def run(self) -> None:
        while True:
            due_s = time.monotonic() + self.period_s
            await asyncio.sleep(self.period_s)
            now_s = time.monotonic()
            self._on_lag(max(0.0, now_s - due_s))
            for watched in tuple(self._watched):
                watched.check(now_s)
