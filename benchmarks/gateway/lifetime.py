"""Processes that live as long as whoever started them: they say where they listen, and end when their input closes."""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from contract.errors import EngineFailed

ROOT = Path(__file__).resolve().parents[2]


async def serve_until_input_closes(port: int) -> None:
    """Prints the port and waits for the end of standard input."""
    print(port, flush=True)
    over, loop = asyncio.Event(), asyncio.get_running_loop()

    def read() -> None:
        sys.stdin.buffer.read()
        loop.call_soon_threadsafe(over.set)

    threading.Thread(target=read, daemon=True).start()
    await over.wait()


def run(serve: Callable[[int], Awaitable[None]], about: str | None) -> None:
    """The program of a server: ``serve`` at ``--port`` until its end."""
    import uvloop  # and not above: those that only start such programs run on a loop of their own

    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    with suppress(KeyboardInterrupt):
        uvloop.run(serve(parser.parse_args().port))


def raise_open_files() -> int:
    """As many open files as the system lets us have; returns how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


@contextmanager
def process(
    command: Sequence[str], log: Path, environ: Mapping[str, str] | None = None, heard: bool = True
) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the block: its input is closed, then it is asked to stop, then it must. heard: we read
    its output; else that goes to the log with its complaints."""
    env = {**os.environ, **(environ or {})}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as said:
        one = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if heard else said,
            stderr=said,
            text=True,
            start_new_session=True,
        )
        try:
            yield one
        finally:
            one.stdin.close()
            try:
                one.wait(1)
            except subprocess.TimeoutExpired:
                one.terminate()
                try:
                    one.wait(15)
                except subprocess.TimeoutExpired:
                    one.kill()
                    one.wait()
            if heard:
                one.stdout.close()


def first_line(one: subprocess.Popen[str], log: Path) -> str:
    """What it says first. Raises EngineFailed with the end of its log if it says nothing."""
    line = one.stdout.readline().strip()
    if not line:
        raise EngineFailed(f"{one.args[:4]} ended before it listened:\n{log.read_text()[-2000:]}")
    return line
