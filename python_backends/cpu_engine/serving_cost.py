"""What a response costs here: CPU time of tritonserver and its stubs per response, and how much CPU there is for us."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from contract.watchdog import cpu_s

_PERIOD_NS = 500_000_000
_SCAN_EVERY = 20  # periods; a model that is loaded again has another process
_LEAST_RESPONSES = 20  # of a period that is taken for a measurement
_WEIGHT = 0.3  # of a new measurement


class CpuUse(NamedTuple):
    """CPU seconds so far.

    serving: of tritonserver and its stubs, this process among them.
    family: of these and the engine's worker.
    machine, idle: of all cores, and the unused part of it.
    """

    serving: float
    family: float
    machine: float
    idle: float


class ServerCpu:
    """Reads ``CpuUse`` from /proc, in a stub of the server."""

    def __init__(self) -> None:
        self._reads = 0
        self._stubs: list[int] = []
        self._workers: list[int] = []

    def read(self) -> CpuUse | None:
        """Return the CPU times; None where the system does not tell."""
        server = os.getppid()
        try:
            if self._reads % _SCAN_EVERY == 0:
                self._stubs, self._workers = _children(server), _children(os.getpid())
            self._reads += 1
            fields = Path("/proc/stat").read_text().split(maxsplit=9)
        except OSError:
            self._reads = 0
            return None
        serving, workers = (sum(cpu_s(pid) or 0.0 for pid in pids) for pids in ([server, *self._stubs], self._workers))
        machine = [int(ticks) / os.sysconf("SC_CLK_TCK") for ticks in fields[1:9]]
        return CpuUse(serving, serving + workers, sum(machine), machine[3] + machine[4])


def _children(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


class ServingCost:
    """Measured while responses are sent, by the ticker's thread.

    response_s: CPU time of a response.
    cores: how many cores others leave for this server.
    """

    def __init__(self, read: Callable[[], CpuUse | None]) -> None:
        self._read = read
        self._at_ns, self._responses, self._use = 0, 0, CpuUse(0, 0, 0, 0)
        self._all_cores = len(os.sched_getaffinity(0))
        self.response_s, self.cores = 0.0003, float(self._all_cores)

    def update(self, now_ns: int, responses: int) -> None:
        """Measure again if it is time. responses: sent so far."""
        passed_ns, sent, before = now_ns - self._at_ns, responses - self._responses, self._use
        if passed_ns < _PERIOD_NS or (use := self._read()) is None:
            return
        self._at_ns, self._responses, self._use = now_ns, responses, use
        spent = CpuUse(*(now - then for now, then in zip(use, before, strict=True)))
        if passed_ns > 3 * _PERIOD_NS or sent < _LEAST_RESPONSES or spent.serving <= 0 or spent.machine <= 0:
            return
        left = min(1.0, max(0.1, (spent.family + spent.idle) / spent.machine))
        self.response_s += _WEIGHT * (spent.serving / sent - self.response_s)
        self.cores += _WEIGHT * (left * self._all_cores - self.cores)
