"""Call the functions of one hook outside the event loop that serves requests, each for a bounded time.

Plain functions run in a few threads, asynchronous ones on an event loop in a thread of their own. A call that is late
is given up at once. One that has not returned HANG_S later hangs: its thread is replaced, and asked to end by an
exception, which reaches Python code but no call into the operating system.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

HANG_S = 1.0  # after its time, or ten times its time where that is longer


class Late(asyncio.TimeoutError):
    """A call has not returned in its time."""


class _Job:
    """One call.

    result: the value and the exception, one of them None; an exception of the call's must not look like one of ours.
    thread: that runs it; None before, and for good if it was given up before. ended: it has returned.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.result: Future[tuple[Any, BaseException | None]] = Future()
        self.thread: threading.Thread | None = None
        self.ended = False

    async def run(self) -> None:
        found: tuple[Any, BaseException | None]
        if self.result.set_running_or_notify_cancel():
            self.thread = threading.current_thread()
            try:
                value = self.function()
                found = await value if inspect.iscoroutine(value) else value, None
            except BaseException as exc:  # SystemExit too, which ends a call that hangs
                found = None, exc
            self.ended = True
            self.result.set_result(found)


class Runner:
    """The threads of one hook, started when it is called and ended with the runner.

    hung: called after each call that did not return. hangs: how many there were.
    """

    def __init__(self, name: str, threads: int, timeout_s: float, hung: Callable[[], None]) -> None:
        self._name, self._size, self._timeout_s, self._hung = f"hook {name}", threads, timeout_s, hung
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._workers: set[threading.Thread] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        self.hangs = 0
        for _ in range(threads):
            weakref.finalize(self, self._queue.put, None)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what the function returns. Raises: what it raises, and Late."""
        job, task = _Job(lambda: function(*arguments)), None
        if inspect.iscoroutinefunction(function):
            task = asyncio.run_coroutine_threadsafe(job.run(), self._event_loop())
        else:
            self._queue.put(job)
            if len(self._workers) < self._size:
                worker = self._thread(_work, self._queue, self._workers)
                self._workers.add(worker)
                worker.start()
        try:
            value, error = await asyncio.wait_for(asyncio.wrap_future(job.result), self._timeout_s)
        except asyncio.TimeoutError:
            raise Late from None
        finally:
            if not job.ended:
                if task is not None:
                    task.cancel()
                grace_s = max(HANG_S, 10 * self._timeout_s)
                asyncio.get_running_loop().call_later(grace_s, self._check, job)
        if error is None:
            return value
        raise error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__} was raised")

    def _check(self, job: _Job) -> None:
        """Give up the thread of a call that has not returned."""
        thread = job.thread
        if job.ended or thread is None or (thread not in self._workers and thread is not self._loop_thread):
            return
        self._workers.discard(thread)
        if thread is self._loop_thread and self._loop is not None:
            _stop(self._loop)
            self._loop = self._loop_thread = None
        assert thread.ident is not None, "it has started"
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        self.hangs += 1
        self._hung()

    def _thread(self, target: Callable[..., None], *arguments: Any) -> threading.Thread:
        return threading.Thread(target=target, args=arguments, name=self._name, daemon=True)

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._loop_thread = self._thread(_serve, self._loop)
            self._loop_thread.start()
            weakref.finalize(self, _stop, self._loop)
        return self._loop


def _work(queue: SimpleQueue[_Job | None], workers: set[threading.Thread]) -> None:
    """Run plain functions until the thread is replaced or the runner is gone."""
    with contextlib.suppress(SystemExit):  # of Runner._check, where the call returned meanwhile
        while threading.current_thread() in workers and (job := queue.get()) is not None:
            with contextlib.suppress(StopIteration):
                job.run().send(None)  # a plain function waits for nothing


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped; what runs on it then is cancelled."""
    with contextlib.suppress(SystemExit):  # as in Runner._check
        loop.run_forever()
    if tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=HANG_S))
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)
