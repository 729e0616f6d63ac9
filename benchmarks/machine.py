"""The machine that a figure was measured on, and its load from other processes meanwhile."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import psutil

from contract import step_model


@dataclass(frozen=True)
class CpuTime:
    """Seconds since boot, over all cores: in total, not idle, and stolen by the hypervisor."""

    total_s: float
    busy_s: float
    stolen_s: float


@dataclass(frozen=True)
class HostLoad:
    """Shares of all cores' time during a run: of what is measured, of other processes, and stolen."""

    ours: float
    others: float
    stolen: float

    @property
    def disturbance(self) -> float:
        """The share that was not available to the measured processes."""
        return self.others + self.stolen


def cpu_time() -> CpuTime:
    times = psutil.cpu_times()
    # Guest time is part of user time.
    busy_s = times.user + times.nice + times.system + times.irq + times.softirq
    return CpuTime(busy_s + times.idle + times.iowait + times.steal, busy_s, times.steal)


def host_load(before: CpuTime, after: CpuTime, ours_s: float) -> HostLoad:
    """Return the load between two instants. ``ours_s``: CPU seconds of the measured processes."""
    total_s = max(after.total_s - before.total_s, 1e-9)
    others_s = max(0.0, after.busy_s - before.busy_s - ours_s)
    return HostLoad(ours_s / total_s, others_s / total_s, (after.stolen_s - before.stolen_s) / total_s)


def described() -> dict[str, object]:
    """Return the conditions for reports; the load average is that of this moment."""
    return {
        "cpu": step_model.processor(),
        "cores": os.cpu_count(),
        "load_average_1min": os.getloadavg()[0],
        "python": platform.python_version(),
    }
