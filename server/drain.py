"""Drains a server: refuses new requests, lets streams end, then ends the remaining ones with an in-band error.

SIGTERM alone does not drain: Triton 2.51 then refuses the detokenizer its next step, and every stream of the ensemble
hangs until its client times out. Unloading the ensemble alone does not either: new requests then get Triton's error for
an unknown model (HTTP 404), which clients do not retry elsewhere. So the tokenizers, or the encoder, refuse requests
while the drain file exists, and a model that cannot load makes the server's readiness false.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable
from enum import Enum
from pathlib import Path

from contract.errors import TridentError
from server.admin import AdminClient
from server.server_metrics import IdleDetector, ServerMetrics

Scrape = Callable[[], Awaitable[ServerMetrics]]

POLL_INTERVAL_S = 0.05
IDLE_S = 0.25
ABORT_INTERVAL_S = 0.2
NOT_READY = "draining"  # name of the model that fails to load


class DrainResult(Enum):
    """How the last stream ended."""

    COMPLETED = "all streams completed"
    ABORTED = "remaining streams ended with an in-band error"
    CUT_OFF = "some streams did not end and are cut off"


async def drain(
    admin: AdminClient,
    scrape: Scrape,
    control_socket: str,
    drain_file: Path,
    drain_s: float,
    abort_s: float,
    reason: str,
    model: str,
) -> DrainResult:
    """Drain the server within about ``drain_s + abort_s`` seconds.

    scrape: returns the server's metrics.
    control_socket: name of the engine's control socket.
    drain_file: created here; the tokenizers refuse requests while it exists.
    drain_s: seconds that streams may go on.
    abort_s: seconds that the engine may take to end the remaining streams.
    reason: error text of the streams that are aborted.
    model: that clients call.
    """
    try:
        await _refuse_new_requests(admin, scrape, drain_file, model)
    except TridentError:
        return DrainResult.CUT_OFF
    idle = IdleDetector(IDLE_S)
    if await _is_idle_within(drain_s, admin, scrape, idle, model):
        return DrainResult.COMPLETED
    aborts = asyncio.create_task(keep_aborting(control_socket, reason))
    try:
        aborted = await _is_idle_within(abort_s, admin, scrape, idle, model)
        return DrainResult.ABORTED if aborted else DrainResult.CUT_OFF
    finally:
        aborts.cancel()


async def _refuse_new_requests(admin: AdminClient, scrape: Scrape, drain_file: Path, model: str) -> None:
    """Raises TridentError if the server does not answer."""
    await admin.fail_readiness(NOT_READY)
    try:
        await asyncio.to_thread(drain_file.touch)
        has_gauges = (await scrape()).in_engine is not None
    except OSError:  # full disk
        has_gauges = False
    if not has_gauges:  # only the state of the unloaded ensemble then shows when the server is idle
        await admin.unload(model)


async def keep_aborting(control_socket: str, reason: str) -> None:
    """Tell the engine to end every request with an error, until cancelled: those still in the tokenizer come later."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        while True:
            with contextlib.suppress(OSError):  # no engine listens now, or its queue is full
                sender.sendto(f"abort {reason}".encode(), f"\0{control_socket}")
            await asyncio.sleep(ABORT_INTERVAL_S)


async def _is_idle_within(limit_s: float, admin: AdminClient, scrape: Scrape, idle: IdleDetector, model: str) -> bool:
    try:
        await asyncio.wait_for(_wait_until_idle(admin, scrape, idle, model), limit_s)
    except (asyncio.TimeoutError, TridentError):
        return False
    return True


async def _wait_until_idle(admin: AdminClient, scrape: Scrape, idle: IdleDetector, model: str) -> None:
    # An unloaded ensemble is idle for certain, but an open gRPC stream, however idle, keeps it from unloading.
    while (await admin.states()).get(model) != "UNAVAILABLE":
        if idle.is_idle(await scrape(), time.monotonic()):
            return
        await asyncio.sleep(POLL_INTERVAL_S)
