"""Processes: tritonserver under its reaper, and what the supervisor needs to know of a pid."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from contract.errors import EngineFailed
from server.settings import ROOT

REAPER = Path(__file__).with_name("reaper.py")


def is_running(pid: int) -> bool:
    """Return whether ``pid`` runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def zombie_children(parent: int) -> list[int]:
    """Return the pids of the children of ``parent`` that have exited and that it has not waited for."""
    try:
        children = psutil.Process(parent).children()
    except psutil.NoSuchProcess:
        return []
    return [child.pid for child in children if not is_running(child.pid)]


def exit_code(pid: int) -> int | None:
    """Return the exit code (128 + n: signal n) of a zombie; None if ``pid`` is not one."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        state, *_, status = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        if state in b"ZX":
            code = os.waitstatus_to_exitcode(int(status))
            return code if code >= 0 else 128 - code
    return None


def start_ticks(pid: int) -> int | None:
    """Return when ``pid`` started, in clock ticks since boot; None if there is no such process.

    Unlike psutil's create_time it does not change with the system clock, so processes can compare it.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def kill(pid: int) -> None:
    """Send SIGKILL, which ends a stopped process too; do nothing if ``pid`` has exited."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def on_exit(pid: int, callback: Callable[[], object]) -> Callable[[], None]:
    """Call ``callback`` once in the event loop when ``pid`` has exited; the function returned prevents that.

    It may be a zombie then, which no process has waited for. Raises ProcessLookupError: there is no such process.
    """
    loop, pidfd = asyncio.get_running_loop(), os.pidfd_open(pid)

    def forget() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)

    def exited() -> None:
        forget()
        callback()

    loop.add_reader(pidfd, exited)
    return forget


class TritonProcess:
    """One run of tritonserver. exited: resolves to its exit code (128 + n: signal n) when no descendant is left."""

    def __init__(self, reaper: subprocess.Popen[bytes], pid: int) -> None:
        assert reaper.stdin is not None and reaper.stdout is not None
        self.pid = pid
        self._reaper, self._stdin, self._stdout = reaper, reaper.stdin, reaper.stdout
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        on_exit(reaper.pid, self._on_reaper_exit)

    @classmethod
    def start(cls, command: Sequence[str], environ: Mapping[str, str], log: Path, shm_prefix: str) -> TritonProcess:
        """Start ``command``, whose output is appended to ``log``. Raises EngineFailed: the reaper could not."""
        with log.open("ab") as output:
            reaper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(REAPER), shm_prefix, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=dict(environ),
                # The stubs' interpreter is isolated: it ignores PYTHONPATH and finds our packages from here.
                cwd=ROOT,
                start_new_session=True,  # a Ctrl-C in the terminal is for the supervisor alone
            )
        assert reaper.stdout is not None
        # Blocks while a bare interpreter starts; awaiting it could be cancelled and would leak the process.
        line = reaper.stdout.readline()
        if not line.strip().isdigit():
            reaper.communicate()
            raise EngineFailed(f"the reaper of tritonserver exited with code {reaper.returncode}; see {log}")
        return cls(reaper, int(line))

    def terminate(self) -> None:
        """Send SIGTERM to tritonserver."""
        if not self.exited.done():
            os.kill(self.pid, signal.SIGTERM)

    async def kill(self) -> int:
        """Kill tritonserver and all its descendants; return its exit code once they have exited."""
        self._stdin.close()  # makes the reaper kill all descendants, whatever their process group
        if not self.exited.done():
            self._reaper.send_signal(signal.SIGCONT)  # it may have been stopped
        return await asyncio.shield(self.exited)

    def _on_reaper_exit(self) -> None:
        code = self._reaper.wait()
        self._stdin.close()
        self._stdout.close()
        if code == -signal.SIGKILL:
            # The reaper itself was killed. tritonserver dies with it; the rest of its process group is killed here.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            code = 128 + signal.SIGKILL
        if not self.exited.done():
            self.exited.set_result(code)
