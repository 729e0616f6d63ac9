"""The files the Python backend keeps in /dev/shm, one per stub. A killed server leaves its files behind.

Every supervisor's files start with its own prefix, which starts with its gRPC port. Whoever holds that port may
remove what earlier holders left.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

FOLDER = Path("/dev/shm")


def port_prefix(grpc_port: int) -> str:
    return f"trident_{grpc_port}_"


def prefix(grpc_port: int, pid: int) -> str:
    """``trident_8001_4242_``: of the supervisor ``pid`` that serves on ``grpc_port``."""
    return f"{port_prefix(grpc_port)}{pid}_"


def clean(prefix: str, folder: Path = FOLDER) -> list[str]:
    """Removes the files that start with ``prefix``; returns their names."""
    if not prefix.startswith("trident_"):
        raise AssertionError(f"refusing to clean {prefix!r}: not ours")
    removed = []
    for path in folder.glob(f"{prefix}*"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            removed.append(path.name)
    return sorted(removed)
