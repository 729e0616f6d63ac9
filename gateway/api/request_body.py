"""Read request bodies within bounds of size, memory and time."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from contract.errors import Cancelled, DeadlineExceeded, InvalidArgument, Overloaded
from gateway.admission.body_budget import BodyBudget, Lease

MAX_UNREAD_BYTES = 4 * 1024 * 1024
LINGER_S = 2.0  # how long the rest of a rejected body is discarded


class BodyTooLarge(Exception):
    """The body is larger than allowed."""


async def read(request: Request, lease: Lease, max_bytes: int, timeout_s: float) -> bytes:
    """Return the body, its bytes counted in ``lease``: all at once where the length is announced, else as they arrive.

    An upload that the budget has no room for returns what it holds at once, so that concurrent uploads can complete.
    Raises: BodyTooLarge, asyncio.TimeoutError, ClientDisconnect, Overloaded, InvalidArgument for an encoded body.
    """
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise InvalidArgument("content-encoding", f"must be identity or left out, got {encoding:.40}")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit():
        if int(declared) > max_bytes:
            raise BodyTooLarge
        lease.grow_to(int(declared))

    async def receive() -> bytes:
        parts: list[bytes] = []
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise BodyTooLarge
            try:
                lease.grow_to(size)
            except Overloaded:
                parts.clear()
                lease.release()
                raise
            parts.append(part)
        return b"".join(parts)

    return await asyncio.wait_for(receive(), timeout_s)


async def read_small(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """Return a body outside the budget of generations. Raises: BodyTooLarge, DeadlineExceeded, Cancelled."""
    try:
        with BodyBudget(max_bytes, max_bytes).lease("") as lease:
            return await read(request, lease, max_bytes, timeout_s)
    except asyncio.TimeoutError:
        raise DeadlineExceeded(f"the body did not arrive within {timeout_s:g} s") from None
    except ClientDisconnect:
        raise Cancelled("the client disconnected") from None


async def drained(request: Request) -> bool:
    """Read the rest of a rejected body, so that its client gets the response; False: the connection must be closed."""

    async def read() -> bool:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > MAX_UNREAD_BYTES:
                return False
        return True

    try:
        return await asyncio.wait_for(read(), 1.0)
    except (ClientDisconnect, asyncio.TimeoutError):
        return False
    except RuntimeError:  # starlette raises it for a body that was read to its end
        return True


async def discard(receive: Receive) -> None:
    """Read the rest of a body for LINGER_S at most: a client that still sends when it closes sees no response."""

    async def drain() -> None:
        while (message := await receive())["type"] == "http.request" and message.get("more_body"):
            pass

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(drain(), LINGER_S)
