"""The command a server was started for: ``python -m server -- COMMAND``. It runs in the terminal like any other."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

# PR_SET_PDEATHSIG, then the command in its place: when we are killed, it is told to terminate.
LEASH = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 15)\n"
    "os.getppid() == int(sys.argv[1]) or sys.exit(143)\n"
    "os.execvp(sys.argv[2], sys.argv[2:])\n"
)
NOTICE_S = 1.0  # to end by itself: a Ctrl-C in the terminal reaches it, too
OBEY_S = 5.0  # to end when it was told to


def leashed(command: Sequence[str]) -> list[str]:
    """``command`` so that it gets SIGTERM when this process ends, however it ends."""
    return [sys.executable, "-I", "-S", "-c", LEASH, str(os.getpid()), *command]


class Tenant:
    """``command`` with ``offered`` added to our environment. Calls ``on_end`` once, when it has ended.

    drain_s: how long it may take to end once it was told to, beyond OBEY_S.
    """

    def __init__(
        self, command: Sequence[str], offered: Mapping[str, str], on_end: Callable[[], None], drain_s: float = 0.0
    ) -> None:
        self._drain_s = drain_s
        self._process = subprocess.Popen(leashed(command), env={**os.environ, **offered})
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._on_exit)

    async def evict(self) -> int:
        """Its exit code; if it still runs, after a moment to notice Ctrl-C by itself, SIGTERM and SIGKILL."""
        for patience_s, signal_number in ((NOTICE_S, signal.SIGTERM), (OBEY_S + self._drain_s, signal.SIGKILL)):
            await asyncio.wait({self._ended}, timeout=patience_s)
            if not self._ended.done():
                self._process.send_signal(signal_number)
        return await self._ended

    def kill(self) -> None:
        if not self._ended.done():
            self._process.kill()

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()
        self._ended.set_result(code if code >= 0 else 128 - code)
        self._on_end()
