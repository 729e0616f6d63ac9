"""What drains the batches: as many lines at once as the pace allows, in turn among the tenants, each to its one result.

One process works on a database at a time, the one that holds the lock beside it, which the system takes from it when
it dies. What it has under way is known to it alone, so a line that was running when it was killed is pending again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from contract.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    Overloaded,
    TridentError,
    Unauthenticated,
    Unavailable,
)
from gateway.api.chat import ChatFormatter
from gateway.api.completions import CompletionFormatter
from gateway.batch import jsonl, webhook
from gateway.batch.aimd import Pace, PacePolicy, Signals
from gateway.batch.jsonl import LineReader
from gateway.batch.metrics import BatchMetrics
from gateway.batch.signals import OPERATION
from gateway.batch.store import Batch, BatchStore, Line
from gateway.batch.webhook import Webhooks
from gateway.config.tenant import LOWEST_PRIORITY, Tenant
from gateway.request_context import RequestContext

_LOG = logging.getLogger("gateway.batch.batch")
FORMS = {"/v1/chat/completions": ChatFormatter, "/v1/completions": CompletionFormatter}
TRIES = 3  # of a line whose generation breaks; being refused for lack of room is not a try
PREEMPTIONS = 3  # of a line; then it runs to its end, or nothing ever would
MOST_PAUSE_S = 60.0
_AT_ONCE = 64  # lines of a batch that are held in memory
_SLICE = 256  # lines validated before others have a turn

Form = type[ChatFormatter] | type[CompletionFormatter]
# (form, asking, body) → the answer's JSON as a table. Raises TridentError.
Answer = Callable[[Form, RequestContext, bytes], Awaitable[Mapping[str, Any]]]


@dataclasses.dataclass(eq=False)
class _Held:
    """A line in memory and what became of its tries."""

    line: Line
    began_s: float = 0.0
    tries: int = 0
    preemptions: int = 0


@dataclasses.dataclass(eq=False)
class _Run:
    """A batch under way. after: the number of the last line that was taken from the database."""

    batch: Batch
    after: int = -1
    exhausted: bool = False
    not_before_s: float = 0.0
    held: deque[_Held] = dataclasses.field(default_factory=deque)
    tasks: dict[asyncio.Task, _Held] = dataclasses.field(default_factory=dict)


class BatchWorker:
    """``start`` and ``close`` on the loop that serves. ``wake`` it when a batch was made or cancelled.

    tenant: who the key of that tenant is today, None if it is nobody any more. signals: see batch_pace; acted_on is
    called after a cut. now: Unix seconds.
    """

    def __init__(
        self,
        store: BatchStore,
        answer: Answer,
        tenant: Callable[[str, str], Tenant | None],
        signals: Callable[[], Signals],
        registry: CollectorRegistry,
        *,
        acted_on: Callable[[], None] = lambda: None,
        policy: PacePolicy,
        webhooks: Webhooks,
        max_lines: int = 50_000,
        max_line_bytes: int = 4 * 1024 * 1024,
        tick_s: float = 1.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._answer, self._tenant = store, answer, tenant
        self._signals, self._acted_on, self._policy = signals, acted_on, policy
        self._webhooks, self._max_lines, self._max_line_bytes = webhooks, max_lines, max_line_bytes
        self._tick_s, self._now = tick_s, now
        self._metrics = BatchMetrics(registry, self._stalled_s)
        self.pace = Pace()
        self._runs: dict[str, _Run] = {}
        self._turns: deque[str] = deque()  # tenants, whose turn it is first
        self._woken = asyncio.Event()
        self._look_due = True
        self._working: asyncio.Task | None = None
        self._validating: asyncio.Task | None = None
        self._calling: asyncio.Task | None = None
        self._closing = False
        self._progress_s = 0.0  # when a line last got its result, or when there was nothing to do; 0 is now

    def wake(self) -> None:
        """There may be something new to do."""
        self._look_due = True
        self._woken.set()

    @property
    def running(self) -> int:
        return sum(len(run.tasks) for run in self._runs.values())

    async def start(self) -> None:
        self._working = asyncio.create_task(self._work())
        self._working.add_done_callback(_say_defect)

    async def close(self) -> None:
        """Lines under way are given up; they run again at the next start."""
        self._closing = True  # before Python 3.12 wait_for may swallow a cancellation
        tasks = [task for task in (self._working, self._validating, self._calling) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for run in self._runs.values():
            await self._stop(run)

    async def _work(self) -> None:
        with contextlib.ExitStack() as stack:
            await self._alone(stack)
            next_tick_s = 0.0
            while not self._closing:
                now_s = time.monotonic()
                self._woken.clear()
                try:
                    if self._look_due or now_s >= next_tick_s:
                        self._look_due = False
                        await self._look()
                    if now_s >= next_tick_s:
                        next_tick_s = now_s + self._tick_s
                        self._set_pace()
                        await self._housekeeping()
                    await self._fill()
                except Unavailable as error:
                    _LOG.error("%s", str(error).replace("%", "%%"))
                    self._look_due = True
                    self._woken.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), max(0.001, next_tick_s - time.monotonic()))

    async def _alone(self, stack: contextlib.ExitStack) -> None:
        """Returns when no other process works on the database."""
        descriptor = os.open(f"{self._store.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        stack.callback(os.close, descriptor)
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                await asyncio.sleep(self._tick_s)

    def _set_pace(self) -> None:
        seen = self._signals()
        self.pace = self.pace.after(seen, self._policy, self.running)
        if self.pace.cut:
            self._metrics.cuts.labels(self.pace.reason.value).inc()
            self._acted_on()
        self._metrics.allowed.set(self.pace.allowed)
        over = self.running - self.pace.allowed
        under_way = [pair for run in self._runs.values() for pair in run.tasks.items()]
        for task, held in sorted(under_way, key=lambda pair: pair[1].began_s, reverse=True):  # the least is lost
            if over <= 0:
                break
            if held.preemptions < PREEMPTIONS or not seen.fit:
                held.preemptions += 1
                over -= 1
                self._metrics.lines.labels("preempted").inc()
                task.cancel()

    async def _look(self) -> None:
        """Every batch one step further in its life, where it is time."""
        unfinished = await asyncio.to_thread(self._store.unfinished)
        for batch_id in self._runs.keys() - {batch.id for batch in unfinished}:
            await self._stop(self._runs.pop(batch_id))
        for batch in unfinished:
            expired = batch.expires_at <= self._now()
            if batch.status == "cancelling":
                await self._end(
                    batch, "cancelled", "batch_cancelled", "the batch was cancelled before this request ran"
                )
            elif expired and batch.status in ("validating", "in_progress"):
                said = "this request could not run before the completion window was over"
                await self._end(batch, "expired", "batch_expired", said)
            elif batch.status == "finalizing":
                await self._end(batch, "completed", "", "")
            elif batch.status == "validating":
                if self._validating is None or self._validating.done():
                    self._validating = asyncio.create_task(self._validate(batch))
            else:
                run = self._runs.setdefault(batch.id, _Run(batch))
                if run.exhausted and not run.held and not run.tasks:
                    await asyncio.to_thread(self._store.finalize, batch.id)
                    await self._end(batch, "completed", "", "")

    async def _end(self, batch: Batch, status: str, code: str, message: str) -> None:
        run = self._runs.pop(batch.id, None)
        if run is not None:
            await self._stop(run)
        unserved = jsonl.unserved(code, message)
        await asyncio.to_thread(self._store.end, batch.id, status, unserved)
        _LOG.info("batch ended", extra={"fields": {"batch": batch.id, "tenant": batch.tenant, "status": status}})
        self.wake()

    async def _stop(self, run: _Run) -> None:
        tasks = list(run.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _validate(self, batch: Batch) -> None:
        """Reads the input into lines; a validation that was interrupted begins again."""
        try:
            reader = LineReader(batch.id, batch.endpoint, self._max_lines, self._max_line_bytes)
            await asyncio.to_thread(self._store.forget_lines, batch.id)
            lines = reader.read(self._store.content(batch.tenant, batch.input_file_id))
            while some := await asyncio.to_thread(_take, lines, _SLICE):
                await asyncio.to_thread(self._store.add_lines, batch.id, some)
            if reader.complaints:
                await asyncio.to_thread(self._store.fail, batch.id, reader.complaints)
            else:
                await asyncio.to_thread(self._store.begin, batch.id)
        except Unavailable as error:
            _LOG.error("%s", str(error).replace("%", "%%"))
            await asyncio.sleep(self._tick_s)
        except TridentError as error:
            missing = {"code": "input_file_missing", "message": str(error), "param": "input_file_id", "line": None}
            await asyncio.to_thread(self._store.fail, batch.id, [missing])
        self.wake()

    async def _fill(self) -> None:
        """Starts lines while the pace allows, one of each tenant in turn."""
        idle = 0
        tenants = {run.batch.tenant for run in self._runs.values()}
        self._turns = deque([name for name in self._turns if name in tenants])
        self._turns.extend(sorted(tenants - set(self._turns)))
        while self._turns and idle < len(self._turns) and self.running < self.pace.allowed:
            name = self._turns[0]
            self._turns.rotate(-1)
            idle = 0 if await self._start_one(name) else idle + 1

    async def _start_one(self, tenant: str) -> bool:
        now_s = time.monotonic()
        for run in list(self._runs.values()):
            if run.batch.tenant != tenant or run.not_before_s > now_s:
                continue
            if not run.held and not run.exhausted:
                lines = await asyncio.to_thread(self._store.pending, run.batch.id, run.after, _AT_ONCE)
                run.held.extend(_Held(line) for line in lines)
                run.after = lines[-1].number if lines else run.after
                run.exhausted = len(lines) < _AT_ONCE
                if not lines:
                    self.wake()
            if run.held:
                held = run.held.popleft()
                held.began_s = now_s
                task = asyncio.create_task(self._serve(run, held))
                run.tasks[task] = held
                task.add_done_callback(lambda done, run=run: self._done(run, done))
                return True
        return False

    def _done(self, run: _Run, task: asyncio.Task) -> None:
        held = run.tasks.pop(task)
        if task.cancelled():
            run.held.appendleft(held)
        elif task.exception() is not None:
            held.tries += 1
            run.held.append(held)
            run.not_before_s = time.monotonic() + MOST_PAUSE_S
            _LOG.error("a line of %s met a defect", run.batch.id, exc_info=task.exception(), extra={"fields": {}})
        self._look_due = self._look_due or not (run.held or run.tasks)
        self._woken.set()

    async def _serve(self, run: _Run, held: _Held) -> None:
        """One try of one line. Cancelled, it leaves nothing behind."""
        line, batch = held.line, run.batch
        try:
            tenant = self._tenant(batch.tenant, batch.key_name)
            if tenant is None:
                raise Unauthenticated("the API key that made this batch is not known any more")
            asking = RequestContext(
                dataclasses.replace(tenant, priority=LOWEST_PRIORITY),
                OPERATION,
                OPERATION,
                jsonl.request_id(line),
            )
            answer = await self._answer(FORMS[batch.endpoint], asking, line.body)
        except (Overloaded, Unavailable) as error:
            pause_s = 1.0 if error.retry_after_s is None else error.retry_after_s
            self._again(run, held, min(MOST_PAUSE_S, max(0.1, pause_s)))
        except (EngineFailed, DeadlineExceeded, Cancelled) as error:
            held.tries += 1
            if held.tries < TRIES:
                self._again(run, held, 2.0**held.tries)
            else:
                await self._finish(run, held, False, jsonl.refused(line, error), {})
        except TridentError as error:
            await self._finish(run, held, False, jsonl.refused(line, error), {})
        else:
            await self._finish(run, held, True, jsonl.answered(line, answer), answer.get("usage") or {})

    def _again(self, run: _Run, held: _Held, pause_s: float) -> None:
        """The whole batch waits: what this line met, the next one would meet as well."""
        run.held.append(held)
        run.not_before_s = max(run.not_before_s, time.monotonic() + pause_s)
        self._metrics.lines.labels("retried").inc()

    async def _finish(self, run: _Run, held: _Held, ok: bool, result: bytes, usage: Mapping[str, Any]) -> None:
        tokens = (
            usage.get("prompt_tokens", 0),
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            usage.get("completion_tokens", 0),
        )
        # Shielded: a result that is there is kept, even if the line is given up in this very moment.
        kept = asyncio.ensure_future(asyncio.to_thread(self._store.finish_line, held.line, ok, result, *tokens))
        try:
            fresh = await asyncio.shield(kept)
        except asyncio.CancelledError:
            fresh = await kept
        except Unavailable as error:
            _LOG.error("%s", str(error).replace("%", "%%"))
            self._again(run, held, MOST_PAUSE_S)
            return
        if fresh:
            self._progress_s = time.monotonic()
            self._metrics.lines.labels("completed" if ok else "failed").inc()

    async def _housekeeping(self) -> None:
        statuses, left = await asyncio.to_thread(self._store.backlog)
        for status, gauge in self._metrics.unfinished.items():
            gauge.set(statuses.get(status, 0))
        self._metrics.pending.set(left)
        self._metrics.running.set(self.running)
        if not left:
            self._progress_s = 0.0
        elif not self._progress_s:
            self._progress_s = time.monotonic()
        await asyncio.to_thread(self._store.sweep)
        if self._calling is None or self._calling.done():
            self._calling = asyncio.create_task(self._call_webhooks())

    def _stalled_s(self) -> float:
        return time.monotonic() - self._progress_s if self._progress_s else 0.0

    async def _call_webhooks(self) -> None:
        for batch in await asyncio.to_thread(self._store.due_webhooks):
            taken = await self._webhooks.call(batch)
            wait_s = None if taken else webhook.wait_s(batch.webhook_attempts + 1)
            outcome = "taken" if taken else "given_up" if wait_s is None else "retried"
            self._metrics.webhooks.labels(outcome).inc()
            await asyncio.to_thread(self._store.webhook_called, batch.id, wait_s)


def _say_defect(task: asyncio.Task) -> None:
    if not task.cancelled() and task.exception() is not None:
        _LOG.error("the worker of batches met a defect and stopped", exc_info=task.exception(), extra={"fields": {}})


def _take(lines: Any, most: int) -> list[Line]:
    """The next lines, at most so many; empty at the end."""
    some: list[Line] = []
    for line in lines:
        some.append(line)
        if len(some) == most:
            break
    return some
