"""One generator in this process, or several in processes of their own, where one cannot keep up."""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.driver import Driven, Extent, Progress, Share, drive
from benchmarks.prompts import Prompts
from benchmarks.target import Ensemble
from benchmarks.workload import Workload
from contract.errors import EngineFailed

START_PATIENCE_S = 30.0
LEAD_S = 0.3  # all processes are ready before the common instant zero


@dataclass(frozen=True)
class Order:
    """Everything a generator needs, in a form that can be sent to another process."""

    url: str
    workload: Workload
    extent: Extent
    engine_folder: Path | None = None
    timeout_s: float = 120.0


def run(order: Order, processes: int = 1, on_progress: Callable[[Progress], None] | None = None) -> Driven:
    """Drives the load and returns all records."""
    if processes == 1:
        return asyncio.run(_drive(order, Share(), None, on_progress))
    return _run_apart(order, processes, on_progress)


async def _drive(order: Order, share: Share, started_s: float | None, on_progress) -> Driven:
    target = Ensemble(order.url, order.timeout_s)
    prompts = Prompts.for_engine(order.engine_folder)
    try:
        return await drive(
            order.workload, target, prompts, order.extent, share=share, started_s=started_s, on_progress=on_progress
        )
    finally:
        await target.close()


def _run_apart(order: Order, processes: int, on_progress) -> Driven:
    context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    said, start = context.Queue(), context.Value("d", 0.0)
    go = context.Event()
    children = [
        context.Process(target=_child, args=(order, Share(nth, processes), said, go, start), daemon=True)
        for nth in range(processes)
    ]
    for child in children:
        child.start()
    try:
        for _ in children:
            _next(said, children, START_PATIENCE_S)
        start.value = time.monotonic() + LEAD_S
        go.set()
        latest: dict[int, Progress] = {}
        parts: list[Driven] = []
        while len(parts) < processes:
            nth, message = _next(said, children, None)
            if isinstance(message, Driven):
                parts.append(message)
            elif on_progress is not None:
                latest[nth] = message
                on_progress(_sum(list(latest.values())))
    finally:
        for child in children:
            child.join(1)
            if child.is_alive():
                child.terminate()
    records = sorted((record for part in parts for record in part.records), key=lambda record: record.index)
    return Driven(records, start.value, [use for part in parts for use in part.generators])


def _child(order: Order, share: Share, said, go, start) -> None:
    said.put((share.nth, "ready"))
    if not go.wait(START_PATIENCE_S):
        return
    report = lambda progress: said.put((share.nth, progress))  # noqa: E731
    said.put((share.nth, asyncio.run(_drive(order, share, start.value, report))))


def _next(said, children, patience_s: float | None):
    deadline_s = None if patience_s is None else time.monotonic() + patience_s
    while True:
        try:
            return said.get(timeout=0.5)
        except queue.Empty:
            dead = [child.exitcode for child in children if child.exitcode not in (None, 0)]
            if dead or (deadline_s is not None and time.monotonic() > deadline_s):
                raise EngineFailed(
                    f"a load generator process ended with code {dead or 'none, but never began'}"
                ) from None


def _sum(parts: list[Progress]) -> Progress:
    whole = [sum(getattr(part, name) for part in parts) for name in ("running", "done", "failed", "tokens")]
    return Progress(max(part.elapsed_s for part in parts), *whole)
