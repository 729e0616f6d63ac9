"""Measure what the server's processes use: CPU seconds, memory and time waiting for a core, by role."""

from __future__ import annotations

import dataclasses
import operator
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from contract.errors import EngineFailed
from server import ports

_STUB = "triton_python_backend_stub"
_WORKER = "python_backends.cpu_engine.worker"
_STUB_ROLES = {"engine": "engine stub", "detokenizer_packed": "detokenizer"}
# What the engine needs in any case; the others are what serving costs on top.
ENGINE_ROLES = ("engine worker",)


@dataclass(frozen=True)
class Use:
    """What all processes of one role used since they began.

    cpu_s: user and system time; waited_s: seconds their threads were runnable and waited for a core.
    rss_bytes, peak_rss_bytes: resident memory now and at most; shared pages count for each process.
    """

    cpu_s: float
    rss_bytes: int
    peak_rss_bytes: int
    processes: int = 1
    waited_s: float = 0.0

    def __add__(self, other: Use) -> Use:
        return Use(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))


NOTHING = Use(0.0, 0, 0, 0)
HERE = ("127.0.0.1", "localhost", "0.0.0.0", "[::1]")


def listener(url: str) -> int | None:
    """Return the pid that listens at HOST:PORT; None for another machine, or if it is not visible to this user."""
    host, _, port = url.rpartition(":")
    found = ports.listener(int(port)) if host in HERE and port.isdecimal() else None
    return found.pid if found else None


def server(url: str) -> int:
    """Return the pid that listens at HOST:PORT. Raises EngineFailed: none does that is visible here."""
    if (found := listener(url)) is None:
        raise EngineFailed(f"no process listens on {url}")
    return found


def role(argv: Sequence[str]) -> str:
    """Return the role of a process of the server, by its command line."""
    if not argv or not argv[0]:
        return "other"
    name = Path(argv[0]).name
    if name == _STUB and len(argv) > 1:
        model = Path(argv[1]).parents[1].name
        return _STUB_ROLES.get(model, model)
    return "engine worker" if _WORKER in argv else name


def use(root: int) -> dict[str, Use]:
    """Return what process ``root`` and its descendants have used so far, by role; {} if it has ended."""
    out: dict[str, Use] = {}
    for process in family(root):
        with suppress(psutil.Error, OSError), process.oneshot():  # it may end meanwhile
            name, used = role(process.cmdline()), _read(process)
            out[name] = out[name] + used if name in out else used
    return out


def family(root: int) -> list[psutil.Process]:
    """Return process ``root`` and its descendants; none if it has ended."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    return []


def total(root: int) -> Use:
    """Return what process ``root`` and its descendants have used together."""
    return sum(use(root).values(), start=NOTHING)


def difference(before: Mapping[str, Use], after: Mapping[str, Use]) -> dict[str, Use]:
    """Return ``after`` with only the CPU and waiting time since ``before``."""
    found = {}
    for name, now in after.items():
        then = before.get(name, NOTHING)
        waited = max(0.0, now.waited_s - then.waited_s)
        found[name] = dataclasses.replace(now, cpu_s=now.cpu_s - then.cpu_s, waited_s=waited)
    return found


def serving_cpu_s(used: Mapping[str, Use]) -> float:
    """Return the CPU seconds of everything but the engine itself."""
    return sum(one.cpu_s for name, one in used.items() if name not in ENGINE_ROLES)


def waited_s(pid: int | str = "self") -> float:
    """Return the seconds that a process's living threads waited for a core; 0 where the kernel does not count it."""
    total_ns = 0
    for thread in Path(f"/proc/{pid}/task").glob("[0-9]*"):
        try:
            total_ns += int((thread / "schedstat").read_text().split()[1])
        except (OSError, IndexError):
            continue
    return total_ns / 1e9


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, its ended threads included. Raises OSError if it has ended.

    By the kernel's clock of that process (clock_getcpuclockid): /proc, and so psutil, counts in ticks of 10 ms.
    """
    return time.clock_gettime(~pid << 3 | 2)


def _read(process: psutil.Process) -> Use:
    pid = process.pid
    # One reading of both, so that the peak is never below the present; psutil does not give the peak.
    sizes = dict(re.findall(r"^(VmHWM|VmRSS):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    rss_bytes, peak_bytes = (int(sizes.get(name, 0)) * 1024 for name in ("VmRSS", "VmHWM"))
    return Use(cpu_s(pid), rss_bytes, peak_bytes, waited_s=waited_s(pid))
