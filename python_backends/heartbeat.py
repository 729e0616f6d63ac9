"""Heartbeats of a stub to the supervisor: once a second that it runs, and how many calls of its model have ended.

The supervisor treats a stub without heartbeats, or with a call that does not end, as hung (server/hang_detection.py).
Without a supervisor there is no socket and nothing is sent. A datagram is ``beat <calls> <0|1: call under way>``,
``engine_hung <reason>``, or ``end`` when the model is unloaded; the kernel adds the sender's pid.

A stub that was stopped within a call, with its machine or alone, exits. Triton's Python backend fails the requests of a
call once the stub has not run for a second of wall-clock time, and frees their memory. A stub that returned from the
call all the same would leave a response that Triton takes for that of the next call, and free the memory again.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time

from contract import thread_dump

PERIOD_S = 1.0
_TICKS = 4  # of the thread in a period, which tell whether this process runs
_GIVEN_UP_S = 0.9  # without a tick; the backend waits for 1.0 s


class Heartbeat:
    """Sends from construction to ``close``; used as a context manager around every call of the model."""

    def __init__(self, name: str, period_s: float = PERIOD_S) -> None:
        """name: the supervisor's abstract unix datagram socket. period_s: seconds between two heartbeats."""
        self._address = "\0" + name
        self._period_s = period_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._calls = 0
        self._calling = False
        self._hung = ""
        self._tick_s = self._began_s = time.time()
        self._given_up = False  # the call under way, by Triton
        self._closed = threading.Event()
        thread_dump.write_on_signal()  # which the supervisor sends before it ends this process as hung
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        self._calls += 1
        self._began_s = time.time()
        self._calling = True

    def __exit__(self, *_: object) -> None:
        self._tick()
        self._calling = False
        if self._given_up and not self._closed.is_set():
            problem = "the process did not run for a second within a call, which Triton has given up"
            print(problem, file=sys.stderr, flush=True)
            os._exit(1)  # without what a stub frees at its exit

    def engine_hung(self, reason: str) -> None:
        """Ask the supervisor to restart the server; running streams end with ``reason``. Repeated with every heartbeat:
        a datagram can be lost, and the restart ends this process."""
        self._hung = f"engine_hung {reason}"
        self._send(self._hung)

    def close(self) -> None:
        """Stop, and tell the supervisor so, because a stub may take long to end."""
        self._closed.set()
        self._thread.join(timeout=1)
        self._send("end")
        self._socket.close()

    def _beat(self) -> None:
        while True:
            self._send(self._hung or f"beat {self._calls} {int(self._calling)}")
            for _ in range(_TICKS):
                if self._closed.wait(self._period_s / _TICKS):
                    return
                self._tick()

    def _tick(self) -> None:
        """Note whether this process has just stood still within the call under way."""
        now_s = time.time()
        if self._calling and now_s - max(self._tick_s, self._began_s) >= _GIVEN_UP_S:
            self._given_up = True
        self._tick_s = now_s

    def _send(self, text: str) -> None:
        with contextlib.suppress(OSError):  # no supervisor, or its queue is full
            self._socket.sendto(text.encode(), self._address)
