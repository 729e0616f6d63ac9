"""The caller's side of a stream: heartbeats, and readers that stall or leave."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable

from gateway.config.settings import Settings
from gateway.watchdog import Watchdog

HEARTBEAT = b": keep-alive\n\n"
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold tokens back
]


class Reader:
    """Whoever reads one HTTP response. Used as ``async with Reader(...) as reader`` by the task that answers.

    If the caller goes, or takes nothing for ``stall_timeout_s``, that task is cancelled, and the block swallows this
    one cancellation; ``gone`` then says what happened. Between ``start_events`` and the end, silence is filled with
    heartbeats.
    """

    def __init__(self, scope: dict, receive: Callable, send: Callable, settings: Settings, watchdog: Watchdog) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._settings, self._watchdog = settings, watchdog
        self._task: asyncio.Task | None = None
        self._watch: asyncio.Task | None = None
        self._beats: set[asyncio.Task] = set()
        self._sending_since_s = 0.0
        self._sent_s = 0.0
        self._events = self._ended = False
        self.started = False
        self.gone = ""

    async def __aenter__(self) -> Reader:
        self._task = asyncio.current_task()
        self._watch = asyncio.ensure_future(self._receive())
        self._watch.add_done_callback(self._left)
        self._watchdog.add(self)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self._watchdog.discard(self)
        self._watch.remove_done_callback(self._left)
        for task in (self._watch, *self._beats):
            task.cancel()
        if self.gone == "stalled":
            # Closing would wait until the reader has taken what is buffered, which it never will.
            self._scope.get("extensions", {}).get("trident.abort", lambda: None)()
            await asyncio.sleep(0)
        if kind is None and self.gone:  # the cancellation is still on its way; nobody outside shall meet it
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        return kind is asyncio.CancelledError and bool(self.gone)

    async def start_events(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Status 200 and the headers of an event stream."""
        self.started = self._events = True
        await self._put({"type": "http.response.start", "status": 200, "headers": [*SSE_HEADERS, *headers]})

    async def write(self, data: bytes) -> None:
        await self._put({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes) -> None:
        """The last of it; one packet says both."""
        self._events, self._ended = False, True
        await self._put({"type": "http.response.body", "body": data, "more_body": False})

    async def respond(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        """A whole response at once."""
        self.started = self._ended = True
        length = (b"content-length", b"%d" % len(body))
        await self._put({"type": "http.response.start", "status": status, "headers": [*headers, length]})
        await self._put({"type": "http.response.body", "body": body, "more_body": False})

    def check(self, now_s: float) -> None:
        if self._sending_since_s:
            if now_s - self._sending_since_s > self._settings.stall_timeout_s:
                self._cut("stalled")
        elif self._events and now_s - self._sent_s > self._settings.heartbeat_s:
            self._sent_s = now_s
            beat = asyncio.ensure_future(self._beat())
            self._beats.add(beat)
            beat.add_done_callback(self._beats.discard)

    async def _beat(self) -> None:
        with contextlib.suppress(Exception):  # the stream ended meanwhile: its own task says what there is to say
            await self.write(HEARTBEAT)

    async def _put(self, message: dict) -> None:
        self._sending_since_s = time.monotonic()
        try:
            await self._send(message)
        finally:
            self._sending_since_s = 0.0
            self._sent_s = time.monotonic()

    def _left(self, _watch: asyncio.Task) -> None:
        if not self._ended:  # ASGI says "disconnected" behind every response that is complete, too
            self._cut("left")

    def _cut(self, why: str) -> None:
        if not self.gone:
            self.gone = why
            self._task.cancel()
