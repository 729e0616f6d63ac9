"""The machine a figure was taken on, and what else it did meanwhile."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class CpuTime:
    """Seconds since boot, over all cores: in total, not idle, and stolen by the hypervisor."""

    total_s: float
    busy_s: float
    stolen_s: float


@dataclass(frozen=True)
class Company:
    """Shares of all cores' time during a run: of what we measured, of everybody else, and stolen."""

    ours: float
    others: float
    stolen: float


def cpu_time(proc: Path = Path("/proc")) -> CpuTime:
    with (proc / "stat").open() as file:
        ticks = [int(field) for field in file.readline().split()[1:9]]  # guest time is in user time already
    idle = ticks[3] + ticks[4]
    return CpuTime(sum(ticks) * _TICK_S, (sum(ticks) - idle - ticks[7]) * _TICK_S, ticks[7] * _TICK_S)


def company(before: CpuTime, after: CpuTime, ours_s: float) -> Company:
    """``ours_s``: CPU seconds of the server and the generators between the two."""
    total_s = max(after.total_s - before.total_s, 1e-9)
    others_s = max(0.0, after.busy_s - before.busy_s - ours_s)
    return Company(ours_s / total_s, others_s / total_s, (after.stolen_s - before.stolen_s) / total_s)


def described() -> dict[str, object]:
    """For reports; the load average is that of this moment."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model or platform.processor(),
        "cores": os.cpu_count(),
        "load_average_1min": os.getloadavg()[0],
        "python": platform.python_version(),
    }
