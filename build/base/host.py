"""What this machine has: the memory that a CPU engine may take here."""

from __future__ import annotations

from pathlib import Path

_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")  # cgroup v2, v1


def memory_bytes(root: Path = Path("/")) -> int | None:
    """Memory of the machine, or of the container where that is less; None where the kernel does not say."""
    limits = []
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                limits.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass  # not Linux: nothing is known
    for name in _LIMITS:
        try:
            limits.append(int((root / name).read_text()))
        except (OSError, ValueError):
            continue  # no such limit, or "max"
    return min(limits, default=None)
