"""Stopping without cutting anybody off: admit nothing new, let streams end, then end what is left in band.

SIGTERM alone would not do: Triton 2.51 then refuses the detokenizer its next step and every stream of the
ensemble hangs until its client gives up. Unloading the ensemble keeps what is in flight going.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from enum import Enum

from contract.errors import TridentError
from server import traffic
from server.admin import Admin
from server.repository import ENSEMBLE

Metrics = Callable[[], Awaitable[traffic.Traffic]]

LOOK_EVERY_S = 0.05
QUIET_S = 0.25
ABORT_EVERY_S = 0.2


class Drained(Enum):
    """How the last stream ended."""

    BY_ITSELF = "all streams had ended"
    BY_ABORT = "the streams left were ended with an error in band"
    CUT_OFF = "some streams did not end and are cut off"


async def drain(
    admin: Admin, metrics: Metrics, control_socket: str, drain_s: float, abort_s: float, reason: str
) -> Drained:
    """Takes at most about ``drain_s + abort_s``. ``reason`` is what the streams ended by force are told."""
    try:
        await admin.unload(ENSEMBLE)
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
    # The index tells it at once, but only if no client keeps a stream open that once carried a request: such a
    # stream, however idle, holds the ensemble. Then the metrics must do.
    while (await admin.states()).get(ENSEMBLE) != "UNAVAILABLE":
        if quiet(await metrics(), time.monotonic()):
            return
        await asyncio.sleep(LOOK_EVERY_S)
