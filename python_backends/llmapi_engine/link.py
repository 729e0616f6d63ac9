"""The LLM in the place of the CPU engine's worker: takes commands, sends step reports, reports its own failure.

One thread runs one event loop: it loads the LLM, reads every sequence in a task of its own and reports each output
when it arrives. ``send`` and ``close`` may be called from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from python_backends.cpu_engine.link import Listener
from python_backends.ensemble.token_increment import StreamEvent
from python_backends.ensemble.worker_messages import AddSequence, EndSequence, StepOutput, StepReport, last_line
from python_backends.llmapi_engine.generation import CompletionReader, Named, cache_usage, generate

_STATS_TIMEOUT_S = 2
_STATS_PAUSE_S = 0.5
_CLOSE_TIMEOUT_S = 30


class LlmLink:
    """One instance of the LLM. ``open_llm`` loads it, in the link's own thread."""

    def __init__(self, open_llm: Callable[[], Any], listener: Listener, named: Named = lambda ids: (ids, {})) -> None:
        self._open_llm = open_llm
        self._named = named
        self._listener = listener
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._generations: dict[int, Any] = {}
        self._without_token: dict[int, int] = {}  # id -> prompt tokens
        self._tasks: set[asyncio.Task[None]] = set()
        self._cache_usage = 0.0
        self._last_ns = time.monotonic_ns()
        self._thread = threading.Thread(target=self._run_thread, name="llm", daemon=True)
        self._thread.start()

    def send(self, command: AddSequence | EndSequence) -> None:
        """Queue a command without blocking; dropped when the LLM has failed, which on_death reports."""
        self._call(self._execute, command)

    def close(self) -> None:
        """Stop the LLM; return when it has freed its GPUs, or after 30 s."""
        self._call(self._closing.set)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and every sequence with it
            self._loop.call_soon_threadsafe(function, *arguments)

    def _run_thread(self) -> None:
        reason = "the LLM was closed"
        try:
            self._loop.run_until_complete(self._run())
        except Exception as exc:  # the thread's outer edge: its owner must know of every failure
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
            for generation in self._generations.values():
                generation.abort()
            for task in (stats, *self._tasks):
                task.cancel()
            await asyncio.gather(stats, *self._tasks, return_exceptions=True)
        finally:
            llm.shutdown()

    def _execute(self, command: AddSequence | EndSequence) -> None:
        if isinstance(command, EndSequence):
            generation = self._generations.get(command.id)
            if generation is not None:
                generation.abort()  # its last output is reported as CANCELLED
            return
        try:
            generation = self._generations[command.id] = generate(self._llm, command, self._named)
        except Exception as exc:  # refused arguments fail this request only
            self._report(StepOutput(command.id, [], [], StreamEvent.ERROR, error=last_line(exc)))
            return
        self._without_token[command.id] = command.input_ids.size
        task = self._loop.create_task(self._follow(command, generation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, command: AddSequence, generation: Any) -> None:
        """Report one sequence's outputs from the first to the last."""
        reader = CompletionReader(command.id, command.sampling)
        ended = False
        try:
            async for result in generation:
                output = reader.read(result.outputs[0])
                if reader.started:
                    self._without_token.pop(command.id, None)
                ended = output.event.last
                if ended:
                    self._remove(command.id)
                if ended or output.token_ids:
                    self._report(output)
            if not ended:  # an aborted sequence may end without a last output
                self._remove(command.id)
                self._report(StepOutput(command.id, [], [], StreamEvent.CANCELLED))
        except Exception as exc:  # a failed output ends this sequence only
            self._remove(command.id)
            if not ended:
                self._report(StepOutput(command.id, [], [], StreamEvent.ERROR, error=last_line(exc)))

    def _remove(self, id: int) -> None:
        self._generations.pop(id, None)
        self._without_token.pop(id, None)

    def _report(self, output: StepOutput) -> None:
        start_ns, self._last_ns = self._last_ns, time.monotonic_ns()
        waiting = self._without_token
        self._listener.on_report(
            StepReport(
                start_ns,
                self._last_ns,
                [output],
                scheduled=len(self._generations),
                context=len(waiting),
                context_tokens=sum(waiting.values()),
                cache_usage=self._cache_usage,
            )
        )

    async def _follow_stats(self, llm: Any) -> None:
        while True:
            async for stats in llm.get_stats_async(_STATS_TIMEOUT_S):
                self._cache_usage = cache_usage(stats)
            await asyncio.sleep(_STATS_PAUSE_S)
