"""Which Ray worker owns a server: a file for each server, locked by its worker, so that the kernel frees it.

A worker that would start a server whose like has lost its worker adopts that one instead.
This file is also the program that runs beside a server (``keep``), without any package.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import signal
import sys
import time
from pathlib import Path
from typing import IO

HUNG_S = 10.0  # without a beat of the status file, server/status.py
POLL_S = 0.5  # of an orphan; an owned server is watched by a wait for the lock
STOP = "stop"


def keep(file: Path, orphan_s: float) -> None:
    """Run beside a server, which drains when this returns: its worker has said so, or it had none for ``orphan_s``.
    Writes into ``file`` the pid of the supervisor, its status file, and its GPUs."""
    with file.open("r+") as shared:
        told = [str(os.getppid()), os.environ["TRIDENT_STATUS_FILE"], os.environ.get("CUDA_VISIBLE_DEVICES", "")]
        print("\n".join(told), file=shared, flush=True)
        try:
            print("ready", flush=True)
        except BrokenPipeError:  # the worker died while the server started, and another server starts by now
            return
        while True:
            fcntl.flock(shared, fcntl.LOCK_SH)  # returns when the worker has said stop, or died
            alone_s = time.monotonic()
            while True:
                if STOP in file.read_text().splitlines():
                    return
                if time.monotonic() - alone_s >= orphan_s:
                    print(STOP, file=shared, flush=True)
                    return
                fcntl.flock(shared, fcntl.LOCK_UN)
                time.sleep(min(POLL_S, orphan_s))
                try:
                    fcntl.flock(shared, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    break


class Owned:
    """A server that this process owns while it lives. lock: of ``file``. pid: of the supervisor. gpus: that it sees.
    Raises ValueError if the server has not started yet, ProcessLookupError if it has ended."""

    def __init__(self, file: Path, lock: IO[str]) -> None:
        self.file, self._lock = file, lock
        pid, status_file, gpus, *stopped = file.read_text().splitlines()
        self.pid, self._status_file, self.gpus = int(pid), Path(status_file), set(filter(None, gpus.split(",")))
        self._stopped = bool(stopped)
        self._supervisor = os.pidfd_open(self.pid)
        if not self._is_same():
            os.close(self._supervisor)
            raise ProcessLookupError(pid)

    @property
    def state(self) -> str:
        """What the status file says, "draining" from the stop on, "hung" if its supervisor does not run."""
        if self._stopped:
            return "draining"
        try:
            if time.time() - self._status_file.stat().st_mtime > HUNG_S:
                return "hung"
            return str(json.loads(self._status_file.read_text())["state"])
        except (OSError, ValueError, KeyError):
            return "without a status file"

    def stop(self) -> None:
        """Let the server withdraw and drain. No other worker adopts it. One whose supervisor hangs is killed."""
        hangs = self.state == "hung"
        self._stopped = True
        with self._lock:
            self._lock.write(f"{STOP}\n")  # Ray replaces print() in its workers by one that writes its arguments' tuple
        if hangs:
            signal.pidfd_send_signal(self._supervisor, signal.SIGKILL)  # its server ends with it

    def wait(self) -> None:
        """Return when the supervisor has ended."""
        poller = select.poll()
        poller.register(self._supervisor, select.POLLIN)
        poller.poll()

    def forget(self) -> None:
        """Remove the file of a server that has ended."""
        self.file.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Leave the server to others."""
        self._lock.close()
        os.close(self._supervisor)

    def _is_same(self) -> bool:
        """Return whether the process is the supervisor, not a later one with its number."""
        try:
            started = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[19]
            return started == str(json.loads(self._status_file.read_text())["started"])
        except (OSError, ValueError, KeyError):
            return False


def locked(file: Path, flags: int = 0) -> IO[str]:
    """Return the open file of a server, locked. Raises OSError if another worker owns it. flags: as of os.open."""
    lock = os.fdopen(os.open(file, os.O_RDWR | os.O_APPEND | flags, 0o600), "a")
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # fails if owned: an owner's lock is exclusive
                fcntl.flock(lock, fcntl.LOCK_UN)  # the program beside the server looked at its file: try again
                time.sleep(random.random() / 1000)
    except OSError:
        lock.close()
        raise


def adopted(folder: Path, prefix: str, gpus: str) -> Owned | None:
    """Return a server that serves and has no owner, now this process's; None if there is none.

    folder, prefix: of the files of such servers. gpus: that the server is to have: other orphans that have one of them
    are drained first. Those that hang are killed.
    """
    for file in sorted(folder.glob("replica-*.owner")):
        try:
            lock = locked(file)
        except OSError:  # owned, or gone
            continue
        try:
            found = Owned(file, lock)
        except (OSError, ValueError) as error:
            if isinstance(error, ProcessLookupError):
                file.unlink(missing_ok=True)
            lock.close()
            continue
        if file.name.startswith(prefix) and found.state == "ready":
            return found
        if found.state == "hung" or found.gpus & set(filter(None, gpus.split(","))):
            found.stop()
            found.wait()
            found.forget()
        else:
            found.release()
    return None


if __name__ == "__main__":
    keep(Path(sys.argv[1]), float(sys.argv[2]))
