"""Tells a process that hangs from one that is slow; used by the engine's stub for its worker and by the supervisor.

Without progress a process is hung once it has used no CPU for ``stall_s`` (stopped, deadlocked, waiting for something
that never comes), or once ``limit_s`` have passed however busy it is. Only time that the watcher itself was awake
counts, so a machine that stands still as a whole makes nobody hung.
"""

from __future__ import annotations

import os
from pathlib import Path

STALL_S = 7.0
LIMIT_S = 120.0
# CPU that counts as computing: two clock ticks, more than an idle process's timers take in STALL_S.
_BUSY_S = 0.02
# The most that one look may add: after a longer gap it was the watcher that did not run.
_LONGEST_GAP_S = 1.5


class Watchdog:
    """stall_s, limit_s: seconds without progress that make a process hung, without CPU use and with it."""

    def __init__(self, stall_s: float = STALL_S, limit_s: float = LIMIT_S) -> None:
        self._stall_s = stall_s
        self._limit_s = limit_s
        self._progress: object = None
        self._cpu_s: float | None = None
        self._silent_s = 0.0
        self._unused_s = 0.0
        self._looked_s: float | None = None

    def look(self, progress: object, working: bool, cpu_s: float | None, now_s: float) -> str:
        """Why the process counts as hung, or "". To be called at least once a second.

        progress: anything that differs once work was done.
        working: whether there is work to do; without it nothing is expected.
        cpu_s: CPU seconds the process has used so far; None where they cannot be read.
        now_s: any monotonic clock.
        """
        elapsed_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, _LONGEST_GAP_S)
        self._looked_s = now_s
        if not working or progress != self._progress:
            self._progress, self._cpu_s = progress, cpu_s
            self._silent_s = self._unused_s = 0.0
            return ""
        self._silent_s += elapsed_s
        self._unused_s += elapsed_s
        if cpu_s is not None and (self._cpu_s is None or cpu_s - self._cpu_s >= _BUSY_S):
            self._cpu_s, self._unused_s = cpu_s, 0.0
        if self._unused_s >= self._stall_s:
            return f"no progress and no CPU use for {self._unused_s:.0f} s"
        if self._silent_s >= self._limit_s:
            return f"no progress for {self._silent_s:.0f} s although it uses CPU"
        return ""


def cpu_s(pid: int) -> float | None:
    """CPU seconds that process ``pid`` has used, all threads together; None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
