"""Paths without shell metacharacters: Triton starts every stub by ``bash -c`` with unquoted paths of stub and model.

A folder named ``a b`` or ``it's`` is therefore passed to tritonserver as a symbolic link. The links are in /dev/shm
under the server's prefix, so they are removed together with its shared memory.
"""

from __future__ import annotations

import re
from pathlib import Path

from contract.errors import Unavailable
from server import shared_memory

SAFE = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


def shell_safe(path: Path, name: str, shm_prefix: str, folder: Path = shared_memory.FOLDER) -> Path:
    """Return ``path`` if it is shell-safe, else a link to it.

    name: of the link, after the prefix.
    folder: of the link.
    Raises Unavailable: the link cannot be made.
    """
    if SAFE.fullmatch(str(path)):
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
