"""What takes longer than a moment shows that it goes on: a spinner on a terminal, a line every 2 s elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TextIO

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
SPIN_EVERY_S = 0.1
LINE_EVERY_S = 2.0


@asynccontextmanager
async def shown(what: str, out: TextIO) -> AsyncIterator[None]:
    """Shows ``what`` and the seconds since, until the block ends; on a terminal the line is then wiped."""
    terminal = out.isatty()
    task = asyncio.create_task(_spin(what, out) if terminal else _count(what, out))
    try:
        yield
    finally:
        task.cancel()
        if terminal:
            print("\r\033[K", end="", file=out, flush=True)


async def _spin(what: str, out: TextIO) -> None:
    start_s = time.monotonic()
    n = 0
    while True:
        print(f"\r{SPINNER[n % len(SPINNER)]} {what}  {time.monotonic() - start_s:.1f} s", end="", file=out, flush=True)
        n += 1
        await asyncio.sleep(SPIN_EVERY_S)


async def _count(what: str, out: TextIO) -> None:
    start_s = time.monotonic()
    while True:
        await asyncio.sleep(LINE_EVERY_S)
        print(f"  {what} … {time.monotonic() - start_s:.0f} s", file=out, flush=True)
