"""The byte-level targets, against the scripted replica and a server that sends scripted bytes."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from benchmarks.gateway import contenders, script
from benchmarks.gateway.byte_target import GrpcTarget, HttpTarget
from benchmarks.record import Record
from benchmarks.workload import PlannedRequest
from contract.errors import EngineFailed, NotFound, Overloaded, TridentError, Unavailable
from contract.generation import FinishReason
from tests.fakes.replica import Script

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"data: [DONE]\n\n\r\n0\r\n\r\n"


def error(status, more=b"", body=b"no"):
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n%b\r\n%b" % (status, len(body), more, body)


@asynccontextmanager
async def server(*parts):
    """Answer every request with ``parts``, one write each; yields HOST:PORT and the requests' bytes."""
    requests, writers, handlers = [], [], []

    async def answer(reader, writer):
        writers.append(writer)
        handlers.append(asyncio.current_task())
        while not reader.at_eof():
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            requests.append(head + await reader.readexactly(length))
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.005)
            if not parts:
                break
        writer.close()

    running = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with running:
        yield f"127.0.0.1:{running.sockets[0].getsockname()[1]}", requests
        for writer in writers:
            writer.close()
        await asyncio.wait(handlers)
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


async def send(target, tokens=4):
    record = Record(0, 0.0)
    try:
        await target.send(PlannedRequest(0, "pace 0 0 0", tokens), record)
    finally:
        await target.close()
    return record


@pytest.mark.slow
async def test_stamps_are_counted_once_however_the_bytes_are_split():
    stamps = b"".join(b"data: " + script.stamp() + b"\n\n" for _ in range(6)) + END
    for size in (1, 7, 18, 50, 1000):
        parts = [stamps[at : at + size] for at in range(0, len(stamps), size)]
        async with server(HEAD, *parts) as (url, _):
            record = await send(HttpTarget(url))
        assert record.tokens == 6 and record.finish_reason == "length", size


async def test_a_connection_and_the_key_are_used_for_every_request():
    async with server(HEAD, script.stamp() + END) as (url, requests):
        target = HttpTarget(url)
        for _ in range(2):
            await target.send(PlannedRequest(0, "p", 1), Record(0, 0.0))
        assert len(target._idle) == 1 and all(b"authorization: Bearer bench" in request for request in requests)
        await target.close()


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ([error(429, b"retry-after: 3\r\n")], Overloaded),
        ([error(404)], NotFound),
        ([error(500, body=b"it broke")[:-3], b"oke"], EngineFailed),
        ([HEAD, script.stamp() + b'{"error": 1}' + END], EngineFailed),
        ([HEAD, script.stamp() + b"0\r\n\r\n"], EngineFailed),
        ([b"HTTP/9 what\r\n\r\n"], EngineFailed),
        ([], Unavailable),
    ],
)
async def test_what_is_no_complete_answer_raises(parts, kind):
    async with server(*parts) as (url, _):
        with pytest.raises(TridentError) as raised:
            await send(HttpTarget(url))
    assert type(raised.value) is kind
    if kind is Overloaded:
        assert raised.value.retry_after_s == 3


async def test_a_server_that_does_not_run_is_unavailable(unused_tcp_port):
    with pytest.raises(Unavailable, match=str(unused_tcp_port)):
        await send(HttpTarget(f"127.0.0.1:{unused_tcp_port}"))


@pytest.mark.slow
async def test_every_token_of_the_scripted_replica_is_recorded(tmp_path):
    with contenders.scripted("replica", tmp_path) as url:
        record = await send(GrpcTarget(url), 5)
    assert record.tokens == len(record.transit_s) == 5 and record.finish_reason == "length"


@pytest.mark.slow
async def test_errors_and_missing_tokens_raise(replica, unused_tcp_port):
    full = Script(status_after=0, status=(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", ()))
    with pytest.raises(Overloaded):
        await send(GrpcTarget(replica(lambda seen: full).url), 5)
    with pytest.raises(EngineFailed, match="ended after 0 of 5 tokens"):
        await send(GrpcTarget(replica(lambda seen: Script(("a",), FinishReason.LENGTH)).url), 5)
    with pytest.raises(Unavailable):
        await send(GrpcTarget(f"127.0.0.1:{unused_tcp_port}"), 5)
