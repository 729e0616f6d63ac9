"""The bounds of one HTTP connection, over a real socket; hostile input is in tests/gateway/test_abuse.py."""

from __future__ import annotations

import asyncio

import pytest

from gateway.api import http_connection
from gateway.api.http_connection import MAX_HEADER_BYTES, MAX_HEADERS, MAX_PIPELINED, bounded
from tests.gateway.running import Running, gateway

LIVE = b"GET /health/live HTTP/1.1\r\nhost: x\r\n"


async def received(running: Running, data: bytes) -> bytes:
    """What the server sends for ``data`` until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()


def test_each_timeout_has_a_class_of_its_own() -> None:
    assert bounded(1.5).header_timeout_s == 1.5 and bounded(2.5).header_timeout_s == 2.5
    assert http_connection.Connection.header_timeout_s == 10.0


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (LIVE, b"408"),
        (LIVE + b"".join(b"x-%d: 1\r\n" % n for n in range(MAX_HEADERS)) + b"\r\n", b"431"),
        (LIVE + b"x: %b\r\n\r\n" % (b"y" * MAX_HEADER_BYTES), b"431"),
        (b"nonsense\r\n\r\n", b"400"),
    ],
    ids=["late", "many", "long", "malformed"],
)
async def test_headers_beyond_a_bound_end_the_connection_with_a_status(data: bytes, status: bytes) -> None:
    async with gateway(header_timeout_s=0.2) as running:
        response = await received(running, data)
        assert response.split()[1] == status and b"connection: close" in response
        assert response.count(b"HTTP/1.1 ") == 1


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with gateway() as running:
        missing = b"GET /missing HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        response = await received(running, (LIVE + b"\r\n") * (MAX_PIPELINED - 1) + missing)
        statuses = [part.split()[0] for part in response.split(b"HTTP/1.1 ")[1:]]
        assert statuses == [b"200"] * (MAX_PIPELINED - 1) + [b"404"]
