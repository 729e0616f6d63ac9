"""Processes that end with their parent: they print where they listen, and end when their standard input closes."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

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


def run(serve: Callable[[int], Coroutine[Any, Any, None]], description: str | None) -> None:
    """Run ``serve`` at the command line's ``--port`` until it returns."""
    import uvloop  # not above: parents that only start such processes do not need it

    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    with suppress(KeyboardInterrupt):
        uvloop.run(serve(parser.parse_args().port))


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
    if sys.platform == "linux":
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


def first_line(child: subprocess.Popen[str], log: Path) -> str:
    """Return the first line of its output. Raises EngineFailed with the end of its log if there is none."""
    assert child.stdout is not None, "its output is piped"
    line = child.stdout.readline().strip()
    if not line:
        raise EngineFailed(f"{child.args!r} ended before it listened:\n{log.read_text()[-2000:]}")
    return line
