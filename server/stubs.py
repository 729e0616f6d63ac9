"""The processes that run the Python models: found in /proc, their deaths seen within milliseconds.

Triton 2.51 neither restarts a dead stub nor stops saying it is ready, so somebody must look.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

EXECUTABLE = "triton_python_backend_stub"


@dataclass(frozen=True)
class Stub:
    """One stub process. ``started`` is its start time in clock ticks since boot, which tells pids apart."""

    pid: int
    model: str
    instance: str
    started: int


def find(server_pid: int, proc: Path = Path("/proc")) -> list[Stub]:
    """The living stubs of the tritonserver ``server_pid``, by instance name."""
    found = []
    for process in proc.glob("[0-9]*"):
        try:
            stub = _read(process, server_pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if stub is not None:
            found.append(stub)
    return sorted(found, key=lambda stub: (stub.instance, stub.started))


def replaced(dead: Stub, living: Iterable[Stub]) -> bool:
    """Whether ``dead`` went because its model was loaded anew: the same instance runs again, in a younger process."""
    return any(stub.instance == dead.instance and stub.started > dead.started for stub in living)


class Watch:
    """Calls ``on_death(stub)`` once for every watched stub that ends, unless it is forgotten first."""

    def __init__(self, on_death: Callable[[Stub], None]) -> None:
        self._on_death = on_death
        self._pidfds: dict[Stub, int] = {}
        self._loop = asyncio.get_running_loop()

    @property
    def watched(self) -> list[Stub]:
        return list(self._pidfds)

    def add(self, stubs: Iterable[Stub]) -> None:
        """Watches those of ``stubs`` that are not watched yet."""
        for stub in stubs:
            if stub in self._pidfds:
                continue
            try:
                pidfd = os.pidfd_open(stub.pid)
            except ProcessLookupError:
                self._loop.call_soon(self._on_death, stub)
                continue
            # Readable from the moment the process ends, also while it is a zombie nobody waits for.
            self._pidfds[stub] = pidfd
            self._loop.add_reader(pidfd, self._ended, stub)

    def forget(self, stubs: Iterable[Stub]) -> None:
        """Deaths of ``stubs`` are no longer news."""
        for stub in stubs:
            pidfd = self._pidfds.pop(stub, None)
            if pidfd is not None:
                self._loop.remove_reader(pidfd)
                os.close(pidfd)

    def close(self) -> None:
        self.forget(self.watched)

    def _ended(self, stub: Stub) -> None:
        self.forget([stub])
        self._on_death(stub)


def _read(process: Path, server_pid: int) -> Stub | None:
    # stub MODEL_DIR/1/model.py SHM_REGION SHM_SIZE SHM_GROWTH SERVER_PID BACKEND_DIR HANDLE INSTANCE RUNTIME
    argv = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    if len(argv) < 9 or Path(argv[0]).name != EXECUTABLE or argv[5] != str(server_pid):
        return None
    started = int((process / "stat").read_bytes().rpartition(b")")[2].split()[19])
    return Stub(int(process.name), Path(argv[1]).parents[1].name, argv[8], started)
