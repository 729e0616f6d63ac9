"""Processes that end with their parent: they print where they listen, and end when their standard input closes."""

from __future__ import annotations

import asyncio
import ctypes
import http.client
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from contract.errors import EngineFailed
from server.child_command import with_parent_death_signal

ROOT = Path(__file__).resolve().parents[1]
STOP_S = 20.0
_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


async def serve_until_input_closes(port: int) -> None:
    """Print the port and wait for the end of standard input."""
    print(port, flush=True)
    closed, loop = asyncio.Event(), asyncio.get_running_loop()

    def read() -> None:
        sys.stdin.buffer.read()
        loop.call_soon_threadsafe(closed.set)

    threading.Thread(target=read, daemon=True).start()
    await closed.wait()


def spawn(
    command: Sequence[str], log: Path | None, environ: Mapping[str, str] | None = None, pipe_output: bool = True
) -> subprocess.Popen[str]:
    """Start a process in a session of its own, which gets SIGTERM when this one is killed. Raises OSError.

    log: file for its standard error, and for its output unless ``pipe_output``; None for both into the pipe.
    """
    env = {**os.environ, **(environ or {})}
    if shutil.which(command[0], path=env.get("PATH")) and threading.current_thread() is threading.main_thread():
        command = with_parent_death_signal(command)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with ExitStack() as stack:
        errors: IO[str] | int = subprocess.STDOUT
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            errors = stack.enter_context(log.open("w"))
        pipe, output = subprocess.PIPE, subprocess.PIPE if pipe_output else errors
        return subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=pipe, stdout=output, stderr=errors, text=True, start_new_session=True
        )


def adopt_orphans() -> None:
    """Become the parent of what servers leave behind, so that ``stop`` can wait for it and its CPU counts as ours."""
    ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1)


def stop(child: subprocess.Popen[str]) -> None:
    """Close its input, send SIGTERM, then SIGKILL to its group: some servers leave children behind."""
    if child.stdin is not None:
        child.stdin.close()
    for grace_s, end in ((1.0, child.terminate), (STOP_S, child.kill)):
        try:
            child.wait(grace_s)
        except subprocess.TimeoutExpired:
            end()
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    with suppress(ChildProcessError):  # none is left
        while os.waitpid(-child.pid, 0):
            pass
    if child.stdout is not None:
        child.stdout.close()


@contextmanager
def process(
    command: Sequence[str], log: Path | None, environ: Mapping[str, str] | None = None, pipe_output: bool = True
) -> Iterator[subprocess.Popen[str]]:
    """Do as ``spawn``; the process is stopped at the end of the block."""
    child = spawn(command, log, environ, pipe_output)
    try:
        yield child
    finally:
        stop(child)


def wait_until_answers(url: str, child: subprocess.Popen[str], log: Path, limit_s: float) -> None:
    """Wait until a process answers a GET. Raises EngineFailed with the end of its log."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s and child.poll() is None:
        with suppress(OSError, http.client.HTTPException), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.1)
    raise EngineFailed(f"{child.args!r} does not answer at {url}:\n{log.read_text()[-2000:]}")


def last_lines(log: Path) -> str:
    """Return the last three lines of a log in one, those that tell of an error if there are any; "" if it is empty."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    relevant = [line for line in lines if "error" in line.lower()] or lines
    return " | ".join(relevant[-3:])[-400:]


def first_line(child: subprocess.Popen[str], log: Path) -> str:
    """Return the first line of its output. Raises EngineFailed with the end of its log if there is none."""
    assert child.stdout is not None, "its output is piped"
    line = child.stdout.readline().strip()
    if not line:
        raise EngineFailed(f"{child.args!r} ended before it listened:\n{log.read_text()[-2000:]}")
    return line
