"""tritonserver as a process: started under its keeper, its exit an awaitable, its end certain."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from contract.errors import EngineFailed
from server.settings import ROOT

KEEPER = Path(__file__).with_name("keeper.py")


def is_alive(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def zombies_of(parent: int) -> list[int]:
    """Pids of the children of ``parent`` that have ended and that it has not waited for."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_bytes().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] == b"Z" and int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return found


def kill(pid: int) -> None:
    """SIGKILL, which ends a stopped process too; nothing if it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Server:
    """One life of a tritonserver. ``pid`` is tritonserver's; ``exited`` resolves to its exit code
    (128 + n for signal n) once it and every process that descends from it are gone."""

    def __init__(self, keeper: subprocess.Popen[bytes], pid: int) -> None:
        self.pid = pid
        self._keeper = keeper
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(keeper.pid)
        self._loop.add_reader(self._pidfd, self._on_keeper_exit)

    @classmethod
    def start(cls, command: Sequence[str], environ: Mapping[str, str], log: Path, shm_prefix: str) -> Server:
        """Starts ``command`` and appends its output to ``log``; ``shm_prefix`` starts the names of its /dev/shm files.

        To be called from the loop's thread.
        """
        with log.open("ab") as output:
            keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(KEEPER), shm_prefix, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=dict(environ),
                # The stubs' interpreter is isolated: it ignores PYTHONPATH and finds our packages from here.
                cwd=ROOT,
                start_new_session=True,  # a Ctrl-C in the terminal is for the supervisor alone
            )
        # Blocks for the start of a bare interpreter; awaiting it could be cancelled and would lose the process.
        line = keeper.stdout.readline()
        if not line.strip().isdigit():
            raise EngineFailed(
                f"the keeper of tritonserver ended with code {keeper.wait()} before it started it; see {log}"
            )
        return cls(keeper, int(line))

    def terminate(self) -> None:
        """Asks tritonserver to stop by itself."""
        if not self.exited.done():
            os.kill(self.pid, signal.SIGTERM)

    async def kill(self) -> int:
        """Ends tritonserver and all that descends from it, now; returns its exit code when nothing is left."""
        self._keeper.stdin.close()  # the keeper's sign; it knows every descendant, whatever its process group
        if not self.exited.done():
            self._keeper.send_signal(signal.SIGCONT)  # should it have been stopped
        return await asyncio.shield(self.exited)

    def _on_keeper_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._keeper.wait()
        self._keeper.stdin.close()
        self._keeper.stdout.close()
        if code == -signal.SIGKILL:
            # Somebody killed the keeper itself. tritonserver dies with it; its process group is ours to end.
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            code = 128 + signal.SIGKILL
        if not self.exited.done():
            self.exited.set_result(code)
