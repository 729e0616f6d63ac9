"""Detection of hung processes; used by the engine model for its worker and by the supervisor for stubs.

A process without progress is hung once it has used no CPU for ``stall_s`` (stopped or deadlocked), or once ``limit_s``
have passed, however much CPU it uses. Only time in which the watcher itself ran counts, so suspending the whole machine
makes no process hung.
"""

from __future__ import annotations

import os
from pathlib import Path

STALL_S = 7.0
LIMIT_S = 120.0
# CPU that counts as computing: two clock ticks, more than an idle process's timers take in STALL_S.
_BUSY_S = 0.02
# The most that one check adds: after a longer gap it was the watcher that did not run.
_LONGEST_GAP_S = 1.5


class Watchdog:
    """Follows one process.

    stall_s: seconds without progress and without CPU use that make the process hung.
    limit_s: seconds without progress that make it hung, with CPU use.
    unused_s: seconds without progress and without CPU use, up to the last check.
    """

    def __init__(self, stall_s: float = STALL_S, limit_s: float = LIMIT_S) -> None:
        self._stall_s, self._limit_s = stall_s, limit_s
        self.unused_s = 0.0
        self._progress: object = None
        self._cpu_s: float | None = None
        self._silent_s = 0.0
        self._checked_s: float | None = None

    def check(self, progress: object, working: bool, cpu_s: float | None, now_s: float) -> str:
        """Return why the process counts as hung, or "". Call it at least once a second.

        progress: any value that changes when work was done.
        working: the process has work to do; without work it need not progress.
        cpu_s: CPU seconds the process has used so far; None where they cannot be read.
        now_s: any monotonic clock.
        """
        elapsed_s = 0.0 if self._checked_s is None else min(now_s - self._checked_s, _LONGEST_GAP_S)
        self._checked_s = now_s
        if not working or progress != self._progress:
            self._progress, self._cpu_s = progress, cpu_s
            self._silent_s = self.unused_s = 0.0
            return ""
        self._silent_s += elapsed_s
        self.unused_s += elapsed_s
        if cpu_s is not None and (self._cpu_s is None or cpu_s - self._cpu_s >= _BUSY_S):
            self._cpu_s, self.unused_s = cpu_s, 0.0
        if self.unused_s >= self._stall_s:
            return f"no progress and no CPU use for {self.unused_s:.0f} s"
        if self._silent_s >= self._limit_s:
            return f"no progress for {self._silent_s:.0f} s although it uses CPU"
        return ""


def cpu_s(pid: int) -> float | None:
    """Return the CPU seconds that process ``pid`` has used in all threads; None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
