"""A running server as a test watches it: what its metrics page says, waited for, and its engine's worker, halted.

A machine that runs other things too may keep any process from its core for seconds. What must be so at one moment is
therefore made so, with a worker that stands still, and what only follows is waited for with patience.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import pytest
from triton_requests import metric, metrics

from contract import thread_dump
from server.replica import Replica

PATIENCE_S = 180.0
# For what a moment's standstill of the machine hides and a wrong server never shows.
TRIES = 20

# What is shown of a page that was waited for in vain.
_STATE = (
    "nv_trt_llm_request_metrics",
    'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used"',
    "nv_trt_llm_general_metrics",
    "trident_open_streams",
    "trident_requests_total",
)

Page = dict[str, float]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def worker(replica: Replica) -> int:
    """The pid of the process that computes the tokens."""
    return children(replica.stubs("engine")[0].pid)[0]


@contextmanager
def halted(replica: Replica) -> Iterator[None]:
    """The engine's worker stands still: no stream gets a token or leaves its slot, all else goes on."""
    # A server that replaces a halted worker would do so during the test on a slow machine.
    assert replica.settings.stall_s > PATIENCE_S, "start this server with a stall_s above PATIENCE_S"
    pid = worker(replica)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it was killed meanwhile
            os.kill(pid, signal.SIGCONT)


async def until(replica: Replica, condition: Callable[[Page], bool]) -> Page:
    """The first metrics page that is as wanted. Gauges and counters are up to 100 ms old."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition(page := await asyncio.to_thread(metrics, replica.metrics_url)):
        if time.monotonic() >= deadline_s:
            await _in_vain(replica, page)
        await asyncio.sleep(0.02)
    return page


async def _in_vain(replica: Replica, page: Page) -> NoReturn:
    """Fail with the page; the threads of the stubs say in the log, which pytest shows, where they stand."""
    for stub in replica.stubs():
        thread_dump.request(stub.pid)
        await asyncio.sleep(0.3)  # or they write at once, into each other's lines
    pytest.fail(str({key: n for key, n in page.items() if key.startswith(_STATE)}))


async def until_idle(replica: Replica) -> Page:
    return await until(replica, idle)


def idle(page: Page) -> bool:
    """Nothing runs, waits, or holds a block, and no text is under way."""
    blocks = metric(page, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="used")
    return requests(page, "active") == blocks == metric(page, "trident_open_streams") == 0


def requests(page: Page, state: str) -> int:
    """``active`` is the sum of ``scheduled``, which hold a slot, and ``waiting``."""
    return int(metric(page, "nv_trt_llm_request_metrics", request_type=state))


def ended(page: Page, finish_reason: str) -> int:
    return int(metric(page, "trident_requests_total", finish_reason=finish_reason))


async def left_in_time(replica: Replica, leave: Callable[[], Awaitable[None]]) -> int:
    """``leave`` begins a long request and goes away, which must free the engine before the request's own end.

    It is called until that was so, at most TRIES times: who stands still for longer than the whole request takes
    leaves when it has ended. Returns how often it was called.
    """
    for n in range(TRIES):
        before = await until_idle(replica)

        def over(page: Page, before: Page = before) -> bool:
            return idle(page) and any(ended(page, how) > ended(before, how) for how in ("cancelled", "length"))

        await leave()
        after = await until(replica, over)
        if ended(after, "cancelled") > ended(before, "cancelled"):
            return n + 1
    raise AssertionError("every request ran to its end although its client had gone")
