"""Whether the engine's worker is ready, and when to give up starting it."""

from __future__ import annotations

import threading

_PAUSES_S = (0.0, 0.2, 1.0, 5.0)  # before the next start, by the number of starts that failed in a row


class WorkerStarts:
    """Counts failed starts in a row. The engine holds its lock, except for ``wait``."""

    def __init__(self) -> None:
        self._failures = 0
        self._ready = threading.Event()
        self._decided = threading.Event()  # ready, or given up

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    @property
    def given_up(self) -> bool:
        return self._failures >= len(_PAUSES_S)

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next start."""
        return _PAUSES_S[min(self._failures, len(_PAUSES_S) - 1)]

    def succeeded(self) -> None:
        """Record that the worker takes commands."""
        self._failures = 0
        self._ready.set()
        self._decided.set()

    def ended(self) -> None:
        """Record that the worker's process is gone; it counts as a failed start if it never became ready."""
        self._failures += not self._ready.is_set()
        self._ready.clear()
        if self.given_up:
            self._decided.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the worker is ready, starting it was given up, or the timeout; return whether it is ready."""
        self._decided.wait(timeout_s)
        return self._ready.is_set()
