"""The virtual loop: timers in order, no waiting, clocks that go with it and come back."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

from simulator import virtual_time
from simulator.virtual_time import EPOCH_S, START_S


def test_a_day_passes_at_once_and_every_clock_tells_it():
    async def day() -> list[float]:
        await asyncio.sleep(86_400)
        return [time.monotonic(), time.time(), time.monotonic_ns() / 1e9, asyncio.get_running_loop().time()]

    began_s = time.monotonic()
    told = virtual_time.run(day(), 0, start_s=60.0)
    assert told == pytest.approx([START_S + 86_400, EPOCH_S + 60 + 86_400, START_S + 86_400, START_S + 86_400])
    assert time.monotonic() - began_s < 10 and time.time() > EPOCH_S


def test_timers_run_in_order_and_threads_at_once():
    async def work() -> list[str]:
        done: list[str] = []
        loop = asyncio.get_running_loop()
        loop.call_later(2.0, done.append, "second")
        loop.call_later(1.0, done.append, "first")
        done.append(await asyncio.to_thread(str, "thread"))
        with pytest.raises(ValueError):
            await asyncio.to_thread(int, "x")
        await asyncio.sleep(3.0)
        return done

    assert virtual_time.run(work(), 0) == ["thread", "first", "second"]


def test_what_nothing_ever_ends_is_an_error():
    with pytest.raises(RuntimeError, match="no timer"):
        virtual_time.run(asyncio.Event().wait(), 0)


def test_an_interrupt_ends_the_tasks_that_are_under_way(caplog):
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(60.0)
        finally:
            ended.append("waits")

    async def interrupted() -> None:
        await asyncio.sleep(1.0)
        raise KeyboardInterrupt

    async def work() -> None:
        await asyncio.gather(waits(), interrupted())

    with pytest.raises(KeyboardInterrupt):
        virtual_time.run(work(), 0)
    gc.collect()  # tasks that are pending, and errors that nobody took, are told then
    assert ended == ["waits"] and not caplog.records
