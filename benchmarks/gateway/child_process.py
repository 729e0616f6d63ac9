"""Processes that end with their parent: they print where they listen, and end when their standard input closes."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from contract.errors import EngineFailed

ROOT = Path(__file__).resolve().parents[2]
STOP_S = 15.0


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


@contextmanager
def process(
    command: Sequence[str], log: Path, environ: Mapping[str, str] | None = None, pipe_output: bool = True
) -> Iterator[subprocess.Popen[str]]:
    """Start a process; leaving the block closes its input, then sends SIGTERM, then SIGKILL.

    log: file for its standard error, and for its output unless ``pipe_output``.
    """
    env = {**os.environ, **(environ or {})}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if pipe_output else file,
            stderr=file,
            text=True,
            start_new_session=True,
        )
        try:
            yield child
        finally:
            _stop(child)


def _stop(child: subprocess.Popen[str]) -> None:
    if child.stdin is not None:
        child.stdin.close()
    try:
        child.wait(1)
    except subprocess.TimeoutExpired:
        child.terminate()
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    if child.stdout is not None:
        child.stdout.close()


def first_line(child: subprocess.Popen[str], log: Path) -> str:
    """Return the first line of its output. Raises EngineFailed with the end of its log if there is none."""
    assert child.stdout is not None, "its output is piped"
    line = child.stdout.readline().strip()
    if not line:
        raise EngineFailed(f"{child.args!r} ended before it listened:\n{log.read_text()[-2000:]}")
    return line
