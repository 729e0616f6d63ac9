"""The generations in flight: checked by the watchdog, counted, and waited for by the drain."""

from __future__ import annotations

import asyncio
from types import TracebackType
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
        self.admitting = Admitting(self)
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
            remaining = tuple(self._generations)
            for generation in remaining:
                generation.cut(Unavailable(STOPPING))
            return len(remaining)
        return 0

    async def _idle(self) -> None:
        while self._generations or self.admitting.count:
            self._ended.clear()
            await self._ended.wait()


class Admitting:
    """A context manager that keeps the drain waiting while a request is in admission; ``count`` of them are.

    Entering it raises Unavailable while draining.
    """

    def __init__(self, live: LiveGenerations) -> None:
        self._live, self.count = live, 0

    def __enter__(self) -> None:
        self._live.check_open()
        self.count += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.count -= 1
        self._live.update()
