"""Write HTTP responses over ASGI: heartbeats, stall detection and client disconnects.

What is sent is the caller's: bytes, or an encoder of stream items (``sse.EventEncoder``).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, Protocol, cast

from starlette.types import Message, Receive, Scope, Send

from contract.errors import TridentError
from gateway.admission.fair_admission import HELD
from gateway.config.settings import Settings
from gateway.watchdog import Watchdog

Headers = list[tuple[bytes, bytes]]

HEARTBEAT = b": keep-alive\n\n"
WAITING = b": waiting\n\n"
EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold tokens back
]


class ClosableIterator(Protocol):
    """An asynchronous iterator that is closed by its reader."""

    def __aiter__(self) -> AsyncIterator[Any]: ...
    async def __anext__(self) -> Any: ...
    async def aclose(self) -> None: ...


class Encoder(Protocol):
    """Encodes the items of a stream as server-sent events; none is empty."""

    def encode(self, item: Any) -> bytes: ...
    def end(self) -> bytes: ...
    def failed(self, error: TridentError) -> bytes: ...


class ResponseStream:
    """Write one HTTP response: ``async with ResponseStream(...) as response``, by the task that handles it.

    If the client disconnects, or reads nothing for ``stall_timeout_s``, that task is cancelled, and the block swallows
    this one cancellation. Between the start and the end of an event stream, silence is filled with heartbeats.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, settings: Settings, watchdog: Watchdog) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._settings, self._watchdog = settings, watchdog
        self._sending_since_s = self._sent_s = 0.0
        self._streaming = self._ended = False
        self._heartbeats: set[asyncio.Task[None]] = set()
        self.started = False  # whether the status was sent
        self.aborted = ""  # why the task was cancelled: "disconnected" or "stalled"
        self.encoder: Encoder | None = None

    async def __aenter__(self) -> ResponseStream:
        self._task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._disconnect = asyncio.ensure_future(self._receive())
        self._disconnect.add_done_callback(self._on_disconnect)
        self._watchdog.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._watchdog.discard(self)
        self._disconnect.remove_done_callback(self._on_disconnect)
        self._disconnect.cancel()
        for task in self._heartbeats:
            task.cancel()
        if self.aborted == "stalled":
            # A graceful close would wait until the client has read what is buffered, which it does not.
            self._scope.get("extensions", {}).get("trident.abort", lambda: None)()
            await asyncio.sleep(0)
        if kind is None and self.aborted:  # the cancellation is not delivered yet; it must not reach the caller
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        return kind is asyncio.CancelledError and bool(self.aborted)

    async def respond(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        """Send a complete response."""
        self.started = self._ended = True
        length = (b"content-length", b"%d" % len(body))
        await self._put({"type": "http.response.start", "status": status, "headers": [*headers, length]})
        await self._put({"type": "http.response.body", "body": body, "more_body": False})

    async def send_events(self, headers: Callable[[], Headers], items: ClosableIterator, encoder: Encoder) -> None:
        """Send an event stream of ``items`` and close them, whatever happens.

        The status is sent with the first item, so that an error before it can still be one, or after ``heartbeat_s``,
        or at once if the request is held. headers: called then, and at the end: what is new is sent as comments.
        """
        self.encoder = encoder
        first = asyncio.ensure_future(anext(items, None))
        try:
            held = any(name.decode() == HELD for name, _ in headers())
            done, _ = await asyncio.wait((first,), timeout=0.0 if held else self._settings.heartbeat_s)
            if done:
                item = first.result()
            sent = headers()
            self.started = self._streaming = True
            all_headers = [*EVENT_STREAM_HEADERS, *sent]
            await self._put({"type": "http.response.start", "status": 200, "headers": all_headers})
            if not done:
                await self._write(WAITING)
                item = await first
            if item is not None:
                if data := encoder.encode(item):
                    await self._write(data)
                async for item in items:
                    if data := encoder.encode(item):
                        await self._write(data)
            late = (b": %s: %s\n\n" % header for header in headers() if header not in sent)
            await self.end(b"".join(late) + encoder.end())
        finally:
            if not first.done():
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            elif not first.cancelled():
                first.exception()  # else asyncio logs that it was never retrieved
            await items.aclose()

    async def end(self, data: bytes) -> None:
        """Send the last events of a stream and end it, in one packet."""
        self._streaming, self._ended = False, True
        await self._put({"type": "http.response.body", "body": data, "more_body": False})

    def check(self, now_s: float) -> None:
        """Abort a stalled response; send a heartbeat on a silent stream. Called by the watchdog."""
        if self._sending_since_s:
            if now_s - self._sending_since_s > self._settings.stall_timeout_s:
                self._abort("stalled")
        elif self._streaming and now_s - self._sent_s > self._settings.heartbeat_s:
            self._sent_s = now_s
            heartbeat = asyncio.ensure_future(self._send_heartbeat())
            self._heartbeats.add(heartbeat)
            heartbeat.add_done_callback(self._heartbeats.discard)

    def _write(self, data: bytes) -> Awaitable[None]:
        return self._put({"type": "http.response.body", "body": data, "more_body": True})

    async def _send_heartbeat(self) -> None:
        with contextlib.suppress(Exception):  # the stream ended meanwhile; its own task reports why
            await self._write(HEARTBEAT)

    async def _put(self, message: Message) -> None:
        if self.aborted:  # and the cancellation was lost: before Python 3.12 wait_for may swallow one
            raise asyncio.CancelledError
        self._sending_since_s = self._sent_s = time.monotonic()
        try:
            await self._send(message)
        finally:
            self._sending_since_s = 0.0

    def _on_disconnect(self, _: asyncio.Task[Message]) -> None:
        if not self._ended:  # ASGI reports a disconnect after every complete response, too
            self._abort("disconnected")

    def _abort(self, reason: str) -> None:
        if not self.aborted:
            self.aborted = reason
            self._task.cancel()
