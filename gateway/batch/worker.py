"""Run batches: as many lines at once as the pace allows, round-robin over tenants, each line to one result.

One process works on a database at a time: the one that holds a file lock beside it, which the kernel releases when the
process dies. Running lines are queued in memory only, so after a crash they are pending again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from contract import errors
from contract.errors import Cancelled, DeadlineExceeded, EngineFailed, Overloaded, TridentError, Unavailable
from contract.generation import Usage
from gateway.api.formatters import ChatFormatter, CompletionFormatter
from gateway.api.openai_http import FormatterType
from gateway.batch import jsonl, webhook
from gateway.batch.jsonl import LineReader
from gateway.batch.pace import OPERATION, Pace, Reason, Signals
from gateway.batch.store import UNFINISHED, Batch, BatchStore, Line
from gateway.batch.webhook import Webhooks
from gateway.config.settings import Settings
from gateway.config.tenant import LOWEST_PRIORITY, Tenant
from gateway.request_context import RequestContext
from gateway.routing.upstream import usage_of

_LOG = logging.getLogger("gateway.batch.batch")
FORMATTERS: dict[str, FormatterType] = {"/v1/chat/completions": ChatFormatter, "/v1/completions": CompletionFormatter}
MAX_ATTEMPTS = 3  # of a line whose generation fails; a rejection for lack of capacity does not count
MAX_PREEMPTIONS = 3  # of a line; then it runs to its end, so that it does end
MAX_PAUSE_S = 60.0
_LINES_IN_MEMORY = 64  # of a batch
_LINES_PER_TRANSACTION = 256  # during validation

# Returns the response's JSON object to a body. Raises TridentError.
Complete = Callable[[FormatterType, RequestContext, bytes], Awaitable[Mapping[str, Any]]]


class BatchMetrics:
    """stalled_s: returns for how long pending lines have made no progress, in seconds; called at every scrape."""

    def __init__(self, registry: CollectorRegistry, stalled_s: Callable[[], float]) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        text = "Batch lines by outcome: completed and failed have a result, retried and preempted run again"
        self.lines = counter("trident_gateway_batch_lines", text, ("outcome",))
        text = "Ticks at which the pace was cut, by reason"
        self.cuts = counter("trident_gateway_batch_pace_cuts", text, ("reason",))
        text = "Webhook calls by outcome: taken, retried, given_up"
        self.webhooks = counter("trident_gateway_batch_webhooks", text, ("outcome",))
        self.allowed = gauge("trident_gateway_batch_allowed", "Batch lines that may run at once")
        self.running = gauge("trident_gateway_batch_running", "Batch lines running")
        self.pending = gauge("trident_gateway_batch_pending_lines", "Batch lines without a result")
        unfinished = gauge("trident_gateway_batches", "Unfinished batches by status", ("status",))
        self.unfinished = {status: unfinished.labels(status) for status in UNFINISHED}
        text = "Seconds since a line got its result while lines are pending; else 0"
        gauge("trident_gateway_batch_stalled_seconds", text).set_function(stalled_s)
        for outcome in ("completed", "failed", "retried", "preempted"):
            self.lines.labels(outcome)
        for reason in (Reason.QUEUE, Reason.LATE, Reason.DEGRADED, Reason.UNHEALTHY):
            self.cuts.labels(reason.value)
        for outcome in ("taken", "retried", "given_up"):
            self.webhooks.labels(outcome)


@dataclasses.dataclass(eq=False)
class _QueuedLine:
    line: Line
    began_s: float = 0.0
    attempts: int = 0
    preemptions: int = 0


@dataclasses.dataclass(eq=False)
class _Run:
    """after: the last line read. exhausted: all pending lines were. not_before_s: no line starts before."""

    batch: Batch
    after: int = -1
    exhausted: bool = False
    not_before_s: float = 0.0
    waiting: deque[_QueuedLine] = dataclasses.field(default_factory=deque)
    tasks: dict[asyncio.Task[None], _QueuedLine] = dataclasses.field(default_factory=dict)


class BatchWorker:
    """Run the batches of a store. ``wake`` it when a batch was created or cancelled.

    complete: returns the response to one line's body. tenant: returns that of (tenant name, key name), or None.
    signals: returns the load; on_cut is called after the pace was cut for it.
    tick_s: how often the pace and the database are checked. now: Unix seconds.
    """

    def __init__(
        self,
        store: BatchStore,
        complete: Complete,
        tenant: Callable[[str, str], Tenant | None],
        signals: Callable[[], Signals],
        registry: CollectorRegistry,
        webhooks: Webhooks,
        settings: Settings,
        *,
        on_cut: Callable[[], None] = lambda: None,
        tick_s: float = 1.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._complete, self._tenant = store, complete, tenant
        self._signals, self._on_cut, self._settings, self._webhooks = signals, on_cut, settings, webhooks
        self._tick_s, self._now = tick_s, now
        self._metrics = BatchMetrics(registry, self._stalled_s)
        self.pace = Pace()
        self._runs: dict[str, _Run] = {}
        self._turns: deque[str] = deque()  # tenants, the next one first
        self._wakeup = asyncio.Event()
        self._poll_due = True
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by their method
        self._closing = False
        self._progress_s = 0.0  # when a line last got its result; 0 without pending lines

    def wake(self) -> None:
        """Check the database now: a batch was created or cancelled."""
        self._poll_due = True
        self._wakeup.set()

    @property
    def running(self) -> int:
        return sum(len(run.tasks) for run in self._runs.values())

    async def start(self) -> None:
        self._begin("work", self._work)
        self._tasks["work"].add_done_callback(_log_crash)

    def _begin(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a task, unless the last one of its name is under way."""
        if name not in self._tasks or self._tasks[name].done():
            self._tasks[name] = asyncio.create_task(work())

    async def close(self) -> None:
        """Cancel the running lines; they run again at the next start."""
        self._closing = True  # before Python 3.12 wait_for may swallow a cancellation
        await _cancel(self._tasks.values())
        for run in self._runs.values():
            await _cancel(run.tasks)

    async def _work(self) -> None:
        with contextlib.ExitStack() as stack:
            await self._lock(stack)
            next_tick_s = 0.0
            while not self._closing:
                now_s = time.monotonic()
                self._wakeup.clear()
                try:
                    if self._poll_due or now_s >= next_tick_s:
                        self._poll_due = False
                        await self._poll()
                    if now_s >= next_tick_s:
                        next_tick_s = now_s + self._tick_s
                        self._set_pace()
                        await self._housekeeping()
                    await self._fill()
                except Unavailable as error:
                    _LOG.error("%s", error)
                    self._poll_due = True
                    self._wakeup.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._wakeup.wait(), max(0.001, next_tick_s - time.monotonic()))

    async def _lock(self, stack: contextlib.ExitStack) -> None:
        """Wait for the file lock of the database."""
        descriptor = os.open(f"{self._store.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        stack.callback(os.close, descriptor)
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                self._signals()  # tells the worker that has the lock
                await asyncio.sleep(self._tick_s)

    def _set_pace(self) -> None:
        signals = self._signals()
        self.pace = self.pace.after(signals, self._settings.batch_max_running, self.running)
        if self.pace.cut:
            self._metrics.cuts.labels(self.pace.reason.value).inc()
            self._on_cut()
        self._metrics.allowed.set(self.pace.allowed)
        excess = self.running - self.pace.allowed
        running = [pair for run in self._runs.values() for pair in run.tasks.items()]
        for task, queued in sorted(running, key=lambda pair: pair[1].began_s, reverse=True):  # newest first
            if excess <= 0:
                break
            if queued.preemptions < MAX_PREEMPTIONS or not signals.healthy:
                queued.preemptions += 1
                excess -= 1
                self._metrics.lines.labels("preempted").inc()
                task.cancel()

    async def _poll(self) -> None:
        """Advance the status of every unfinished batch where it is due."""
        unfinished = await asyncio.to_thread(self._store.unfinished)
        for batch_id in self._runs.keys() - {batch.id for batch in unfinished}:
            await _cancel(self._runs.pop(batch_id).tasks)
        for batch in unfinished:
            expired = batch.expires_at <= self._now()
            if batch.status == "cancelling":
                await self._end(batch, "cancelled", "the batch was cancelled before this request ran")
            elif expired and batch.status in ("validating", "in_progress"):
                await self._end(batch, "expired", "the completion window ended before this request ran")
            elif batch.status == "finalizing":
                await self._end(batch, "completed", "")
            elif batch.status == "validating":
                self._begin("validate", partial(self._validate, batch))
            else:
                run = self._runs.setdefault(batch.id, _Run(batch))
                if run.exhausted and not run.waiting and not run.tasks:
                    await asyncio.to_thread(self._store.finalize, batch.id)
                    await self._end(batch, "completed", "")

    async def _end(self, batch: Batch, status: str, message: str) -> None:
        """message: of the lines that did not run."""
        if batch.id in self._runs:
            await _cancel(self._runs.pop(batch.id).tasks)
        await asyncio.to_thread(self._store.end, batch.id, status, jsonl.unserved(f"batch_{status}", message))
        _LOG.info("batch ended", extra={"fields": {"batch": batch.id, "tenant": batch.tenant, "status": status}})
        self.wake()

    async def _validate(self, batch: Batch) -> None:
        """Validate a batch, or fail it: one that stayed in this status would hold up all others."""
        [error] = await asyncio.gather(self._read_input(batch), return_exceptions=True)
        if isinstance(error, Unavailable):
            _LOG.error("%s", error)
            await asyncio.sleep(self._tick_s)
        elif isinstance(error, TridentError):
            await self._fail(batch, "input_file_missing", str(error))
        elif error is not None:
            _LOG.error("unhandled exception in validation of %s", batch.id, exc_info=error, extra={"fields": {}})
            problem = f"the gateway failed to read the file; quote {batch.id} when you report it"
            await self._fail(batch, "validation_failed", problem)
        self.wake()

    async def _read_input(self, batch: Batch) -> None:
        """Read the input into lines; an interrupted validation starts over."""
        settings = self._settings
        reader = LineReader(batch.id, batch.endpoint, settings.batch_max_lines, settings.max_body_bytes)
        await asyncio.to_thread(self._store.forget_lines, batch.id)
        lines = reader.read(await asyncio.to_thread(self._store.content, batch.tenant, batch.input_file_id))
        while chunk := await asyncio.to_thread(lambda: list(itertools.islice(lines, _LINES_PER_TRANSACTION))):
            await asyncio.to_thread(self._store.add_lines, batch.id, chunk)
        if reader.errors:
            await asyncio.to_thread(self._store.fail, batch.id, reader.errors)
        else:
            await asyncio.to_thread(self._store.begin, batch.id)

    async def _fail(self, batch: Batch, code: str, message: str) -> None:
        error = {"code": code, "message": message, "param": "input_file_id", "line": None}
        await asyncio.to_thread(self._store.fail, batch.id, [error])

    async def _fill(self) -> None:
        """Start lines while the pace allows, one per tenant in turn."""
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
            if not run.waiting and not run.exhausted:
                lines = await asyncio.to_thread(self._store.pending, run.batch.id, run.after, _LINES_IN_MEMORY)
                run.waiting.extend(_QueuedLine(line) for line in lines)
                run.after = lines[-1].number if lines else run.after
                run.exhausted = len(lines) < _LINES_IN_MEMORY
                if not lines:
                    self.wake()
            if run.waiting:
                queued = run.waiting.popleft()
                queued.began_s = now_s
                task = asyncio.create_task(self._serve(run, queued))
                run.tasks[task] = queued
                task.add_done_callback(partial(self._done, run))
                return True
        return False

    def _done(self, run: _Run, task: asyncio.Task) -> None:
        queued = run.tasks.pop(task)
        if task.cancelled():
            run.waiting.appendleft(queued)
        elif task.exception() is not None:
            queued.attempts += 1
            run.waiting.append(queued)
            if queued.attempts != MAX_ATTEMPTS:  # then only its error is left to store
                run.not_before_s = time.monotonic() + MAX_PAUSE_S
            request_id = jsonl.request_id(queued.line)
            _LOG.error("unhandled exception in request %s", request_id, exc_info=task.exception(), extra={"fields": {}})
        self._poll_due = self._poll_due or not (run.waiting or run.tasks)
        self._wakeup.set()

    async def _serve(self, run: _Run, queued: _QueuedLine) -> None:
        """Run one attempt of one line. A cancelled attempt has no effect."""
        line, batch = queued.line, run.batch
        if queued.attempts >= MAX_ATTEMPTS:  # whatever the last one raised, its error is not stored yet
            error = EngineFailed(f"the gateway failed; quote {jsonl.request_id(line)} when you report it")
            return await self._finish(run, queued, error)
        try:
            tenant = self._tenant(batch.tenant, batch.key_name)
            if tenant is None:
                raise errors.Unauthenticated("the API key that created this batch is no longer configured")
            tenant = dataclasses.replace(tenant, priority=LOWEST_PRIORITY)
            context = RequestContext(tenant, OPERATION, OPERATION, jsonl.request_id(line))
            response = await self._complete(FORMATTERS[batch.endpoint], context, line.body)
        except (Overloaded, Unavailable) as error:
            pause_s = 1.0 if error.retry_after_s is None else error.retry_after_s
            self._retry(run, queued, min(MAX_PAUSE_S, max(0.1, pause_s)))
        except (EngineFailed, DeadlineExceeded, Cancelled) as error:
            queued.attempts += 1
            if queued.attempts < MAX_ATTEMPTS:
                self._retry(run, queued, 2.0**queued.attempts)
            else:
                await self._finish(run, queued, error)
        except TridentError as error:
            await self._finish(run, queued, error)
        else:
            await self._finish(run, queued, response)

    def _retry(self, run: _Run, queued: _QueuedLine, pause_s: float) -> None:
        """Run the line again after a pause of the whole batch, whose next line would fail in the same way."""
        run.waiting.append(queued)
        run.not_before_s = max(run.not_before_s, time.monotonic() + pause_s)
        self._metrics.lines.labels("retried").inc()

    async def _finish(self, run: _Run, queued: _QueuedLine, answer: Mapping[str, Any] | TridentError) -> None:
        line, ok = queued.line, not isinstance(answer, TridentError)
        if isinstance(answer, TridentError):
            result, used = jsonl.refused(line, answer), None
        else:
            result, used = jsonl.answered(line, answer), usage_of(answer.get("usage"))
        finish = partial(self._store.finish_line, line, ok, result, used or Usage(0, 0))
        # Shielded: a result is stored even if the line is cancelled in this moment.
        storing = asyncio.ensure_future(asyncio.to_thread(finish))
        try:
            fresh = await asyncio.shield(storing)
        except asyncio.CancelledError:
            fresh = await storing
        except Unavailable as error:
            _LOG.error("%s", error)
            self._retry(run, queued, MAX_PAUSE_S)
            return
        if fresh:
            self._progress_s = time.monotonic()
            self._metrics.lines.labels("completed" if ok else "failed").inc()

    async def _housekeeping(self) -> None:
        statuses, pending = await asyncio.to_thread(self._store.backlog)
        for status, gauge in self._metrics.unfinished.items():
            gauge.set(statuses.get(status, 0))
        self._metrics.pending.set(pending)
        self._metrics.running.set(self.running)
        if not pending:
            self._progress_s = 0.0
        elif not self._progress_s:
            self._progress_s = time.monotonic()
        await asyncio.to_thread(self._store.delete_expired)
        self._begin("call", self._call_webhooks)

    def _stalled_s(self) -> float:
        return time.monotonic() - self._progress_s if self._progress_s else 0.0

    async def _call_webhooks(self) -> None:
        for batch in await asyncio.to_thread(self._store.due_webhooks):
            accepted = await self._webhooks.call(batch)
            wait_s = None if accepted else webhook.wait_s(batch.webhook_attempts + 1)
            outcome = "taken" if accepted else "given_up" if wait_s is None else "retried"
            self._metrics.webhooks.labels(outcome).inc()
            await asyncio.to_thread(self._store.webhook_called, batch.id, wait_s)


async def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _log_crash(task: asyncio.Task) -> None:
    if not task.cancelled() and task.exception() is not None:
        _LOG.error("batch worker crashed", exc_info=task.exception(), extra={"fields": {}})
