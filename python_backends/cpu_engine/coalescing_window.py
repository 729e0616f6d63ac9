"""The coalescing window: how long tokens of many streams wait to be sent together, and what a response costs here.

A response costs about the same CPU with one token as with sixty, and responses sent in one burst cost less than the
same ones spread out, because every thread on the way finds more work each time it wakes (benchmarks/LOG.md). So under
load the tokens of all streams are sent after the same step. A stream's first token and its end are never delayed
(stream.py).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from contract.scheduling import window_s
from contract.watchdog import cpu_s

# The next step may be as short as the shortest of so many: one beside which a burst is sent takes longer. Where it is
# not, the tokens leave when the window is over, with no more responses than if they had not waited.
_STEPS = 4
# Where none of these fits, one in so many windows is kept open all the same to learn how long a step is without a
# burst beside it, unless even the shortest is longer than so many windows.
_TRY_EVERY, _TRY_WITHIN = 16, 1.5


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


class CoalescingWindow:
    """Closes with the last step that keeps the oldest token's wait within the window. Not thread-safe."""

    def __init__(self, max_ns: int, cost: ServingCost) -> None:
        """max_ns: upper bound of the window, which grows with the streams; 0 sends every token with its step."""
        self._max_ns = max_ns
        self._cost = cost
        self._opened_ns: int | None = None  # when the oldest waiting token came
        self._last_step_ns = 0
        self._steps_ns = deque[int](maxlen=_STEPS)
        self._alone = 0  # steps whose tokens were sent alone, one after the other

    def width_ns(self, live_streams: int) -> int:
        return min(self._max_ns, int(1e9 * window_s(live_streams, self._cost.response_s, self._cost.cores)))

    def add_step(self, now_ns: int, live_streams: int) -> bool:
        """Record a step's tokens; return whether all waiting tokens are sent now."""
        self._steps_ns.append(now_ns - self._last_step_ns)
        self._last_step_ns = now_ns
        if self._opened_ns is None:
            self._opened_ns = now_ns
        # Closes now if the oldest token could not wait for the next step.
        opened_ns, step_ns = self._opened_ns, min(self._steps_ns)
        if opened_ns < now_ns:
            self._alone = 0
        elif now_ns + step_ns - opened_ns > (width_ns := self.width_ns(live_streams)):
            self._alone += 1
            if self._alone % _TRY_EVERY == 0 and step_ns <= _TRY_WITHIN * width_ns:
                return False
        return self._close_if_over(opened_ns, now_ns + step_ns, live_streams)

    def expired(self, now_ns: int, live_streams: int) -> bool:
        """Return whether the waiting tokens are sent now because the step that should send them is late."""
        return self._opened_ns is not None and self._close_if_over(self._opened_ns, now_ns, live_streams)

    def remaining_ns(self, now_ns: int, live_streams: int) -> int | None:
        """Return the time until it expires, None while no token waits."""
        return None if self._opened_ns is None else self._opened_ns + self.width_ns(live_streams) - now_ns

    def _close_if_over(self, opened_ns: int, then_ns: int, live_streams: int) -> bool:
        over = then_ns - opened_ns > self.width_ns(live_streams)
        if over:
            self._opened_ns = None
        return over
