"""Files of a server in /dev/shm, the Python backend's of each stub and our links: names, sizes, and their removal.

A killed server leaves its files behind. Triton allocates its own in full at the start and grows them when a message
does not fit; on a loaded machine servers aborted while growing (boost lock_exception, benchmarks/LOG.md).

The names start with a prefix of the supervisor, which starts with its gRPC port. The supervisor that listens on a port
may remove files of earlier supervisors on that port.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from contract.errors import Unavailable

FOLDER = Path("/dev/shm")
MIB = 1024 * 1024
# Per stub: more than ten thousand open streams needed.
MAX_BYTES = 32 * MIB
# Per stub: enough without growth for the longest prompt (4 MiB by default) and its response, or a thousand streams.
MIN_BYTES = 8 * MIB
SHELL_SAFE = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


def port_prefix(grpc_port: int) -> str:
    """Return ``trident_8001_``: the start of every prefix on ``grpc_port``."""
    return f"trident_{grpc_port}_"


def prefix(grpc_port: int, pid: int) -> str:
    """Return ``trident_8001_4242_``, the prefix of the supervisor ``pid``."""
    return f"{port_prefix(grpc_port)}{pid}_"


def clean(prefix: str, folder: Path = FOLDER) -> None:
    """Remove the files whose names start with ``prefix``."""
    for path in folder.glob(f"{prefix}*"):
        path.unlink(missing_ok=True)


def region_bytes(stubs: int, free_bytes: int) -> int:
    """Return the size of each stub's file: they leave an eighth of ``free_bytes``. Raises Unavailable: too little."""
    each = min(MAX_BYTES, free_bytes * 7 // 8 // max(1, stubs)) // MIB * MIB
    if each >= MIN_BYTES:
        return each
    need = -(-stubs * MIN_BYTES * 8 // 7 // MIB)
    raise Unavailable(
        f"{FOLDER} has {free_bytes // MIB} MiB free, and Triton's {stubs} Python processes need {need} MiB of it "
        f"({stubs * MAX_BYTES // MIB * 8 // 7} MiB for ten thousand streams); in a container start it with "
        "--shm-size=256m for each engine"
    )


def shell_safe(path: Path, name: str, shm_prefix: str, folder: Path = FOLDER) -> Path:
    """Return ``path``, or a link to it where a shell would not read it as one word.

    Triton starts every stub by ``bash -c`` with unquoted paths of stub and model.
    name: of the link, after the prefix.
    Raises Unavailable: the link cannot be made.
    """
    if SHELL_SAFE.fullmatch(str(path)):
        return path
    link = folder / f"{shm_prefix}{name}"
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(path)
    except OSError as error:
        raise Unavailable(
            f"{path}: must be a path without blanks and shell metacharacters, "
            f"because the link {link} to it cannot be made ({error.strerror})"
        ) from error
    return link


def free_bytes(folder: Path = FOLDER) -> int:
    """Return the bytes that can be allocated in ``folder``; 0 if there is no such folder."""
    try:
        found = os.statvfs(folder)
    except FileNotFoundError:
        return 0
    return found.f_bavail * found.f_frsize
