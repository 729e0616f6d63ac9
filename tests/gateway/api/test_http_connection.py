"""The bounds of one HTTP connection, over a real socket; hostile input is in tests/gateway/test_abuse.py."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from gateway.api import http_connection
from gateway.api.http_connection import MAX_HEADER_BYTES, MAX_HEADERS, MAX_PIPELINED, bounded
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.running import Running, gateway, until

LIVE = b"GET /health/live HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
FLOOD = b"x: " + b"y" * 8 * MAX_HEADER_BYTES


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


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_of_http_1_0_gets_no_chunks(stream: bool) -> None:
    body = b'{"model": "demo", "prompt": "one", "stream": %b}' % (b"true" if stream else b"false")
    head = POST.replace(b"1.1", b"1.0") + b"content-length: %d\r\n\r\n" % len(body)
    async with FakeReplica(lambda seen: Script((" a", " b"))) as replica, gateway(replica) as running:
        headers, _, content = (await received(running, head + body)).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in headers and b"connection: close" in headers
        if stream:
            assert all(line.startswith(b"data: ") for line in content.split(b"\n") if line)
            assert content.endswith(b"data: [DONE]\n\n")
        else:
            assert json.loads(content)["choices"][0]["text"] == " a b"


@pytest.mark.parametrize("rest", [LIVE, b"GET / HTTP/1.1\r\n" + FLOOD], ids=["late", "endless"])
async def test_headers_behind_a_request_under_way_have_the_same_bounds(rest: bytes) -> None:
    late, body = rest is LIVE, b'{"model": "demo", "prompt": "one", "stream": true}'
    running_request = POST + b"content-length: %d\r\n\r\n" % len(body) + body
    async with (
        FakeReplica(lambda seen: Script((" a", " b"), stall_after=1)) as replica,
        gateway(replica, header_timeout_s=0.5 if late else 60.0, idle_timeout_s=60.0) as running,
    ):
        with contextlib.suppress(ConnectionError):
            response = await asyncio.wait_for(received(running, running_request + rest), 20)
            assert response.count(b"HTTP/1.1 ") == 1  # none within the other's response
        await until(lambda: replica.counts.running == 0 and not running.service.live)


@pytest.mark.parametrize("rest", [b"0\r\nx: y", b"0\r\n" + FLOOD], ids=["late", "endless"])
async def test_trailers_have_the_bounds_of_headers(rest: bytes) -> None:
    async with gateway(header_timeout_s=60.0 if len(rest) > 99 else 0.2, body_timeout_s=60.0) as running:
        with contextlib.suppress(ConnectionError):
            response = await asyncio.wait_for(received(running, CHUNKED + b"2\r\n{}\r\n" + rest), 20)
            assert response.split()[1] in (b"408", b"431")


async def test_a_chunked_body_with_trailers_and_a_request_behind_it_is_within_the_bounds() -> None:
    body = b'{"model": "demo", "prompt": "' + b"a" * 200_000 + b'"}'
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:9], body[9:]))
    missing = b"GET /missing HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    async with FakeReplica() as replica, gateway(replica, header_timeout_s=1.0) as running:
        response = await received(running, CHUNKED + chunks + b"0\r\nx: y\r\n\r\n\r\n" + LIVE + b"\r\n" + missing)
        statuses = [part.split()[0] for part in response.split(b"HTTP/1.1 ")[1:]]
        assert statuses == [b"200", b"200", b"404"]


async def test_a_body_that_pauses_between_its_chunks_is_not_late() -> None:
    body = json.dumps({"model": "demo", "prompt": "one", "max_tokens": 1}).encode()
    async with FakeReplica() as replica, gateway(replica, header_timeout_s=0.2) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(CHUNKED + b"%x\r\n%b\r\n" % (len(body), body))
        await asyncio.sleep(0.6)
        writer.write(b"0\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), 20)).split()[1] == b"200"
        writer.close()
