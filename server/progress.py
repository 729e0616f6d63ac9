"""Progress display: a spinner on a terminal, a line every 2 s elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TextIO

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
SPIN_INTERVAL_S = 0.1
LINE_INTERVAL_S = 2.0


@asynccontextmanager
async def show(label: str, out: TextIO) -> AsyncIterator[None]:
    """Show ``label`` and the elapsed seconds until the block ends; on a terminal the line is then cleared."""
    terminal = out.isatty()
    task = asyncio.create_task(_spin(label, out) if terminal else _print_lines(label, out))
    try:
        yield
    finally:
        task.cancel()
        if terminal:
            print("\r\033[K", end="", file=out, flush=True)


async def _spin(label: str, out: TextIO) -> None:
    start_s = time.monotonic()
    n = 0
    while True:
        print(
            f"\r{SPINNER[n % len(SPINNER)]} {label}  {time.monotonic() - start_s:.1f} s", end="", file=out, flush=True
        )
        n += 1
        await asyncio.sleep(SPIN_INTERVAL_S)


async def _print_lines(label: str, out: TextIO) -> None:
    start_s = time.monotonic()
    while True:
        await asyncio.sleep(LINE_INTERVAL_S)
        print(f"  {label} … {time.monotonic() - start_s:.0f} s", file=out, flush=True)
