"""The LLM as the engine sees its worker: commands in, step reports out, its death noticed.

One thread runs one event loop: it loads the LLM, follows every sequence in a task of its own and reports each answer
as it comes. ``send`` and ``close`` may be called from any thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from python_backends.cpu_engine.link import Listener
from python_backends.ensemble.stream_state import StreamEvent
from python_backends.ensemble.worker_messages import AddSequence, EndSequence, StepOutput, StepReport
from python_backends.llmapi_engine.generation import Reading, cache_usage, generate

_STATS_TIMEOUT_S = 2
_STATS_PAUSE_S = 0.5
_CLOSE_TIMEOUT_S = 30


class LlmLink:
    """One life of the LLM. ``open_llm`` loads it, in the link's own thread."""

    def __init__(self, open_llm: Callable[[], object], listener: Listener) -> None:
        self._open_llm = open_llm
        self._listener = listener
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._answers: dict[int, object] = {}
        self._without_token: dict[int, int] = {}  # id -> prompt tokens
        self._tasks: set[asyncio.Task] = set()
        self._cache_usage = 0.0
        self._last_ns = time.monotonic_ns()
        self._thread = threading.Thread(target=self._live, name="llm", daemon=True)
        self._thread.start()

    def send(self, command: AddSequence | EndSequence) -> None:
        """Never blocks; silent when the LLM is dead, because on_death tells."""
        self._call(self._obey, command)

    def close(self) -> None:
        """Returns when the LLM has let go of its GPUs, or after thirty seconds."""
        self._call(self._closing.set)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _call(self, function: Callable, *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            pass  # the loop has ended, and with it every sequence

    def _live(self) -> None:
        reason = "the LLM was closed"
        try:
            self._loop.run_until_complete(self._run())
        except Exception as exc:  # the thread's outer edge: whatever ended it, its owner must hear of it
            reason = f"the LLM failed: {exc}"
        finally:
            self._loop.close()
        self._listener.on_death(reason)

    async def _run(self) -> None:
        llm = self._open_llm()
        self._llm = llm
        try:
            self._listener.on_ready()
            stats = asyncio.create_task(self._follow_stats(llm))
            await self._closing.wait()
            for answer in self._answers.values():
                answer.abort()
            for task in (stats, *self._tasks):
                task.cancel()
            await asyncio.gather(stats, *self._tasks, return_exceptions=True)
        finally:
            llm.shutdown()

    def _obey(self, command: AddSequence | EndSequence) -> None:
        if isinstance(command, EndSequence):
            answer = self._answers.get(command.id)
            if answer is not None:
                answer.abort()  # its last output is reported as CANCELLED
            return
        try:
            answer = self._answers[command.id] = generate(self._llm, command)
        except Exception as exc:  # it refuses arguments at once; one request's fault is not the others'
            self._report(StepOutput(command.id, [], [], StreamEvent.ERROR, rejected=_last_line(exc)))
            return
        self._without_token[command.id] = command.input_ids.size
        task = self._loop.create_task(self._follow(command, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, command: AddSequence, answer) -> None:
        """One sequence from its first answer to its last."""
        reading = Reading(command.id, command.sampling)
        ended = False
        try:
            async for result in answer:
                output = reading.output(result.outputs[0])
                if reading.begun:
                    self._without_token.pop(command.id, None)
                ended = output.event.last
                if ended:
                    self._forget(command.id)
                if ended or output.token_ids:
                    self._report(output)
            if not ended:  # an aborted sequence may just stop answering
                self._forget(command.id)
                self._report(StepOutput(command.id, [], [], StreamEvent.CANCELLED))
        except Exception as exc:  # one sequence's fault is not the others'
            self._forget(command.id)
            if not ended:
                self._report(StepOutput(command.id, [], [], StreamEvent.ERROR, rejected=_last_line(exc)))

    def _forget(self, id: int) -> None:
        self._answers.pop(id, None)
        self._without_token.pop(id, None)

    def _report(self, output: StepOutput) -> None:
        start_ns, self._last_ns = self._last_ns, time.monotonic_ns()
        waiting = self._without_token
        self._listener.on_report(
            StepReport(
                start_ns,
                self._last_ns,
                [output],
                scheduled=len(self._answers),
                context=len(waiting),
                context_tokens=sum(waiting.values()),
                cache_usage=self._cache_usage,
            )
        )

    async def _follow_stats(self, llm) -> None:
        while True:
            async for stats in llm.get_stats_async(_STATS_TIMEOUT_S):
                self._cache_usage = cache_usage(stats)
            await asyncio.sleep(_STATS_PAUSE_S)


def _last_line(exc: Exception) -> str:
    return (str(exc).strip().splitlines() or [repr(exc)])[-1]
