"""Paths for a shell: Triton starts every stub through ``bash -c`` with the paths of stub and model unquoted.

A checkout in a folder named ``a b`` or ``it's`` is therefore passed to tritonserver by links without such characters.
They lie in /dev/shm under the server's own prefix, so that whatever removes its shared memory removes them too.
"""

from __future__ import annotations

import re
from pathlib import Path

from contract.errors import Unavailable
from server import shared_memory

PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


def is_plain(path: Path) -> bool:
    """Whether a shell takes ``path`` for one word and as it is."""
    return PLAIN.fullmatch(str(path)) is not None


def plain(path: Path, name: str, shm_prefix: str, folder: Path = shared_memory.FOLDER) -> Path:
    """``path`` itself where a shell can take it, else a link to it.

    name: what the link is called after the prefix.

    Raises:
        Unavailable: the link cannot be made.
    """
    if is_plain(path):
        return path
    link = folder / f"{shm_prefix}{name}"
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(path)
    except OSError as error:
        raise Unavailable(
            f"{path} holds characters that the shell which starts Triton's Python models does not take, and the link "
            f"{link} around them cannot be made ({error.strerror}); move the folder to a path without blanks and quotes"
        ) from error
    return link
