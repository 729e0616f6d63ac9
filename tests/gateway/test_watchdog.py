"""The watchdog checks what is added, stops checking what is discarded, and reports the event loop's lag."""

import asyncio
import contextlib

import pytest

from gateway.watchdog import Watchdog
from tests.gateway.running import until


class Counted:
    def __init__(self) -> None:
        self.checks = 0

    def check(self, now_s: float) -> None:
        self.checks += 1


@contextlib.asynccontextmanager
async def running(watchdog: Watchdog):
    task = asyncio.create_task(watchdog.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_added_objects_are_checked_until_they_are_discarded():
    lags: list[float] = []
    watchdog, kept, discarded = Watchdog(0.04, lags.append), Counted(), Counted()
    watchdog.add(kept)
    watchdog.add(discarded)
    async with running(watchdog):
        await until(lambda: kept.checks and discarded.checks)
        watchdog.discard(discarded)
        checks_before, after = discarded.checks, kept.checks
        await until(lambda: kept.checks > after + 1)
    assert discarded.checks == checks_before and len(watchdog) == 1
    assert lags and min(lags) >= 0


async def test_an_object_may_discard_another_one_during_its_check():
    watchdog, other = Watchdog(0.04), Counted()

    class Discarding(Counted):
        def check(self, now_s: float) -> None:
            super().check(now_s)
            watchdog.discard(other)

    discarding = Discarding()
    watchdog.add(discarding)
    watchdog.add(other)
    async with running(watchdog):
        await until(lambda: discarding.checks > 1)
    assert other.checks <= 1


@pytest.mark.parametrize(("shortest_s", "period_s"), [(0.001, 0.01), (1.0, 0.25), (60.0, 1.0)])
def test_the_period_is_a_quarter_of_the_shortest_timeout_within_bounds(shortest_s: float, period_s: float):
    assert Watchdog(shortest_s).period_s == period_s
