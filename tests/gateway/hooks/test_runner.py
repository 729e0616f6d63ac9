"""Calls of hooks: plain and asynchronous ones, late ones, and ones that never return."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from gateway.hooks import runner
from gateway.hooks.runner import Runner


def plus(number: int) -> int:
    return number + 1


async def plus_async(number: int) -> int:
    await asyncio.sleep(0)
    return number + 1


def spin() -> None:
    while True:
        pass


async def block() -> None:
    time.sleep(0.3)


async def cancelled() -> None:
    raise asyncio.CancelledError


def stops() -> None:
    raise StopIteration


def fails() -> None:
    raise KeyError("x")


def made(**more: Any) -> Runner:
    return Runner("one", **{"threads": 2, "timeout_s": 60.0, "hung": lambda: None, **more})


async def test_values_and_exceptions_come_back():
    one = made()
    assert [await one.call(plus, 1), await one.call(plus_async, 2)] == [2, 3]
    with pytest.raises(KeyError):
        await one.call(fails)
    for function in (cancelled, stops):  # neither ends the request that waits
        with pytest.raises(RuntimeError):
            await one.call(function)


async def test_many_calls_at_once_share_the_threads():
    one = made()
    assert await asyncio.gather(*(one.call(plus, n) for n in range(50))) == [n + 1 for n in range(50)]
    assert len(one._workers) == 2


async def test_a_call_that_does_not_return_is_counted_and_its_thread_replaced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "HANG_S", 0.02)
    hung: list[int] = []
    one = made(threads=1, timeout_s=0.005, hung=lambda: hung.append(1))
    threads = set[threading.Thread | None]()
    for count, function in enumerate((spin, block), 1):
        while one.hangs < count:  # a call that found no core in time did not begin, and is no hang
            with pytest.raises(asyncio.TimeoutError):
                await one.call(function)
            threads |= {*one._workers, one._loop_thread}
            await asyncio.sleep(0.05)
    one._timeout_s = 60.0
    assert await one.call(plus, 1) == 2 and await one.call(plus_async, 1) == 2
    assert len(hung) == 2 and threads.isdisjoint({*one._workers, one._loop_thread})
    while any(thread.is_alive() for thread in threads if thread is not None):  # an endless loop is ended
        await asyncio.sleep(0.005)


async def test_a_late_call_that_returns_is_no_hang(monkeypatch: pytest.MonkeyPatch):
    check, late, go = Runner._check, asyncio.Queue(), threading.Event()
    monkeypatch.setattr(runner, "HANG_S", 0.0)
    monkeypatch.setattr(Runner, "_check", lambda self, job: late.put_nowait(job))
    one, began = made(threads=1), threading.Event()
    call = asyncio.ensure_future(one.call(lambda: began.set() or go.wait(60)))
    assert await asyncio.to_thread(began.wait, 60)
    one._timeout_s = 0.005
    call.cancel()  # given up as a late one is, but not before it has begun
    job = await late.get()
    go.set()
    while not job.ended:
        await asyncio.sleep(0.005)
    check(one, job)
    assert one.hangs == 0


async def test_a_call_that_found_no_thread_in_time_is_no_hang(monkeypatch: pytest.MonkeyPatch):
    check, late, go = Runner._check, asyncio.Queue(), threading.Event()
    monkeypatch.setattr(Runner, "_check", lambda self, job: late.put_nowait(job))
    one = made(threads=1)
    first = asyncio.ensure_future(one.call(go.wait, 60))
    await asyncio.sleep(0)
    one._timeout_s = 0.005
    monkeypatch.setattr(runner, "HANG_S", 0.0)
    with pytest.raises(asyncio.TimeoutError):
        await one.call(plus, 1)
    waited, workers = await late.get(), {*one._workers}
    one._timeout_s = 60.0
    go.set()
    assert await first and await one.call(plus, 1) == 2  # the thread passed over the call between them
    check(one, waited)
    assert one.hangs == 0 and one._workers == workers and await one.call(plus, 1) == 2
