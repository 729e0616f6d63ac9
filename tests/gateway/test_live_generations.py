"""The registry of generations in flight and the drain."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import Gauge

from contract.errors import TridentError, Unavailable
from gateway.live_generations import LiveGenerations
from gateway.watchdog import Watchdog


class Generation:
    def __init__(self, live: LiveGenerations) -> None:
        self.live, self.error = live, None
        live.add(self)

    def check(self, now_s: float) -> None:
        pass

    def cut(self, error: TridentError) -> None:
        self.error = error
        self.live.discard(self)


def registry() -> tuple[LiveGenerations, Watchdog, Gauge]:
    watchdog, gauge = Watchdog(1.0), Gauge("in_flight", "test", registry=None)
    return LiveGenerations(watchdog, gauge), watchdog, gauge


async def test_generations_are_counted_and_watched_while_they_are_live():
    live, watchdog, gauge = registry()
    generation = Generation(live)
    assert len(live) == len(watchdog) == gauge._value.get() == 1
    live.discard(generation)
    assert len(live) == len(watchdog) == gauge._value.get() == 0


async def test_a_drain_waits_for_admission_and_generations():
    live, _, _ = registry()
    with live.admitting():
        draining = asyncio.create_task(live.drain(60.0))
        await asyncio.sleep(0)
        generation = Generation(live)
    await asyncio.sleep(0)
    assert not draining.done()
    with pytest.raises(Unavailable, match="stopping"), live.admitting():
        pass
    live.check_not_cut_off()
    live.discard(generation)
    assert await draining == 0


async def test_a_drain_cuts_off_what_is_left():
    live, _, _ = registry()
    generation = Generation(live)
    assert await live.drain(0.0) == 1
    assert isinstance(generation.error, Unavailable) and len(live) == 0
    with pytest.raises(Unavailable):
        live.check_not_cut_off()


async def test_an_idle_drain_ends_at_once():
    live, _, _ = registry()
    assert await live.drain(60.0) == 0
