"""What the server's processes use, out of /proc: CPU seconds and peak memory, by the part they play.

The server is found by the port it listens on; its stubs and the engine worker are its descendants.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_STUB = "triton_python_backend_stub"
_WORKER = "python_backends.cpu_engine.worker"
_STUB_ROLES = {"engine": "engine stub"}
# What an engine needs anyway; the others are what serving it costs on top.
ENGINE_ROLES = ("engine worker",)


@dataclass(frozen=True)
class Use:
    """Of all processes of one role: CPU seconds since they began, seconds their threads were ready to run and waited
    for a core, now resident and peak resident bytes."""

    cpu_s: float
    rss_bytes: int
    peak_rss_bytes: int
    processes: int = 1
    waited_s: float = 0.0

    def __add__(self, other: Use) -> Use:
        return Use(
            self.cpu_s + other.cpu_s,
            self.rss_bytes + other.rss_bytes,
            self.peak_rss_bytes + other.peak_rss_bytes,
            self.processes + other.processes,
            self.waited_s + other.waited_s,
        )

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def listener(port: int, proc: Path = Path("/proc")) -> int | None:
    """The process that listens on a TCP port of this machine, or None if it is not ours to see."""
    inodes = set()
    for table in ("net/tcp", "net/tcp6"):
        try:
            lines = (proc / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return None
    for process in proc.glob("[0-9]*"):
        try:
            if any(os.readlink(descriptor) in inodes for descriptor in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:
            continue
    return None


def family(root: int, proc: Path = Path("/proc")) -> list[int]:
    """``root`` and everything that descends from it."""
    children: dict[int, list[int]] = {}
    for process in proc.glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_bytes().rpartition(b")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(process.name))
    found, todo = [], [root]
    while todo:
        found.append(pid := todo.pop())
        todo += children.get(pid, [])
    return found


def role(argv: list[str]) -> str:
    """What a process of the server does, out of its command line."""
    if not argv or not argv[0]:
        return "other"
    name = Path(argv[0]).name
    if name == _STUB and len(argv) > 1:
        model = Path(argv[1]).parents[1].name
        return _STUB_ROLES.get(model, model)
    if _WORKER in argv:
        return "engine worker"
    return name


def use(root: int, proc: Path = Path("/proc")) -> dict[str, Use]:
    """What the server ``root`` and its descendants have used so far, by role."""
    out: dict[str, Use] = {}
    for pid in family(root, proc):
        try:
            argv = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
            one = _read(proc / str(pid))
        except OSError:
            continue  # it has ended meanwhile
        name = role(argv)
        out[name] = out[name] + one if name in out else one
    return out


def grown(before: Mapping[str, Use], after: Mapping[str, Use]) -> dict[str, Use]:
    """``after`` with the CPU time used since ``before``."""
    nothing = Use(0.0, 0, 0, 0)
    return {
        name: dataclasses.replace(
            now,
            cpu_s=now.cpu_s - before.get(name, nothing).cpu_s,
            waited_s=max(0.0, now.waited_s - before.get(name, nothing).waited_s),
        )
        for name, now in after.items()
    }


def serving_cpu_s(used: Mapping[str, Use]) -> float:
    """CPU of everything but the engine itself."""
    return sum(one.cpu_s for name, one in used.items() if name not in ENGINE_ROLES)


def _read(process: Path) -> Use:
    fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
    memory = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", (process / "status").read_text(), re.MULTILINE))
    cpu_s = (int(fields[11]) + int(fields[12])) * TICK_S
    resident, peak = (int(memory.get(name, 0)) * 1024 for name in ("VmRSS", "VmHWM"))
    return Use(cpu_s, resident, peak, waited_s=waited(process))


def waited(process: Path) -> float:
    """Seconds the living threads were ready and waited for a core; 0 where the kernel does not count it."""
    total_ns = 0
    for thread in (process / "task").glob("[0-9]*"):
        try:
            total_ns += int((thread / "schedstat").read_text().split()[1])
        except (OSError, IndexError):
            continue
    return total_ns / 1e9
