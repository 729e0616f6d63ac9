"""The files the Python backend keeps in /dev/shm, one per stub, and how large they may be.

A killed server leaves its files behind. Triton allocates them in full at the start and lets them grow when a message
does not fit; servers died in that on a loaded machine (boost lock_exception, benchmarks/LOG.md).

Every supervisor's files start with its own prefix, which starts with its gRPC port. Whoever holds that port may
remove what earlier holders left.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from contract.errors import Unavailable

FOLDER = Path("/dev/shm")
MIB = 1024 * 1024
# Per stub: more than ten thousand open streams took.
MOST_BYTES = 32 * MIB
# Per stub: the longest prompt (4 MiB by default) and its answer fit without growth, and so do a thousand streams.
LEAST_BYTES = 8 * MIB


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


def region_bytes(stubs: int, free_bytes: int) -> int:
    """Size of each stub's file: all of them together leave an eighth of ``free_bytes`` for growth.

    Raises:
        Unavailable: ``free_bytes`` is too little for ``stubs`` stubs.
    """
    each = min(MOST_BYTES, free_bytes * 7 // 8 // max(1, stubs)) // MIB * MIB
    if each >= LEAST_BYTES:
        return each
    need = -(-stubs * LEAST_BYTES * 8 // 7 // MIB)
    raise Unavailable(
        f"{FOLDER} has {free_bytes // MIB} MiB free, and Triton's {stubs} Python processes need {need} MiB of it "
        f"({stubs * MOST_BYTES // MIB * 8 // 7} MiB for ten thousand streams); in a container start it with "
        "--shm-size=256m"
    )


def free_bytes(folder: Path = FOLDER) -> int:
    """Bytes that can still be allocated in ``folder``; 0 if there is no such folder."""
    try:
        found = os.statvfs(folder)
    except FileNotFoundError:
        return 0
    return found.f_bavail * found.f_frsize
