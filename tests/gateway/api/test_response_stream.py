"""One HTTP response over a scripted ASGI server: order, heartbeats, stalls and disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from contract.errors import EngineFailed
from gateway.api.response_stream import HEARTBEAT, WAITING, ResponseStream
from gateway.config.settings import Settings
from gateway.watchdog import Watchdog
from tests.gateway.running import until

STATUS = (b"x-header", b"1")


class Client:
    """An ASGI server's side: records messages; ``reading`` holds sends up; ``leave`` disconnects."""

    def __init__(self, **settings: float) -> None:
        self.sent: list[Any] = []
        self.reading, self.left = asyncio.Event(), asyncio.Event()
        self.reading.set()
        self.aborts = 0
        self.settings = Settings(**settings)  # type: ignore[arg-type]
        self.watchdog = Watchdog(1.0)

    async def receive(self) -> Any:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reading.wait()
        self.sent.append(message)

    def abort(self) -> None:
        self.aborts += 1

    def response(self) -> ResponseStream:
        scope = {"extensions": {"trident.abort": self.abort}}
        return ResponseStream(scope, self.receive, self.send, self.settings, self.watchdog)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent[1:]]


class Upper:
    """Encodes texts; a dash has no event."""

    def encode(self, item: str) -> bytes:
        return b"" if item == "-" else item.upper().encode()

    def end(self) -> bytes:
        return b"END"


class Items:
    """Texts that come when ``go`` is set, and whether their generator was closed."""

    def __init__(self, *texts: str, failure: Exception | None = None) -> None:
        self.texts, self.failure, self.go, self.closed = texts, failure, asyncio.Event(), False

    async def stream(self) -> AsyncGenerator[str, None]:
        try:
            await self.go.wait()
            for text in self.texts:
                yield text
            if self.failure:
                raise self.failure
        finally:
            self.closed = True


async def test_events_come_in_order_behind_the_status_and_the_last_packet_ends_the_response() -> None:
    client, items = Client(), Items("a", "-", "b")
    items.go.set()
    async with client.response() as response:
        await response.send_events(lambda: [STATUS], items.stream(), Upper())
    assert client.sent[0]["status"] == 200 and STATUS in client.sent[0]["headers"]
    assert client.bodies == [b"A", b"B", b"END"]
    assert [message["more_body"] for message in client.sent[1:]] == [True, True, False]
    assert items.closed and response.aborted == "" and len(client.watchdog) == 0


async def test_an_error_before_the_first_item_sends_nothing() -> None:
    client, items = Client(), Items(failure=EngineFailed("it broke"))
    items.go.set()
    with pytest.raises(EngineFailed):
        async with client.response() as response:
            await response.send_events(lambda: [], items.stream(), Upper())
    assert not response.started and client.sent == [] and items.closed


async def test_an_error_behind_the_first_item_leaves_the_stream_open_for_an_error_event() -> None:
    client, items = Client(), Items("a", failure=EngineFailed("it broke"))
    items.go.set()
    async with client.response() as response:
        with pytest.raises(EngineFailed):
            await response.send_events(lambda: [], items.stream(), Upper())
        assert response.started
        await response.end(b"ERROR")
    assert client.bodies == [b"A", b"ERROR"]


async def test_a_client_that_waits_long_gets_the_status_and_heartbeats() -> None:
    client, items = Client(heartbeat_s=0.01), Items("a")
    async with client.response() as response:
        sending = asyncio.ensure_future(response.send_events(lambda: [], items.stream(), Upper()))
        await until(lambda: len(client.sent) == 2)
        for _ in range(2):
            response.check(asyncio.get_running_loop().time() + 1)
            await asyncio.sleep(0)
        items.go.set()
        await sending
    assert client.bodies == [WAITING, HEARTBEAT, HEARTBEAT, b"A", b"END"]


async def test_no_heartbeat_comes_before_the_status_or_behind_the_end() -> None:
    client = Client()
    async with client.response() as response:
        response.check(1e9)
        await response.respond(404, [], b"gone")
        response.check(1e9)
        await asyncio.sleep(0)
    assert client.bodies == [b"gone"] and (b"content-length", b"4") in client.sent[0]["headers"]


async def test_a_disconnect_cancels_the_handler_and_closes_the_items() -> None:
    client, items = Client(), Items("a")
    client.left.set()
    async with client.response() as response:
        await response.send_events(lambda: [], items.stream(), Upper())
    assert response.aborted == "disconnected" and client.sent == [] and client.aborts == 0


async def test_a_disconnect_whose_cancellation_is_lost_ends_the_response_at_its_next_write() -> None:
    """asyncio.wait_for may swallow one before Python 3.12."""
    client = Client()
    async with client.response() as response:
        client.left.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(10)
        await response.respond(200, [], b"for nobody")
        raise AssertionError("it was written")
    assert response.aborted == "disconnected" and client.sent == []


async def test_a_client_that_reads_nothing_is_cut_off() -> None:
    client, items = Client(), Items("a")
    items.go.set()
    client.reading.clear()
    started = asyncio.get_running_loop().time()
    async with client.response() as response:
        asyncio.get_running_loop().call_later(0.02, lambda: response.check(started + 1))
        asyncio.get_running_loop().call_later(0.04, lambda: response.check(started + 1000))
        await response.send_events(lambda: [], items.stream(), Upper())
    assert response.aborted == "stalled" and items.closed and client.aborts == 1


async def test_a_cancellation_from_elsewhere_is_not_swallowed() -> None:
    client, items = Client(), Items("a")

    async def handle() -> None:
        async with client.response() as response:
            await response.send_events(lambda: [], items.stream(), Upper())

    task = asyncio.ensure_future(handle())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert items.closed
