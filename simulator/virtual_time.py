"""An event loop whose time jumps to the next timer, and the clocks of the ``time`` module to go with it."""

from __future__ import annotations

import asyncio
import random
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from unittest.mock import patch

START_S = 1000.0  # of the monotonic clock: the gateway takes 0 as "never"
EPOCH_S = 1_767_571_200  # 2026-01-05 00:00 UTC, a Monday
_T = TypeVar("_T")


class _Jump(selectors.SelectSelector):
    """Nothing is ever read or written: waiting for it passes virtual time only."""

    now_s = START_S

    def select(self, timeout: float | None = None) -> list:
        if timeout is None:
            raise RuntimeError("the simulation waits for something that no timer brings about")
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs timers in order without waiting for them; what would run in a thread runs at once."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now_s

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., _T], *args: Any
    ) -> asyncio.Future[_T]:
        async def called() -> _T:
            return func(*args)

        return self.create_task(called())


def run(main: Coroutine[Any, Any, _T], seed: int, start_s: float = 0.0) -> _T:
    """Run ``main`` on a virtual loop, in virtual time throughout the process. start_s: seconds after EPOCH_S."""
    loop, offset_s, before = VirtualLoop(), EPOCH_S + start_s - START_S, random.getstate()
    clocks: dict[str, Any] = {
        "monotonic": loop.time,
        "perf_counter": loop.time,
        "time": lambda: loop.time() + offset_s,
        "monotonic_ns": lambda: int(loop.time() * 1e9),
        "time_ns": lambda: int((loop.time() + offset_s) * 1e9),
    }
    with patch.multiple(time, **clocks):  # also where no clock can be passed in
        random.seed(seed)
        try:
            return loop.run_until_complete(main)
        finally:
            random.setstate(before)
            loop.set_exception_handler(lambda *_: None)  # what ended the run was raised
            loop.run_until_complete(_cancel_all())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


async def _cancel_all() -> None:
    """End the tasks that an interrupt or an error left."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
