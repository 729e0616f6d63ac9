"""Notices stubs and a tritonserver that still exist but no longer run: stopped, deadlocked, waiting for ever.

Stubs send a heartbeat every second (python_backends/heartbeat.py); tritonserver is asked over HTTP whether it lives.
contract/watchdog.py says when silence means a hang. The engine's worker is its own stub's to watch, which reports here.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from contract.errors import TridentError
from contract.watchdog import Watchdog, cpu_s
from server.admin import fetch
from server.stubs import Stub

LOOK_EVERY_S = 0.5
MAX_BYTES = 4096
CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


def socket_name(control_socket: str) -> str:
    """Name of the abstract unix datagram socket that the stubs send their heartbeats to."""
    return f"{control_socket}-supervisor"


@dataclass
class _Pulse:
    """What a stub's heartbeats said. running: watches that they come; calling: that a call of the model ends."""

    running: Watchdog
    calling: Watchdog
    beats: int = 0
    calls: int = 0
    busy: bool = False


@dataclass
class Heartbeats:
    """The heartbeats of the stubs of one server. To be made in the event loop's thread.

    control_socket: name of the engine's control socket.
    stall_s, limit_s: see contract.watchdog.
    on_engine_hung: called with (pid of the stub, reason) when an engine stub had to kill its worker.

    Raises: OSError if the socket's name is taken.
    """

    control_socket: str
    stall_s: float
    limit_s: float
    on_engine_hung: Callable[[int, str], None]
    _pulses: dict[int, _Pulse] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.bind(f"\0{socket_name(self.control_socket)}")
        except OSError:
            self._socket.close()
            raise
        self._loop.add_reader(self._socket, self._receive)

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def hung(self, stubs: Iterable[Stub]) -> list[tuple[Stub, str]]:
        """Those of the living ``stubs`` that hang, and why. To be called every half second."""
        living = {stub.pid: stub for stub in stubs}
        self._pulses = {pid: pulse for pid, pulse in self._pulses.items() if pid in living}
        found = []
        now_s = time.monotonic()
        for pid, pulse in self._pulses.items():
            used_s = cpu_s(pid)
            silent = pulse.running.look(pulse.beats, True, used_s, now_s)
            stuck = pulse.calling.look(pulse.calls, pulse.busy, used_s, now_s)
            if silent or stuck:
                problem = f"no heartbeat: {silent}" if silent else f"a call does not end: {stuck}"
                found.append((living[pid], problem))
        return found

    def _receive(self) -> None:
        while True:
            try:
                text, ancillary, _, _ = self._socket.recvmsg(MAX_BYTES, socket.CMSG_SPACE(CREDENTIALS.size))
            except BlockingIOError:
                return
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) >= CREDENTIALS.size:
                    pid, uid, _ = CREDENTIALS.unpack_from(data)
                    if uid in (0, os.getuid()):  # anybody may send to an abstract socket
                        self._hear(pid, text.decode(errors="replace"))

    def _hear(self, pid: int, text: str) -> None:
        word, _, rest = text.partition(" ")
        if word == "engine_hung":
            self.on_engine_hung(pid, rest)
        elif word == "end":
            self._pulses.pop(pid, None)
        elif word == "beat":
            calls, _, busy = rest.partition(" ")
            if pid not in self._pulses:
                self._pulses[pid] = _Pulse(Watchdog(self.stall_s, self.limit_s), Watchdog(self.stall_s, self.limit_s))
            pulse = self._pulses[pid]
            pulse.beats += 1
            pulse.calls, pulse.busy = int(calls), busy == "1"


class Responding:
    """Whether a tritonserver still answers ``/v2/health/live``. ``watch`` asks until it is cancelled."""

    def __init__(self, http_url: str, pid: int, stall_s: float, limit_s: float) -> None:
        self._url = f"{http_url}/v2/health/live"
        self._pid = pid
        self._watchdog = Watchdog(stall_s, limit_s)
        self._answers = 0

    async def watch(self) -> None:
        while True:
            try:
                await asyncio.to_thread(fetch, self._url, timeout_s=2.0)
                self._answers += 1
            except TridentError:
                pass  # what counts is that no answer comes for long
            await asyncio.sleep(LOOK_EVERY_S)

    def problem(self) -> str:
        """Why the server counts as hung, or "". To be called every half second."""
        return self._watchdog.look(self._answers, True, cpu_s(self._pid), time.monotonic())
