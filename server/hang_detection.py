"""Detects stubs and a tritonserver that exist but do not run: stopped, deadlocked, or waiting for ever.

Stubs send a heartbeat every second (python_backends/heartbeat.py); tritonserver is polled over HTTP. The engine's stub
watches the engine's worker and reports a hang here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from contract.backend_settings import Settings
from contract.errors import TridentError
from contract.watchdog import Watchdog, cpu_s
from server.admin import fetch
from server.stubs import Stub

POLL_INTERVAL_S = 0.5
MAX_BYTES = 4096
CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


@dataclass
class _StubProgress:
    """One stub: watchdogs of its heartbeats and of its calls; heartbeats received, calls ended, whether in one."""

    heartbeats: Watchdog
    calls: Watchdog
    received: int = 0
    calls_ended: int = 0
    in_call: bool = False


class HeartbeatListener:
    """Receives the heartbeats of one server's stubs. Made in the event loop's thread.

    control_socket: name of the engine's control socket.
    stall_s, limit_s: see contract.watchdog.
    on_engine_hung: called with (pid of the stub, reason) when an engine stub had to kill its worker.
    Raises OSError: the socket's name is taken.
    """

    def __init__(
        self, control_socket: str, stall_s: float, limit_s: float, on_engine_hung: Callable[[int, str], None]
    ) -> None:
        self._stall_s = stall_s
        self._limit_s = limit_s
        self._on_engine_hung = on_engine_hung
        self._progress: dict[int, _StubProgress] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.bind(f"\0{Settings(Path(), control_socket).supervisor_socket}")
        except OSError:
            self._socket.close()
            raise
        asyncio.get_running_loop().add_reader(self._socket, self._receive)

    @property
    def received(self) -> dict[int, int]:
        """Heartbeats received of each stub that sends them, by pid."""
        return {pid: progress.received for pid, progress in self._progress.items()}

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()

    def hung(self, running: Iterable[Stub]) -> list[tuple[Stub, str]]:
        """Return those of the ``running`` stubs that hang, each with the reason. Called every POLL_INTERVAL_S."""
        stubs = {stub.pid: stub for stub in running}
        self._progress = {pid: progress for pid, progress in self._progress.items() if pid in stubs}
        hung = []
        for pid, progress in self._progress.items():
            now_s, used_s = time.monotonic(), cpu_s(pid)  # in this order: CPU used in a pause between them counts
            silent = progress.heartbeats.check(progress.received, True, used_s, now_s)
            stuck = progress.calls.check(progress.calls_ended, progress.in_call, used_s, now_s)
            if silent or stuck:
                hung.append((stubs[pid], f"no heartbeat: {silent}" if silent else f"a call does not end: {stuck}"))
        return hung

    def _receive(self) -> None:
        while True:
            try:
                text, ancillary, _, _ = self._socket.recvmsg(MAX_BYTES, socket.CMSG_SPACE(CREDENTIALS.size))
            except BlockingIOError:
                return
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) >= CREDENTIALS.size:
                    pid, uid, _ = CREDENTIALS.unpack_from(data)
                    if uid in (0, os.getuid()):  # any local user may send to an abstract socket
                        self._handle(pid, text.decode(errors="replace"))

    def _handle(self, pid: int, message: str) -> None:
        kind, _, rest = message.partition(" ")
        if kind == "engine_hung":
            self._on_engine_hung(pid, rest)
        elif kind == "end":
            self._progress.pop(pid, None)
        elif kind == "beat":
            calls, _, in_call = rest.partition(" ")
            if pid not in self._progress:
                heartbeats, calls_end = (Watchdog(self._stall_s, self._limit_s) for _ in range(2))
                self._progress[pid] = _StubProgress(heartbeats, calls_end)
            progress = self._progress[pid]
            progress.received += 1
            progress.calls_ended, progress.in_call = int(calls), in_call == "1"


class HttpWatch:
    """Watches whether the tritonserver ``pid`` answers ``/v2/health/live``. stall_s, limit_s: see contract.watchdog."""

    def __init__(self, http_url: str, pid: int, stall_s: float, limit_s: float) -> None:
        self._url = f"{http_url}/v2/health/live"
        self._pid = pid
        self._watchdog = Watchdog(stall_s, limit_s)
        self._responses = 0

    @property
    def is_silent(self) -> bool:
        """Whether the server has neither answered nor used CPU for some polls, so that it may soon count as hung."""
        return self._watchdog.unused_s >= 2 * POLL_INTERVAL_S

    async def poll(self) -> None:
        """Send requests until cancelled."""
        while True:
            with contextlib.suppress(TridentError):  # problem() measures for how long responses are missing
                await asyncio.to_thread(fetch, self._url, timeout_s=2.0)
                self._responses += 1
            await asyncio.sleep(POLL_INTERVAL_S)

    def problem(self) -> str:
        """Return why the server counts as hung, or "". Called every POLL_INTERVAL_S."""
        return self._watchdog.check(self._responses, True, cpu_s(self._pid), time.monotonic())
