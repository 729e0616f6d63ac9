"""The command of ``python -m server -- COMMAND``: runs beside the server and ends with the supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from server import process

# Sets PR_SET_PDEATHSIG to SIGTERM, then executes the command in its place.
PDEATHSIG_WRAPPER = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 15)\n"
    "os.getppid() == int(sys.argv[1]) or sys.exit(143)\n"
    "os.execvp(sys.argv[2], sys.argv[2:])\n"
)
INTERRUPT_GRACE_S = 1.0  # before SIGTERM: a Ctrl-C in the terminal reaches the command, too
TERM_GRACE_S = 5.0  # between SIGTERM and SIGKILL


def with_parent_death_signal(command: Sequence[str]) -> list[str]:
    """Return argv that runs ``command`` and sends it SIGTERM when this process ends, however it ends."""
    return [sys.executable, "-I", "-S", "-c", PDEATHSIG_WRAPPER, str(os.getpid()), *command]


class ChildCommand:
    """A running child process.

    command: argv.
    variables: added to this process's environment.
    on_exit: called once in the event loop when the command has exited.
    drain_s: seconds between SIGTERM and SIGKILL, beyond TERM_GRACE_S.
    """

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], on_exit: Callable[[], None], drain_s: float = 0.0
    ) -> None:
        self._drain_s = drain_s
        self._process = subprocess.Popen(with_parent_death_signal(command), env={**os.environ, **variables})
        self._on_exit = on_exit
        self._exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        process.on_exit(self._process.pid, self._reap)

    async def terminate(self) -> int:
        """Wait for the command, send SIGTERM and then SIGKILL if it does not exit; return its exit code."""
        for grace_s, signal_number in (
            (INTERRUPT_GRACE_S, signal.SIGTERM),
            (TERM_GRACE_S + self._drain_s, signal.SIGKILL),
        ):
            await asyncio.wait({self._exited}, timeout=grace_s)
            if not self._exited.done():
                self._process.send_signal(signal_number)
        return await self._exited

    def kill(self) -> None:
        """Send SIGKILL if the command still runs."""
        if not self._exited.done():
            self._process.kill()

    def _reap(self) -> None:
        code = self._process.wait()
        self._exited.set_result(code if code >= 0 else 128 - code)
        self._on_exit()
