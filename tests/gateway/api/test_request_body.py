"""Bodies are read within bounds, and the rest of a rejected one is discarded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from contract.errors import InvalidArgument
from gateway.admission.body_budget import BodyBudget
from gateway.api import request_body
from gateway.api.request_body import BodyTooLarge

LEFT = {"type": "http.disconnect"}


def part(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


def receiver(*messages: dict[str, Any]) -> Any:
    """Receives the messages, then nothing."""
    left = list(messages)

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    return receive


async def read(*messages: dict[str, Any], length: int | None = None, timeout_s: float = 30.0) -> bytes:
    headers = [] if length is None else [(b"content-length", b"%d" % length)]
    request = Request({"type": "http", "headers": headers}, receiver(*messages))
    with BodyBudget(1000, 10).lease("a") as lease:
        return await request_body.read(request, lease, 10, timeout_s)


async def test_a_body_is_joined_from_its_parts() -> None:
    assert await read(part(b"one"), part(b""), part(b"two", more=False), length=6) == b"onetwo"


async def test_a_body_that_is_declared_or_becomes_too_large_is_rejected() -> None:
    with pytest.raises(BodyTooLarge):
        await read(length=11)
    with pytest.raises(BodyTooLarge):
        await read(part(b"x" * 6), part(b"x" * 5))


async def test_a_compressed_body_is_refused_by_its_header() -> None:
    request = Request({"type": "http", "headers": [(b"content-encoding", b"gzip")]}, receiver())
    with BodyBudget(1000, 10).lease("a") as lease, pytest.raises(InvalidArgument, match="content-encoding: must be"):
        await request_body.read(request, lease, 10, 1.0)


async def test_a_body_that_does_not_arrive_times_out_and_a_disconnect_is_raised() -> None:
    with pytest.raises(asyncio.TimeoutError):
        await read(part(b"x"), timeout_s=0.01)
    with pytest.raises(ClientDisconnect):
        await read(part(b"x"), LEFT)


@pytest.mark.parametrize("last", [part(b"", more=False), LEFT])
async def test_a_rejected_body_is_discarded_to_its_end(last: dict[str, Any]) -> None:
    receive = receiver(part(b"x"), part(b"y"), last)
    await request_body.discard(receive)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(receive(), 0.01)


async def test_a_body_without_an_end_is_discarded_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "LINGER_S", 0.01)
    await request_body.discard(receiver(part(b"x")))
