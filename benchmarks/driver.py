"""The load generator: send a workload's requests when they are due and record what comes back.

One event loop. An open loop sends every request at its own instant, however many are still unanswered; its latency
counts from that instant. The lag of the event loop itself is measured meanwhile (``GeneratorUse``).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from benchmarks.arrivals import Arrival
from benchmarks.processes import waited_s
from benchmarks.prompts import PromptSource
from benchmarks.record import Record
from benchmarks.target import Target
from benchmarks.workload import PlannedRequest, Workload
from contract.errors import TridentError

LAG_SAMPLE_S = 0.01
PREPARED = 128  # requests made before the load begins
PREPARE_S = 10.0  # at most, for them
LONGEST_S = 86_400.0


@dataclass(frozen=True)
class Extent:
    """Bound a run: it ends with whichever limit is reached first.

    duration_s: seconds of load after the warm-up; None is unlimited.
    warmup_s: seconds of load before it; its requests are not part of the figures.
    requests: number of requests; None is unlimited.
    answers: of a closed loop: it is warm once every client has had an answer, and lasts ``duration_s`` from then on and
        until so many further answers have ended; then ``warmup_s`` is the longest warm-up, ``most_s`` the longest load.
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
    """What one generator process used.

    cpu_s, wall_s: CPU and wall seconds.
    waited_s: seconds its threads were runnable and waited for a core.
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
        self.started_s = self._warm_s = self._ended_s = 0.0
        # Clients without an answer, now and at the end of the warm-up; answers since then.
        self._cold = self._late = workload.concurrency or 0
        self._answered = 0
        self.records: list[Record] = []
        self.use = GeneratorUse()
        self._prepared: dict[int, PlannedRequest] = {}

    def prepare(self) -> None:
        """Make the first requests' prompts now, so that making them does not delay the load's start; long ones only for
        PREPARE_S."""
        end_s = time.monotonic() + PREPARE_S
        coming: Iterator[tuple[int, Arrival | None]]
        if self._workload.concurrency:
            count = min(max(PREPARED, 2 * self._workload.concurrency), self._limit)
            coming = ((number, None) for number in range(self._share.nth, count, self._share.of))
        else:
            coming = itertools.islice(self._arrivals(), PREPARED)
        for number, arrival in coming:
            if time.monotonic() > end_s:
                return
            self._prepared[number] = self._workload.request(number, self._prompts, arrival)

    @property
    def _limit(self) -> int:
        return sys.maxsize if self._extent.requests is None else self._extent.requests

    def _arrivals(self) -> Iterator[tuple[int, Arrival]]:
        """Yield this generator's share of the open loop, with each request's number."""
        horizon_s = min(self._extent.total_s, LONGEST_S)
        numbered = enumerate(self._workload.schedule(horizon_s))
        mine = ((number, arrival) for number, arrival in numbered if number % self._share.of == self._share.nth)
        return itertools.takewhile(lambda pair: pair[0] < self._limit, mine)

    def _request(self, number: int, arrival: Arrival | None = None) -> PlannedRequest:
        if number in self._prepared:
            return self._prepared.pop(number)
        return self._workload.request(number, self._prompts, arrival)

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
        if lasted_s >= extent.most_s or (lasted_s >= (extent.duration_s or 0.0) and self._answered >= extent.answers):
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
