"""How an engine's folder comes to be: whole or not at all, by one builder at a time.

Files are written to ``<name>.partial-<pid>/``, which takes the name of the engine by a rename when it is complete.
After a kill at any point the old engine (or none) is there; the next build removes what the killed one left.
"""

import contextlib
import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from build.base.program import Notify
from contract.errors import EngineFailed


def make(folder: Path) -> None:
    """Make the folder of all engines. Raises EngineFailed where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise EngineFailed(f"{folder}: must be a folder that can be made, got: {exc.strerror}") from exc


@contextlib.contextmanager
def only_builder(folder: Path, notify: Notify) -> Iterator[None]:
    """Holds the engine's lock, waiting for another builder to finish; the kernel drops it with the process."""
    try:
        lock = folder.with_name(f".{folder.name}.lock").open("w")
    except OSError as exc:
        problem = f"{folder.parent}: must be a folder that can be written to, got: {exc.strerror}"
        raise EngineFailed(problem) from exc
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            notify(f"another build of {folder.name} is running; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        _clean_up(folder)
        yield


def require_room(folder: Path, needed: int) -> None:
    """Raises EngineFailed where the disk of ``folder``, which exists, has less free than ``needed`` bytes."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        where = f"{folder}: must have {needed / 1e6:,.1f} MB of disk free for the engine"
        raise EngineFailed(f"{where}, got {free / 1e6:,.1f} MB; free some, or take fewer bits")


@contextlib.contextmanager
def replacement(folder: Path) -> Iterator[Path]:
    """An empty folder that becomes ``folder`` if the block ends well, and vanishes if it raises."""
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        _publish(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _publish(partial: Path, folder: Path) -> None:
    """A folder cannot be renamed over a full one, so the old engine steps aside; ``_clean_up`` puts it back if the
    process dies between the two renames. A server that has the old files open keeps them."""
    aside = folder.with_name(f"{folder.name}.replaced-{os.getpid()}")
    if folder.exists():
        folder.rename(aside)
    partial.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)


def _clean_up(folder: Path) -> None:
    """Called under the lock, so nothing of this engine's is in use by a builder."""
    name = glob.escape(folder.name)
    for aside in folder.parent.glob(f"{name}.replaced-*"):
        if folder.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(folder)
    for partial in folder.parent.glob(f"{name}.partial-*"):
        shutil.rmtree(partial)
