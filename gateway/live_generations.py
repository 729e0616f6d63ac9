"""The generations in flight: checked by the watchdog, counted, and waited for by the drain."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Protocol

from prometheus_client import Gauge

from contract.errors import TridentError, Unavailable
from gateway.watchdog import Watchdog, Watched

STOPPING = "the gateway is stopping"


class LiveGeneration(Watched, Protocol):
    """A generation in flight, or a reader of one."""

    def cut(self, error: TridentError) -> None:
        """End it with ``error``."""


class LiveGenerations:
    """The registry of one gateway. draining: no new request is admitted. in_flight: its gauge."""

    def __init__(self, watchdog: Watchdog, in_flight: Gauge) -> None:
        self._watchdog, self._in_flight = watchdog, in_flight
        self._generations: set[LiveGeneration] = set()
        self._admitting = 0  # requests in admission
        self._ended = asyncio.Event()  # set while draining when something has ended
        self.draining = self._cut_off = False

    def __len__(self) -> int:
        return len(self._generations)

    def add(self, generation: LiveGeneration) -> None:
        self._generations.add(generation)
        self._in_flight.inc()
        self._watchdog.add(generation)

    def discard(self, generation: LiveGeneration) -> None:
        self._watchdog.discard(generation)
        self._in_flight.dec()
        self._generations.discard(generation)
        self.update()

    def update(self) -> None:
        """Let the drain look again."""
        if self.draining:
            self._ended.set()

    @contextlib.contextmanager
    def admitting(self) -> Iterator[None]:
        """Keep the drain waiting while a request is in admission. Raises Unavailable while draining."""
        self.check_open()
        self._admitting += 1
        try:
            yield
        finally:
            self._admitting -= 1
            self.update()

    def check_open(self) -> None:
        """Raises Unavailable while draining."""
        if self.draining:
            raise Unavailable(f"{STOPPING}; retry at another one", 1.0)

    def check_not_cut_off(self) -> None:
        """Raises Unavailable if the drain is over."""
        if self._cut_off:
            self.check_open()

    async def drain(self, timeout_s: float) -> int:
        """Admit nothing new, waits for what is in flight, cuts off the rest; returns the number cut off."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle(), timeout_s)
        except asyncio.TimeoutError:
            self._cut_off = True
            for generation in (remaining := tuple(self._generations)):
                generation.cut(Unavailable(STOPPING))
            return len(remaining)
        return 0

    async def _idle(self) -> None:
        while self._generations or self._admitting:
            self._ended.clear()
            await self._ended.wait()
