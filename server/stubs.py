"""Stub processes, in which Triton runs Python models: finds them, and reports an exit within milliseconds.

Triton 2.51 neither restarts a stub that exited nor stops reporting the server as ready.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from server import process

EXECUTABLE = "triton_python_backend_stub"


@dataclass(frozen=True)
class Stub:
    """One stub process. started: in clock ticks since boot, which tells processes with a reused pid apart."""

    pid: int
    model: str
    instance: str
    started: int


def find(server_pid: int) -> list[Stub]:
    """Return the running stubs of the tritonserver ``server_pid``, sorted by instance name."""
    found = []
    for candidate in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it exited, or belongs to another user
            # STUB MODEL_DIR/1/model.py SHM_REGION SHM_SIZE SHM_GROWTH SERVER_PID BACKEND_DIR HANDLE INSTANCE RUNTIME
            argv = candidate.cmdline()
            if len(argv) < 9 or Path(argv[0]).name != EXECUTABLE or argv[5] != str(server_pid):
                continue
            started = process.start_ticks(candidate.pid)
            if started is not None:
                found.append(Stub(candidate.pid, Path(argv[1]).parents[1].name, argv[8], started))
    return sorted(found, key=lambda stub: (stub.instance, stub.started))


def is_replaced(stub: Stub, running: Iterable[Stub]) -> bool:
    """Return whether the same instance runs in a younger process, because its model was reloaded."""
    return any(other.instance == stub.instance and other.started > stub.started for other in running)


class ExitWatcher:
    """Calls ``on_exit(stub)`` once for every watched stub that exits, unless it is removed before."""

    def __init__(self, on_exit: Callable[[Stub], None]) -> None:
        self._on_exit = on_exit
        self._forget: dict[Stub, Callable[[], None]] = {}

    @property
    def watched(self) -> list[Stub]:
        return list(self._forget)

    def add(self, stubs: Iterable[Stub]) -> None:
        """Watch those of ``stubs`` that are not watched yet."""
        for stub in stubs:
            if stub in self._forget:
                continue
            try:
                self._forget[stub] = process.on_exit(stub.pid, partial(self._report, stub))
            except ProcessLookupError:
                asyncio.get_running_loop().call_soon(self._on_exit, stub)

    def remove(self, stubs: Iterable[Stub]) -> None:
        """Stop watching ``stubs``."""
        for stub in stubs:
            if forget := self._forget.pop(stub, None):
                forget()

    def close(self) -> None:
        self.remove(self.watched)

    def _report(self, stub: Stub) -> None:
        del self._forget[stub]
        self._on_exit(stub)
