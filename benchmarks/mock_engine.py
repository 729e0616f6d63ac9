"""The engine with a worker that computes nothing: a token for every sequence at a fixed pace, the prompt's ids again.

textbook_cost.py puts it into a copy of ``model_repository``; everything around the worker is what is served.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from python_backends.cpu_engine import model
from python_backends.cpu_engine.link import Listener
from python_backends.ensemble.token_increment import StreamEvent
from python_backends.ensemble.worker_messages import AddSequence, EndSequence, StepOutput, StepReport


def steps(busy: Callable[[], bool]) -> Iterator[None]:
    """Yield at every step, ``MOCK_STEP_MS`` apart (0: as soon as the last one is done), while there is work."""
    step_s, due_s = float(os.environ["MOCK_STEP_MS"]) / 1e3, 0.0
    while True:
        if not busy():
            time.sleep(0.002)
            continue
        now_s = time.monotonic()
        due_s = max(due_s + step_s, now_s)
        time.sleep(due_s - now_s)
        yield


class MockLink:
    """In the place of ``WorkerLink``."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._left: dict[int, tuple[list[int], int]] = {}  # id -> the prompt's ids, tokens left
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, command: AddSequence | EndSequence) -> None:
        if isinstance(command, AddSequence):
            self._left[command.id] = command.input_ids.tolist(), command.max_tokens
        elif command.id in self._left:
            self._left[command.id] = [], 0

    def close(self) -> None:
        """Nothing to stop: the thread ends with the stub."""

    def _run(self) -> None:
        self._listener.on_ready()
        last_ns = time.monotonic_ns()
        for _ in steps(lambda: bool(self._left)):
            outputs = [self._output(id, *left) for id, left in list(self._left.items())]
            start_ns, last_ns = last_ns, time.monotonic_ns()
            self._listener.on_report(StepReport(start_ns, last_ns, outputs, scheduled=len(outputs)))

    def _output(self, id: int, ids: list[int], left: int) -> StepOutput:
        if left > 1:
            self._left[id] = ids, left - 1
            return StepOutput(id, [ids[left % len(ids)]], [], StreamEvent.RUNNING)
        del self._left[id]
        return StepOutput(id, ids[:left], [], StreamEvent.LENGTH if left else StreamEvent.CANCELLED)


class TritonPythonModel(model.TritonPythonModel):
    def open_link(self, engine_dir: Path, listener: Listener) -> MockLink:
        return MockLink(listener)
