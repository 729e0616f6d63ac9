"""The engine's connection to its worker process: start it, send commands, receive reports, detect its end."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from typing import Protocol

from contract import thread_dump
from contract.watchdog import Watchdog, cpu_s
from python_backends.ensemble.worker_messages import AddSequence, EndSequence, Failed, Ready, StepReport

_EXIT_TIMEOUT_S = 5  # for a worker that has closed its connection
_CHECK_EVERY_S = 0.25
_DUMP_S = 0.1  # for a signal to be handled


class Listener(Protocol):
    """Called from the link's own thread; ``on_death`` exactly once and last."""

    def on_ready(self) -> None: ...

    def on_report(self, report: StepReport) -> None: ...

    def on_death(self, reason: str) -> None: ...


class WorkerLink:
    """One worker process.

    It ends when the link is closed, when this process ends, or when it hangs. A worker with live sequences sends a
    report per step. If it sends none, it is killed once ``watchdog`` counts it as hung; ``on_hang`` is then called with
    the reason, after the listener's ``on_death``.
    """

    def __init__(
        self,
        engine_dir: Path,
        listener: Listener,
        watchdog: Watchdog | None = None,
        on_hang: Callable[[str], None] = lambda reason: None,
    ) -> None:
        ours, theirs = socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "python_backends.cpu_engine.worker", str(theirs.fileno()), str(engine_dir)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())
        self._listener = listener
        self._commands: queue.SimpleQueue[AddSequence | EndSequence | None] = queue.SimpleQueue()
        self._live: set[int] = set()  # sequences that the worker has not ended
        self._reports = 0
        self._ready = False
        self._hung = ""  # why the worker was killed as hung
        self._over = threading.Event()
        self._watchdog = watchdog or Watchdog()
        self._on_hang = on_hang
        threading.Thread(target=self._watch, name="engine-watch", daemon=True).start()
        threading.Thread(target=self._send, name="engine-commands", daemon=True).start()
        threading.Thread(target=self._receive, name="engine-reports", daemon=True).start()

    def send(self, command: AddSequence | EndSequence) -> None:
        """Queue a command without blocking; dropped when the worker is dead, which on_death reports."""
        if isinstance(command, AddSequence):
            self._live.add(command.id)
        self._commands.put(command)

    def _watch(self) -> None:
        """Kill the worker when it makes no step although it has sequences."""
        while not self._over.wait(_CHECK_EVERY_S):
            working = self._ready and bool(self._live)
            used_s = cpu_s(self._process.pid) if working else None
            problem = self._watchdog.check(self._reports, working, used_s, time.monotonic())
            if problem:
                self._hung = f"the engine process hung with {len(self._live)} requests ({problem}) and was killed"
                thread_dump.write()  # to the log, of this process and the worker
                if thread_dump.request(self._process.pid):
                    time.sleep(_DUMP_S)
                self._process.kill()
                return

    def _send(self) -> None:
        while (command := self._commands.get()) is not None:
            try:
                self._connection.send(command)
            except OSError:
                return

    def _receive(self) -> None:
        reason = ""
        try:
            while True:
                message = self._connection.recv()
                if isinstance(message, StepReport):
                    self._reports += 1
                    self._live.difference_update(output.id for output in message.outputs if output.event.last)
                    self._listener.on_report(message)
                elif isinstance(message, Ready):
                    self._ready = True
                    self._listener.on_ready()
                elif isinstance(message, Failed):
                    reason = message.reason
        except (EOFError, OSError):
            pass  # the worker ended, perhaps within a message
        except Exception as exc:  # the thread's outer edge: a worker whose reports are not read must not run on
            reason = f"its report could not be processed: {exc!r}"
            self._process.kill()
        self._over.set()
        self._commands.put(None)
        code = self._exit_code()
        if self._hung:
            self._listener.on_death(self._hung)
            self._on_hang(self._hung)
            return
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        self._listener.on_death(f"the engine process {how}" + (f": {reason}" if reason else ""))

    def _exit_code(self) -> int:
        try:
            return self._process.wait(timeout=_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def close(self) -> None:
        """Kill the worker, which keeps no state; return when it has ended."""
        self._process.kill()
        self._process.wait()
