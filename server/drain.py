"""Stopping without cutting anybody off: refuse new requests, let streams end, then end what is left in band.

SIGTERM alone would not do: Triton 2.51 then refuses the detokenizer its next step and every stream of the
ensemble hangs until its client gives up. Nor is unloading the ensemble enough: new requests then get Triton's words
for a model it does not know (HTTP 404), which no client takes for a reason to try elsewhere. So the tokenizers refuse
while the drain file exists, and a model that cannot load makes the server's readiness false.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from enum import Enum
from pathlib import Path

from contract.errors import TridentError
from server import traffic
from server.admin import Admin
from server.repository import ENSEMBLE

Metrics = Callable[[], Awaitable[traffic.Traffic]]

LOOK_EVERY_S = 0.05
QUIET_S = 0.25
ABORT_EVERY_S = 0.2
NOT_READY = "draining"  # name of the model that fails to load


class Drained(Enum):
    """How the last stream ended."""

    BY_ITSELF = "all streams had ended"
    BY_ABORT = "the streams left were ended with an error in band"
    CUT_OFF = "some streams did not end and are cut off"


async def drain(
    admin: Admin,
    metrics: Metrics,
    control_socket: str,
    drain_file: Path,
    drain_s: float,
    abort_s: float,
    reason: str,
) -> Drained:
    """Takes at most about ``drain_s + abort_s`` seconds.

    drain_file: created here; the tokenizers refuse requests while it exists. reason: what the streams that are ended
    by force are told.
    """
    try:
        await _refuse_new_requests(admin, metrics, drain_file)
    except TridentError:
        return Drained.CUT_OFF
    quiet = traffic.Quiet(QUIET_S)
    if await _empty(admin, metrics, quiet, drain_s):
        return Drained.BY_ITSELF
    aborts = asyncio.create_task(_keep_aborting(control_socket, reason))
    try:
        return Drained.BY_ABORT if await _empty(admin, metrics, quiet, abort_s) else Drained.CUT_OFF
    finally:
        aborts.cancel()


async def _refuse_new_requests(admin: Admin, metrics: Metrics, drain_file: Path) -> None:
    """Raises a TridentError if the server does not answer."""
    await admin.fail_readiness(NOT_READY)
    try:
        await asyncio.to_thread(drain_file.touch)
        countable = (await metrics()).live is not None
    except OSError:  # a full disk
        countable = False
    if not countable:  # without the engine's gauges only the index says when it is empty, once it is unloaded
        await admin.unload(ENSEMBLE)


def abort(control_socket: str, reason: str) -> bool:
    """Tells the engine to end every live request with an error; False if no engine listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        try:
            sender.sendto(f"abort {reason}".encode(), f"\0{control_socket}")
        except OSError:
            return False
    return True


async def _keep_aborting(control_socket: str, reason: str) -> None:
    """More than once: a request still in the tokenizer reaches the engine after the first."""
    while True:
        abort(control_socket, reason)
        await asyncio.sleep(ABORT_EVERY_S)


async def _empty(admin: Admin, metrics: Metrics, quiet: traffic.Quiet, limit_s: float) -> bool:
    """Whether nothing is in flight any more within ``limit_s``."""
    try:
        await asyncio.wait_for(_until_empty(admin, metrics, quiet), limit_s)
    except (asyncio.TimeoutError, TridentError):
        return False
    return True


async def _until_empty(admin: Admin, metrics: Metrics, quiet: traffic.Quiet) -> None:
    # An unloaded ensemble is empty for certain, but a client that keeps a stream open, however idle, holds it.
    while (await admin.states()).get(ENSEMBLE) != "UNAVAILABLE":
        if quiet(await metrics(), time.monotonic()):
            return
        await asyncio.sleep(LOOK_EVERY_S)
