"""The load generator: send a workload's requests when they are due and record what comes back.

An event loop in this process, or in each of several. An open loop sends every request at its own instant, however many
are still unanswered; its latency counts from that instant. The lag of the event loop itself is measured meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import multiprocessing
import queue
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import uvloop

from benchmarks.arrivals import Arrival
from benchmarks.processes import waited_s
from benchmarks.prompts import PromptSource
from benchmarks.record import Record
from benchmarks.target import Target
from benchmarks.workload import PlannedRequest, Workload
from contract.errors import EngineFailed, TridentError

LAG_SAMPLE_S = 0.01
PREPARED = 128  # requests made before the load begins
PREPARE_S = 10.0  # at most, for them
LONGEST_S = 86_400.0
START_TIMEOUT_S = 600.0  # thousands of long prompts take minutes; a process that ends is noticed at once
LEAD_S = 0.3  # all processes are ready before the common instant zero


@dataclass(frozen=True)
class Extent:
    """Bound a run: it ends with whichever limit is reached first; None is unlimited.

    duration_s, warmup_s: seconds of load after the warm-up, and of the warm-up, which is not part of the figures.
    answers: of a closed loop: it is warm once every client has had an answer, and lasts ``duration_s`` from then on and
        until so many further answers have ended, as many of each client in the mean: clients that a server keeps in
        step are read together, then decode together, and a part of that has another speed than the whole. Then
        ``warmup_s`` is the longest warm-up, ``most_s`` the longest load.
    """

    duration_s: float | None = 10.0
    warmup_s: float = 0.0
    requests: int | None = None
    answers: int = 0
    most_s: float = 0.0

    @property
    def total_s(self) -> float:
        if self.answers:
            return self.warmup_s + self.most_s
        return math.inf if self.duration_s is None else self.warmup_s + self.duration_s


@dataclass(frozen=True)
class Share:
    """The part of the load that one generator process makes: every ``of``-th request, beginning with number ``nth``."""

    nth: int = 0
    of: int = 1


@dataclass
class GeneratorUse:
    """What one generator process used. waited_s: seconds its threads waited for a core.

    lags_s: how late its event loop was, one sample per LAG_SAMPLE_S.
    """

    cpu_s: float = 0.0
    wall_s: float = 0.0
    waited_s: float = 0.0
    lags_s: list[float] = field(default_factory=list)


@dataclass
class LoadResult:
    """Every request's record, in the order of the workload; started_s: instant zero on the monotonic clock.

    steady: with ``Extent.answers``, first and last instant of the load after the warm-up, and whether every client had
        an answer by then and the answers asked for ended in time.
    """

    records: list[Record]
    started_s: float
    generators: list[GeneratorUse]
    steady: tuple[float, float, bool] | None = None

    @property
    def client_cpu_s(self) -> float:
        return sum(use.cpu_s for use in self.generators)

    def answered(self, target: str = "") -> list[Record]:
        """Return the records. Raises EngineFailed, which begins with ``target``, if a request failed."""
        if failed := [record.error for record in self.records if not record.ok]:
            raise EngineFailed(f"{target}{len(failed)} requests failed, the first with {failed[0]}")
        return self.records


async def drive(
    workload: Workload,
    target: Target,
    prompts: PromptSource,
    extent: Extent,
    *,
    share: Share = Share(),  # noqa: B008 - frozen
    start: Callable[[], float] = time.monotonic,
) -> LoadResult:
    """Send the load and wait for its last answer.

    start: called when the first requests' prompts are made; returns instant zero on time.monotonic's clock.
    """
    run = _Run(workload, target, prompts, extent, share)
    run.prepare()
    run.started_s = start()
    watcher = asyncio.create_task(run.watch_lag())
    cpu_s, wall_s, waited_before_s = time.process_time(), time.monotonic(), waited_s()
    try:
        await (run.closed_loop(workload.concurrency) if workload.concurrency else run.open_loop())
    finally:
        run.use.cpu_s, run.use.wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
        run.use.waited_s = max(0.0, waited_s() - waited_before_s)
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
    records = sorted(run.records, key=lambda record: record.index)
    return LoadResult(records, run.started_s, [run.use], run.steady if extent.answers else None)


async def _until(instant_s: float) -> None:
    """Sleep until an instant on the monotonic clock; a timer of uvloop may fire up to a millisecond early."""
    while (wait_s := instant_s - time.monotonic()) > 0:  # noqa: ASYNC110 - no event tells the time
        await asyncio.sleep(wait_s)


class _Run:
    def __init__(self, workload: Workload, target: Target, prompts: PromptSource, extent: Extent, share: Share) -> None:
        self._workload, self._target, self._prompts = workload, target, prompts
        self._extent, self._share = extent, share
        self._limit = sys.maxsize if extent.requests is None else extent.requests
        self.started_s = self._warm_s = self._ended_s = 0.0
        # Clients without an answer, now and at the end of the warm-up; answers since then.
        self._cold = self._late = workload.concurrency or 0
        self._answered = 0
        self.records: list[Record] = []
        self.use = GeneratorUse()
        self._prepared: dict[int, PlannedRequest] = {}

    def prepare(self) -> None:
        """Make the first requests' prompts before the load's start, for PREPARE_S at most."""
        end_s = time.monotonic() + PREPARE_S
        coming: Iterator[tuple[int, Arrival | None]]
        if self._workload.concurrency:
            count = min(max(PREPARED, 2 * self._workload.concurrency), self._limit)
            coming = ((number, None) for number in range(self._share.nth, count, self._share.of))
        else:
            coming = itertools.islice(self._arrivals(), PREPARED)
        for number, arrival in itertools.takewhile(lambda _: time.monotonic() <= end_s, coming):
            self._prepared[number] = self._workload.request(number, self._prompts, arrival)

    def _arrivals(self) -> Iterator[tuple[int, Arrival]]:
        """Yield this generator's share of the open loop, with each request's number."""
        horizon_s = min(self._extent.total_s, LONGEST_S)
        numbered = enumerate(self._workload.schedule(horizon_s))
        mine = ((number, arrival) for number, arrival in numbered if number % self._share.of == self._share.nth)
        return itertools.takewhile(lambda pair: pair[0] < self._limit, mine)

    def _request(self, number: int, arrival: Arrival | None = None) -> PlannedRequest:
        return self._prepared.pop(number, None) or self._workload.request(number, self._prompts, arrival)

    async def closed_loop(self, concurrency: int) -> None:
        numbers = itertools.count(self._share.nth, self._share.of)
        mine = len(range(self._share.nth, concurrency, self._share.of))
        rng = random.Random(f"{self._workload.seed} stagger {self._share.nth}")
        await _until(self.started_s)
        delays_s = [rng.uniform(0.0, self._workload.stagger_s) for _ in range(mine)]
        await asyncio.gather(*(self._one_after_another(numbers, delay_s) for delay_s in delays_s))

    async def _one_after_another(self, numbers: Iterator[int], delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        cold = 1
        while self._goes_on():
            number = next(numbers)
            if number >= self._limit:
                return
            await self._send(self._request(number), time.monotonic())
            self._answered += bool(self._warm_s)
            self._cold, cold = self._cold - cold, 0

    def _goes_on(self) -> bool:
        now_s, extent = time.monotonic(), self._extent
        if not extent.answers:
            return now_s - self.started_s < extent.total_s
        if not self._warm_s and (not self._cold or now_s - self.started_s >= extent.warmup_s):
            self._warm_s, self._late = now_s, self._cold
        if self._ended_s or not self._warm_s:
            return not self._ended_s
        lasted_s = now_s - self._warm_s
        whole = self._answered >= extent.answers and self._answered % (self._workload.concurrency or 1) == 0
        if lasted_s >= extent.most_s or (lasted_s >= (extent.duration_s or 0.0) and whole):
            self._ended_s = now_s
        return not self._ended_s

    @property
    def steady(self) -> tuple[float, float, bool]:
        """As ``LoadResult.steady``. A client that was never answered leaves no load after the warm-up: not steady."""
        last_s = max((record.ended_s for record in self.records), default=self.started_s)
        begin_s, end_s = self._warm_s or self.started_s, self._ended_s or last_s
        return begin_s, end_s, not self._late and self._answered >= self._extent.answers

    async def open_loop(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        for number, arrival in self._arrivals():
            request = self._request(number, arrival)  # made before it is due
            intended_s = self.started_s + arrival.at_s
            await _until(intended_s)
            task = asyncio.create_task(self._send(request, intended_s))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    async def _send(self, request: PlannedRequest, intended_s: float) -> None:
        record = Record(request.index, intended_s)
        self.records.append(record)
        try:
            record.sent_s = time.monotonic()
            await self._target.send(request, record)
            if not (record.ok or record.cancelled):
                record.error = f"Unfinished: the answer ended with finish_reason {record.finish_reason!r}"
        except TridentError as error:
            record.error = f"{type(error).__name__}: {error}"
            record.retry_after = getattr(error, "retry_after_s", None) is not None
        finally:
            record.ended_s = record.ended_s or time.monotonic()

    async def watch_lag(self) -> None:
        while True:
            due_s = time.monotonic() + LAG_SAMPLE_S
            try:
                await asyncio.sleep(LAG_SAMPLE_S)
            finally:  # a blocked loop may run again only when the load has ended, and this is cancelled
                self.use.lags_s.append(max(0.0, time.monotonic() - due_s))


@dataclass(frozen=True)
class Load:
    """Everything a generator needs, in a form that can be sent to another process, which makes target and prompts.

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
    """Drive each load in a process of its own, all from the same instant zero. Raises EngineFailed: a process ended or
    did not report in time.

    while_running: entered when all processes are ready, before the first request; left after the last answer.
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
            deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
            while len(results) < len(loads):
                unfinished = [child for nth, child in enumerate(children) if nth not in results]
                nth, result = _next(messages, unfinished, deadline_s - time.monotonic())
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


def _next(messages: Any, children: Sequence[Any], timeout_s: float) -> tuple[int, Any]:
    deadline_s = time.monotonic() + timeout_s
    while True:
        # Read first: what a process sent before it ended can be read by then.
        dead = [child.exitcode for child in children if child.exitcode is not None]
        try:
            return messages.get(timeout=0.5)
        except queue.Empty:
            if dead:
                raise EngineFailed(f"a load generator process ended with code {dead[0]}") from None
            if time.monotonic() > deadline_s:
                raise EngineFailed(f"a load generator process did not report within {timeout_s:.0f} s") from None
