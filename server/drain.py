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
from enum import Enum

from contract.errors import TridentError
from server.instance import ServerInstance
from server.server_metrics import IdleDetector

POLL_INTERVAL_S = 0.05
IDLE_S = 0.25
ABORT_S = 3.0  # that the engine may take to end the remaining streams
ABORT_INTERVAL_S = 0.2
NOT_READY = "draining"  # name of the model that fails to load


class DrainResult(Enum):
    """How the last stream ended."""

    COMPLETED = "all streams completed"
    ABORTED = "remaining streams ended with an in-band error"
    CUT_OFF = "some streams did not end and are cut off"


async def drain(server: ServerInstance, drain_s: float, reason: str) -> DrainResult:
    """Drain within about ``drain_s + ABORT_S`` seconds. reason: error text of the streams that are then aborted."""
    try:
        await _refuse_new_requests(server)
    except TridentError:
        return DrainResult.CUT_OFF
    idle = IdleDetector(IDLE_S)
    # That nothing runs takes IDLE_S to see, also where streams get no time.
    if await _is_idle_within(max(drain_s, IDLE_S + 2 * POLL_INTERVAL_S), server, idle):
        return DrainResult.COMPLETED
    aborts = asyncio.create_task(keep_aborting(server.control_socket, reason))
    try:
        return DrainResult.ABORTED if await _is_idle_within(ABORT_S, server, idle) else DrainResult.CUT_OFF
    finally:
        aborts.cancel()


async def _refuse_new_requests(server: ServerInstance) -> None:
    """Raises TridentError if the server does not answer."""
    await server.admin.fail_readiness(NOT_READY)
    try:
        await asyncio.to_thread(server.drain_file.touch)
        has_gauges = (await server.metrics()).in_engine is not None
    except OSError:  # full disk
        has_gauges = False
    if not has_gauges:  # only the state of the unloaded ensemble then shows when the server is idle
        await server.admin.unload(server.model)


async def keep_aborting(control_socket: str, reason: str) -> None:
    """Tell the engine to end every request with an error, until cancelled: those still in the tokenizer come later."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        while True:
            with contextlib.suppress(OSError):  # no engine listens now, or its queue is full
                sender.sendto(f"abort {reason}".encode(), f"\0{control_socket}")
            await asyncio.sleep(ABORT_INTERVAL_S)


async def _is_idle_within(limit_s: float, server: ServerInstance, idle: IdleDetector) -> bool:
    async def wait_until_idle() -> None:
        # An unloaded ensemble is idle for certain, but an open gRPC stream, however idle, keeps it from unloading.
        while (await server.admin.states()).get(server.model) != "UNAVAILABLE":
            if idle.is_idle(await server.metrics(), time.monotonic()):
                return
            await asyncio.sleep(POLL_INTERVAL_S)

    try:
        await asyncio.wait_for(wait_until_idle(), limit_s)
    except (asyncio.TimeoutError, TridentError):
        return False
    return True
