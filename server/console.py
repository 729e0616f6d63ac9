"""What a supervisor shows: a ready server's endpoints with commands to try, and how long a start or drain takes."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TextIO

from clients.wire.connection import DEFAULT_URL
from contract import interpreter
from server.repository import ENSEMBLE
from server.settings import Settings

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
SPIN_INTERVAL_S = 0.1
LINE_INTERVAL_S = 2.0


def ready_message(settings: Settings, model: str = ENSEMBLE) -> str:
    """Return endpoints and example commands, ready to copy. model: that clients call."""
    tls = " over TLS" if settings.tls_cert else ""
    call = "ModelStreamInfer" if model == ENSEMBLE else "ModelInfer"
    return f"""
Trident serves engine {settings.engine}.
  gRPC     {settings.grpc_url}   model {model}, {call}{tls}
  HTTP     {settings.http_url}
  metrics  {settings.metrics_url}
Try
{_generating(settings) if model == ENSEMBLE else _encoding(settings, model)}
Ctrl-C stops it.
"""


def _generating(settings: Settings) -> str:
    url = "" if settings.grpc_url == DEFAULT_URL else f" --url {settings.grpc_url}"
    return f"""  {interpreter.command()} -m clients{url} "def fibonacci(n):"
  curl -N {settings.http_url}/v2/models/{ENSEMBLE}/generate_stream \\
    -d '{{"text_input": "def fibonacci(n):", "max_tokens": 32, "stream": true}}'"""


def _encoding(settings: Settings, model: str) -> str:
    names = ("text_input", "text_pair")  # an embedding model takes text_input alone, too
    inputs = [{"name": name, "datatype": "BYTES", "shape": [1, 1], "data": ["some text"]} for name in names]
    return f"""  curl {settings.http_url}/v2/models/{model}/infer \\
    -d '{json.dumps({"inputs": inputs})}'"""


@asynccontextmanager
async def progress(label: str, out: TextIO) -> AsyncIterator[None]:
    """Show ``label`` and the elapsed seconds until the block ends: a spinner on a terminal, lines elsewhere."""
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
    for figure in itertools.cycle(SPINNER):
        print(f"\r{figure} {label}  {time.monotonic() - start_s:.1f} s", end="", file=out, flush=True)
        await asyncio.sleep(SPIN_INTERVAL_S)


async def _print_lines(label: str, out: TextIO) -> None:
    start_s = time.monotonic()
    while True:
        await asyncio.sleep(LINE_INTERVAL_S)
        print(f"  {label} … {time.monotonic() - start_s:.0f} s", file=out, flush=True)
