"""Checks guides in a process of its own, one after the other, and remembers the results.

No request without a guide waits for it, and none of its faults reaches a stream: a check that takes too long is
killed, and a process that was killed from outside is started again. What is no fault of the guide is Overloaded, never
Unavailable: a gateway would take the replica out, for all its requests.
"""

from __future__ import annotations

import math
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair

from contract.backend_settings import Settings
from contract.errors import InvalidArgument, Overloaded, TridentError, Unavailable
from contract.generation import Guide
from contract.manifest import EngineManifest
from contract.watchdog import cpu_s

# What grammars are compiled with, in an engine's folder: a model without weights of a CPU engine
# (build/model/detokenizer.py), or the file that TensorRT-LLM loads (vocabulary.py).
GRAMMAR_CHECKER = "grammar_checker"
TOKENIZER_INFO = "xgrammar_tokenizer_info.json"
_COST_KEPT_S = 60.0
NO_VOCABULARY = "must be left out: this engine was built without the vocabulary that a grammar needs; build it again"
_START_S = 60.0
_POLL_S = 0.05
_BUSY_FACTOR = 4
_MOST_WAITING = 256
_MOST_KEPT_BYTES = 32 * 1024 * 1024
_CRASHES = 2  # of one grammar, until it is refused
_ATTEMPTS = 4  # a process that does not start, or was killed from outside, only delays
_EXIT_S = 5.0  # which a process that closed its connection has to end; some write a core file

Result = Guide | TridentError
OnResult = Callable[[Result], None]
Needed = Callable[[], bool]


@dataclass(frozen=True)
class Check:
    """One guide to check. The compiler's process answers with the Guide as the engine compiles it, or InvalidArgument.

    end_id: an id that ends the model's texts.
    stall_s: the longest time that compiling it, or one of its tokens, may hold up an engine.
    """

    guide: Guide
    end_id: int
    stall_s: float


def costly(problem: str) -> InvalidArgument:
    """Return the refusal of a guide for what it takes; checked again later, when this machine may be less busy."""
    error = InvalidArgument("guided_decoding_guide", problem)
    error.retry_after_s = _COST_KEPT_S
    return error


class GrammarChecker:
    """Results by guide, kept until they fill 32 MB. The process is started with the first guide."""

    def __init__(self, folder: Path, end_id: int, timeout_s: float, stall_s: float, max_waiting: int) -> None:
        """
        folder: the engine's GRAMMAR_CHECKER, or its file TOKENIZER_INFO.
        timeout_s: seconds of the CPU for one check. end_id, stall_s: see Check.
        max_waiting: requests that may wait for their guides.
        """
        self._folder, self._end_id, self._timeout_s, self._stall_s = folder, end_id, timeout_s, stall_s
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._kept: OrderedDict[Guide, tuple[Result, float]] = OrderedDict()  # and until when, as time.monotonic()
        self._kept_bytes = 0
        self._waiting: dict[Guide, list[tuple[OnResult, Needed]]] = {}
        self._queue: queue.SimpleQueue[Guide | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="grammar-checker", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, settings: Settings, manifest: EngineManifest) -> GrammarChecker | None:
        """Return the checker of an engine, None for one without the vocabulary that a grammar needs."""
        names = (GRAMMAR_CHECKER, TOKENIZER_INFO)
        found = next((path for name in names if (path := settings.engine_dir / name).exists()), None)
        if found is None:
            return None
        limits = settings.grammar_timeout_s, settings.grammar_stall_s, settings.max_waiting
        return cls(found, manifest.eos_token_ids[0], *limits)

    def check(self, guide: Guide, on_result: OnResult, needed: Needed = lambda: True) -> None:
        """Call ``on_result`` once with the guide to generate with, or why there is none: now if it is known, else from
        the checker's thread, which it must not end with an exception.

        needed: whether the request still waits; a guide for which none does may be left out, without a call.
        Raises Overloaded: too many guides wait to be checked, or too many requests for them.
        Raises Unavailable: the checker is closed.
        """
        with self._lock:
            if self._closed:
                raise Unavailable("the server is shutting down")
            result = self._known(guide)
            if result is None:
                if sum(map(len, self._waiting.values())) >= self._max_waiting:
                    raise Overloaded(f"queue full: {self._max_waiting} requests wait for grammars to be compiled")
                if guide not in self._waiting:
                    if len(self._waiting) >= _MOST_WAITING:
                        raise Overloaded(f"{_MOST_WAITING} grammars wait to be compiled")
                    self._waiting[guide] = []
                    self._queue.put(guide)
                self._waiting[guide].append((on_result, needed))
                return
        on_result(result)

    def close(self) -> None:
        """Kill the process; guides that wait get Unavailable."""
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            process.kill()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (guide := self._queue.get()) is not None:
            with self._lock:
                if not any(needed() for _, needed in self._waiting[guide]):
                    del self._waiting[guide]
                    continue
            result = self._check(guide)
            with self._lock:
                if isinstance(result, Guide | InvalidArgument):
                    self._keep(guide, result)
                requests = self._waiting.pop(guide)
            for on_result, _ in requests:
                on_result(result)
        self._end_process()

    def _known(self, guide: Guide) -> Result | None:
        result, until_s = self._kept.pop(guide, (None, 0.0))
        if result is not None and time.monotonic() < until_s:
            self._kept[guide] = result, until_s  # the newest
            return result
        self._kept_bytes -= _size(guide, result) if result else 0
        return None

    def _keep(self, guide: Guide, result: Result) -> None:
        kept_s = None if isinstance(result, Guide) else result.retry_after_s
        self._kept[guide] = result, math.inf if kept_s is None else time.monotonic() + kept_s
        self._kept_bytes += _size(guide, result)
        while self._kept_bytes > _MOST_KEPT_BYTES:
            oldest, (result, _) = self._kept.popitem(last=False)
            self._kept_bytes -= _size(oldest, result)

    def _check(self, guide: Guide) -> Result:
        crashes = 0
        for _ in range(_ATTEMPTS):
            started = False
            try:
                connection = self._start()
                started = True
                connection.send(Check(guide, self._end_id, self._stall_s))
                if (late := self._wait(connection)) is not None:
                    self._end_process()
                    return late
                result: Result = connection.recv()
                return result
            except (EOFError, OSError):
                status = self._end_process(_EXIT_S)
                crashes += started and status != -signal.SIGKILL
                if self._closed:
                    return Unavailable("the server is shutting down")
                if crashes == _CRASHES:
                    problem = "must be a grammar that compiles, got one that ends the compiler"
                    return InvalidArgument("guided_decoding_guide", problem)
        return Overloaded(f"the process that compiles grammars did not start or was killed, {_ATTEMPTS} times")

    def _wait(self, connection: Connection) -> TridentError | None:
        """Return None once there is a result, or an error once the time is up; on a busy machine that takes longer."""
        pid = self._process.pid if self._process else -1
        end_s, before_s = time.monotonic() + _BUSY_FACTOR * self._timeout_s, cpu_s(pid) or 0.0
        while not connection.poll(_POLL_S):
            if (cpu_s(pid) or 0.0) - before_s > self._timeout_s:
                problem = f"must compile within {self._timeout_s:g} s, got one that takes longer"
                return costly(problem)
            if time.monotonic() > end_s:
                return Overloaded("this machine is too busy to compile a grammar")
        return None

    def _start(self) -> Connection:
        """Raises OSError, EOFError: it does not start."""
        if self._connection is not None:
            return self._connection
        ours, theirs = socketpair()
        self._connection = Connection(ours.detach())
        with theirs:
            command = [sys.executable, "-m", "python_backends.grammar.compiler", str(theirs.fileno())]
            command.append(str(self._folder))
            with self._lock:
                if self._closed:
                    raise EOFError
                self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        end_s = time.monotonic() + _START_S
        while not self._connection.poll(_POLL_S):
            if time.monotonic() > end_s:
                raise OSError("the grammar compiler does not start")
        self._connection.recv()
        return self._connection

    def _end_process(self, exit_s: float = 0.0) -> int | None:
        """Kill the process if it still runs after so long; return its exit status, None if there is no process."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return None
        with suppress(subprocess.TimeoutExpired):
            return process.wait(exit_s)
        process.kill()
        return process.wait()


def _size(guide: Guide, result: Result) -> int:
    return 1000 + 4 * len(guide.text) + 4 * (len(result.text) if isinstance(result, Guide) else 0)
