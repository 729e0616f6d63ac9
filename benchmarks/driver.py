"""The load generator: sends a workload's requests when they are due and records what comes back.

One event loop. An open loop starts every request at its own instant, however many are still unanswered; its latency
counts from that instant. How late the loop itself is, is measured all the while (``GeneratorUse``).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.arrivals import Arrival
from benchmarks.processes import waited
from benchmarks.prompts import Prompts
from benchmarks.record import Record
from benchmarks.target import Target
from benchmarks.workload import PlannedRequest, Workload
from contract.errors import TridentError

LAG_SAMPLE_S = 0.01
PROGRESS_S = 0.5
PREPARED = 128  # requests made in advance
LONGEST_S = 86_400.0


@dataclass(frozen=True)
class Extent:
    """How long a run is: requests that begin within warmup_s + duration_s, or so many of them, whichever ends first.

    Figures are of the requests intended after the warm-up.
    """

    duration_s: float | None = 10.0
    warmup_s: float = 0.0
    requests: int | None = None

    @property
    def total_s(self) -> float:
        return math.inf if self.duration_s is None else self.warmup_s + self.duration_s


@dataclass(frozen=True)
class Share:
    """Which part of the load one generator process makes: every ``of``-th request, beginning with number ``nth``."""

    nth: int = 0
    of: int = 1


@dataclass
class GeneratorUse:
    """What one generator process used: CPU over wall seconds, seconds it was ready and waited for a core, and how late
    its event loop was (seconds)."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    waited_s: float = 0.0
    lags_s: list[float] = field(default_factory=list)


@dataclass
class Progress:
    """Seconds since the start; counts so far."""

    elapsed_s: float
    running: int
    done: int
    failed: int
    tokens: int


@dataclass
class Driven:
    records: list[Record]
    started_s: float
    generators: list[GeneratorUse]


async def drive(
    workload: Workload,
    target: Target,
    prompts: Prompts,
    extent: Extent,
    *,
    share: Share = Share(),  # noqa: B008 - frozen
    started_s: float | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Driven:
    """Runs the load to the end of its last answer. ``started_s``: the instant zero, on time.monotonic's clock."""
    run = _Run(workload, target, prompts, extent, share)
    run.prepare()
    run.started_s = time.monotonic() if started_s is None else started_s
    watchers = [asyncio.create_task(run.watch_lag())]
    if on_progress is not None:
        watchers.append(asyncio.create_task(run.report(on_progress)))
    cpu_s, wall_s, waited_s = time.process_time(), time.monotonic(), waited(Path("/proc/self"))
    try:
        await (run.closed_loop() if workload.concurrency else run.open_loop())
    finally:
        run.use.cpu_s, run.use.wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
        run.use.waited_s = max(0.0, waited(Path("/proc/self")) - waited_s)
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
    return Driven(sorted(run.records, key=lambda record: record.index), run.started_s, [run.use])


class _Run:
    def __init__(self, workload: Workload, target: Target, prompts: Prompts, extent: Extent, share: Share) -> None:
        self._workload, self._target, self._prompts = workload, target, prompts
        self._extent, self._share = extent, share
        self.started_s = 0.0
        self.records: list[Record] = []
        self.use = GeneratorUse()
        self._running = 0
        self._tokens = 0
        self._prepared: dict[int, PlannedRequest] = {}

    def prepare(self) -> None:
        """Makes the first requests' prompts, so that the load begins without the work of making them."""
        if self._workload.concurrency:
            count = max(PREPARED, 2 * self._workload.concurrency)
            for number in range(self._share.nth, min(count, self._limit), self._share.of):
                self._prepared[number] = self._workload.request(number, self._prompts)
        else:
            for number, arrival in itertools.islice(self._arrivals(), PREPARED):
                self._prepared[number] = self._workload.request(number, self._prompts, arrival)

    @property
    def _limit(self) -> int:
        return sys.maxsize if self._extent.requests is None else self._extent.requests

    def _arrivals(self) -> Iterator[tuple[int, Arrival]]:
        """This generator's share of the open loop, with each request's number."""
        horizon_s = min(self._extent.total_s, LONGEST_S)
        numbered = enumerate(self._workload.schedule(horizon_s))
        mine = ((number, arrival) for number, arrival in numbered if number % self._share.of == self._share.nth)
        return itertools.takewhile(lambda pair: pair[0] < self._limit, mine)

    def _request(self, number: int, arrival: Arrival | None = None) -> PlannedRequest:
        return self._prepared.pop(number, None) or self._workload.request(number, self._prompts, arrival)

    async def closed_loop(self) -> None:
        numbers = itertools.count(self._share.nth, self._share.of)
        mine = len(range(self._share.nth, self._workload.concurrency, self._share.of))
        await asyncio.sleep(self.started_s - time.monotonic())
        await asyncio.gather(*(self._one_after_another(numbers) for _ in range(mine)))

    async def _one_after_another(self, numbers: itertools.count) -> None:
        while time.monotonic() - self.started_s < self._extent.total_s:
            number = next(numbers)
            if number >= self._limit:
                return
            await self._ask(self._request(number), time.monotonic())

    async def open_loop(self) -> None:
        tasks: set[asyncio.Task] = set()
        for number, arrival in self._arrivals():
            asked = self._request(number, arrival)  # made before it is due
            intended_s = self.started_s + arrival.at_s
            if (wait_s := intended_s - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            task = asyncio.create_task(self._ask(asked, intended_s))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    async def _ask(self, asked: PlannedRequest, intended_s: float) -> None:
        record = Record(asked.index, asked.tenant, intended_s)
        self._running += 1
        try:
            record.sent_s = time.monotonic()
            stream = self._target.open(asked, ignore_eos=self._workload.ignore_eos, stream=self._workload.stream)
            await self._read(stream, asked, record)
            if not (record.ok or record.left):
                record.error = f"Unfinished: the answer ended by {record.finish_reason or 'nothing that was said'}"
        except TridentError as error:
            record.error = f"{type(error).__name__}: {error}"
        finally:
            record.ended_s = record.ended_s or time.monotonic()
            self._running -= 1
            self.records.append(record)

    async def _read(self, stream, asked: PlannedRequest, record: Record) -> None:
        tokens = 0
        async for delta in stream:
            count = len(delta.token_ids)
            if count:
                record.messages.append((time.monotonic(), count))
                tokens += count
                self._tokens += count
            if delta.finish_reason is not None:
                record.ended_s = time.monotonic()
                record.finish_reason = delta.finish_reason.value
                record.timings = delta.timings
                if delta.usage is not None:
                    record.input_tokens = delta.usage.input_tokens
                    record.usage_tokens = delta.usage.output_tokens
            elif asked.leave_after_tokens is not None and tokens >= asked.leave_after_tokens:
                record.left = True
                await stream.aclose()
                return

    async def watch_lag(self) -> None:
        while True:
            due_s = time.monotonic() + LAG_SAMPLE_S
            await asyncio.sleep(LAG_SAMPLE_S)
            self.use.lags_s.append(max(0.0, time.monotonic() - due_s))

    async def report(self, on_progress: Callable[[Progress], None]) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            failed = sum(bool(record.error) for record in self.records)
            elapsed_s = time.monotonic() - self.started_s
            on_progress(Progress(elapsed_s, self._running, len(self.records) - failed, failed, self._tokens))
