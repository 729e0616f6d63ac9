"""Run the load generator in this process, or in processes of its own."""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import resource
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import uvloop

from benchmarks.driver import Extent, LoadResult, Share, drive
from benchmarks.prompts import PromptSource
from benchmarks.target import Target
from benchmarks.workload import Workload
from contract.errors import EngineFailed

START_TIMEOUT_S = 600.0  # thousands of long prompts take minutes; a process that ends is noticed at once
LEAD_S = 0.3  # all processes are ready before the common instant zero


@dataclass(frozen=True)
class Load:
    """Everything a generator needs, in a form that can be sent to another process.

    workload, extent: what is sent, and for how long.
    target, prompts: make the target and the source of prompts, in the process that uses them.
    uvloop: run on uvloop, which costs less CPU per message than asyncio's own loop.
    """

    workload: Workload
    extent: Extent
    target: Callable[[], Target]
    prompts: Callable[[], PromptSource]
    uvloop: bool = False


def run(load: Load, processes: int = 1) -> LoadResult:
    """Drive the load and return all records. One process means this one."""
    if processes == 1:
        return _run_loop(load, Share())
    parts = run_apart([(load, Share(nth, processes)) for nth in range(processes)])
    records = sorted((record for part in parts for record in part.records), key=lambda record: record.index)
    return LoadResult(records, parts[0].started_s, [use for part in parts for use in part.generators])


def run_apart(
    loads: Sequence[tuple[Load, Share]],
    *,
    while_running: AbstractContextManager[object] | None = None,
    timeout_s: float | None = None,
) -> list[LoadResult]:
    """Drive each load in a process of its own, all from the same instant zero.

    while_running: entered when all processes are ready, before the first request; left after the last answer.
    timeout_s: how long the loads may take; None is unlimited.
    Raises: EngineFailed if a process ends or does not report in time.
    """
    context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    messages, start = context.Queue(), context.Value("d", 0.0)
    go = context.Event()
    children = [
        context.Process(target=_child, args=(nth, load, share, messages, go, start), daemon=True)
        for nth, (load, share) in enumerate(loads)
    ]
    for child in children:
        child.start()
    try:
        for _ in children:
            _next(messages, children, START_TIMEOUT_S)
        with while_running or nullcontext():
            start.value = time.monotonic() + LEAD_S
            go.set()
            results: dict[int, LoadResult] = {}
            deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
            while len(results) < len(loads):
                unfinished = [child for nth, child in enumerate(children) if nth not in results]
                nth, result = _next(messages, unfinished, deadline_s and deadline_s - time.monotonic())
                results[nth] = result
    finally:
        for child in children:
            child.join(1)
            if child.is_alive():
                child.terminate()
    return [results[nth] for nth in range(len(loads))]


def _run_loop(load: Load, share: Share, start_at: Callable[[], float] = time.monotonic) -> LoadResult:
    async def send() -> LoadResult:
        async with load.target() as target:
            return await drive(load.workload, target, load.prompts(), load.extent, share=share, start=start_at)

    return (uvloop.run if load.uvloop else asyncio.run)(send())


def _child(nth: int, load: Load, share: Share, messages: Any, go: Any, start: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends this process
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def started_s() -> float:
        messages.put((nth, "ready"))
        if not go.wait(START_TIMEOUT_S):
            raise TimeoutError("the other load generator processes were not ready in time")
        return start.value

    messages.put((nth, _run_loop(load, share, started_s)))


def _next(messages: Any, children: Sequence[Any], timeout_s: float | None) -> tuple[int, Any]:
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        # Read first: what a process sent before it ended can be read by then.
        dead = [child.exitcode for child in children if child.exitcode is not None]
        try:
            return messages.get(timeout=0.5)
        except queue.Empty:
            if dead:
                raise EngineFailed(f"a load generator process ended with code {dead[0]}") from None
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise EngineFailed(f"a load generator process did not report within {timeout_s:.0f} s") from None
