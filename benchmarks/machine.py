"""The machine that a figure was measured on, and its load from other processes meanwhile."""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from contract import step_model


@dataclass(frozen=True)
class CpuTime:
    """Seconds since boot, over the cores that we may use: in total, not idle, and stolen by the hypervisor."""

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
    every, numbers = psutil.cpu_times(percpu=True), set(cores())
    mine = [of for number, of in enumerate(every) if number in numbers]
    # Guest time is part of user time.
    busy_s = sum(of.user + of.nice + of.system + of.irq + of.softirq for of in mine)
    stolen_s = sum(of.steal for of in mine)
    return CpuTime(busy_s + stolen_s + sum(of.idle + of.iowait for of in mine), busy_s, stolen_s)


def host_load(before: CpuTime, after: CpuTime, ours_s: float) -> HostLoad:
    """Return the load between two instants. ``ours_s``: CPU seconds of the measured processes."""
    total_s = max(after.total_s - before.total_s, 1e-9)
    others_s = max(0.0, after.busy_s - before.busy_s - ours_s)
    return HostLoad(ours_s / total_s, others_s / total_s, (after.stolen_s - before.stolen_s) / total_s)


class Watch:
    """The load of the machine from now on that is neither ours nor that of processes that we started and waited for."""

    def __init__(self) -> None:
        self._cpu, self._ours_s = cpu_time(), _ours_s()

    def others(self) -> float:
        """Return the share of the machine that was not available to us."""
        return self.load().disturbance

    def load(self, servers_s: float = 0.0) -> HostLoad:
        """Return the load since then. servers_s: CPU seconds of measured processes that still run."""
        return host_load(self._cpu, cpu_time(), _ours_s() - self._ours_s + servers_s)


def children_s() -> float:
    """Return the CPU seconds of the processes that we started and waited for, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _ours_s() -> float:
    return time.process_time() + children_s()


def cores() -> list[int]:
    """Return the numbers of the cores that we may use."""
    return sorted(os.sched_getaffinity(0))


@contextmanager
def on_cores(numbers: Sequence[int]) -> Iterator[None]:
    """Keep this thread, and the processes that it starts, on some of the cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, numbers)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cpu_flags() -> set[str]:
    """Return the processor's flags as Linux names them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def described() -> dict[str, object]:
    """Return the conditions for reports; the load average is that of this moment."""
    return {
        "cpu": step_model.processor(),
        "cores": len(cores()),
        "load_average_1min": os.getloadavg()[0],
        "python": platform.python_version(),
    }
