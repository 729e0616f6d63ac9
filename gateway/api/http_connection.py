"""uvicorn's HTTP protocol with bounds: on the time, number and bytes of headers, and on pipelined requests.

It also lets a response abort the connection of a stalled client, notices the disconnect of a client that pipelines,
never reads a body as the next request, and sends no chunks to a client of HTTP/1.0. uvicorn leaves these to a proxy in
front of it; there may be none here.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.api import error_responses

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 100
MAX_PIPELINED = 16  # requests that a client may send before the first response is complete ...
MAX_PIPELINED_BYTES = 64 * 1024  # ... and bytes of the last one's body
LINGER_S = 1.0  # how long the input of a rejected client is discarded


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with bounds. ``bounded`` makes a subclass with ``header_timeout_s``."""

    header_timeout_s = 10.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        self._header_bytes = self._header_count = self._incomplete_bytes = 0
        self._rejected = self._ignoring_upgrade = False
        self._header_timer: asyncio.TimerHandle | None = None
        self._pipelined: list[RequestResponseCycle] = []
        super().connection_made(transport)
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        for cycle in self._incomplete():  # uvicorn notifies the last one only
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._rejected:
            if self.cycle is None or self.cycle.response_complete:
                self._start_header_timer()  # the first bytes of a further request
            self._unset_keepalive_if_required()
            before = self._header_timer
            self._read(data)
            if before is not None and self._header_timer is before and not self._rejected:  # all of it was headers
                self._incomplete_bytes += len(data)
                if self._incomplete_bytes > MAX_HEADER_BYTES:
                    self._reject_headers()

    def _read(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stopped:
            if self._ignoring_upgrade:
                # The parser takes an ``upgrade`` header for the end of the request and would parse its body as the next
                # request. No other protocol is served here: the head is parsed again without that header.
                head = self._head_without_upgrade()
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
                self._read(head + data[stopped.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = self._header_count = 0
        self._start_header_timer()  # while a response is under way nothing else starts it
        self.scope["extensions"] = cast("dict[str, dict[object, object]]", {"trident.abort": self.transport.abort})

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url), 0)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value), 1)

    def on_headers_complete(self) -> None:
        self._stop_header_timer()
        self._ignoring_upgrade = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if not self._rejected and not self._ignoring_upgrade:
            super().on_headers_complete()
            if self.parser.get_http_version() == "1.0":
                _send_without_chunks(self.cycle)
            self._pipelined = [*self._incomplete(), self.cycle]
            if len(self._pipelined) > MAX_PIPELINED:
                self.transport.abort()
            elif len(self._pipelined) > 1:
                self.flow.resume_reading()  # uvicorn pauses here and would not notice a disconnect

    def on_chunk_header(self) -> None:
        self._start_header_timer()  # trailers follow the last one

    def on_body(self, body: bytes) -> None:
        if not self._rejected:
            self._end_trailers()
            super().on_body(body)
            if len(self.cycle.body) > MAX_PIPELINED_BYTES and len(self._incomplete()) > 1:
                self.transport.abort()

    def on_message_complete(self) -> None:
        if not self._rejected and not self._ignoring_upgrade:
            self._end_trailers()
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._reject(400, msg, "bad_request")

    def _count(self, size: int, headers: int) -> None:
        self._header_bytes += size
        self._header_count += headers
        if (self._header_bytes > MAX_HEADER_BYTES or self._header_count > MAX_HEADERS) and not self._rejected:
            self._reject_headers()

    def _reject_headers(self) -> None:
        problem = f"headers: must be at most {MAX_HEADERS} of {MAX_HEADER_BYTES} bytes together"
        self._reject(431, problem, "headers_too_large")

    def _incomplete(self) -> list[RequestResponseCycle]:
        return [cycle for cycle in self._pipelined if not cycle.response_complete]

    def _start_header_timer(self) -> None:
        """Start it unless it runs."""
        if self._header_timer is None:
            self._incomplete_bytes = 0
            self._header_timer = self.loop.call_later(self.header_timeout_s, self._on_header_timeout)

    def _end_trailers(self) -> None:
        if not self.cycle.response_complete:  # what is sent behind a response stays bounded until the next headers end
            self._stop_header_timer()

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        if self.flow.read_paused:  # the rest may have arrived and is not read yet
            self._start_header_timer()
        else:
            self._reject(408, f"the headers did not arrive within {self.header_timeout_s:g} s", "timeout")

    def _reject(self, status: int, message: str, code: str) -> None:
        self._rejected = True
        if self.transport.is_closing():
            return
        incomplete = self._incomplete()
        if not any(cycle.response_started for cycle in incomplete):  # else this would be read as a part of that
            _, headers, body = error_responses.plain(status, message, code)
            head = [b"HTTP/1.1 %d \r\n" % status, *(b"%b: %b\r\n" % header for header in headers)]
            head.append(b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body))
            self.transport.write(b"".join(head) + body)
        if not incomplete and self.transport.can_write_eof():
            # A client that still sends when the connection closes loses the response: its input is discarded first.
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """End a body of unknown length with the connection: uvicorn sends chunks, which HTTP/1.0 does not have."""
    send, sized = cycle.send, True

    async def sent(message: Any) -> None:
        nonlocal sized
        if message["type"] == "http.response.start":
            sized = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not sized:
                cycle.chunked_encoding = False
        elif not sized:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = sent  # type: ignore[method-assign]  # uvicorn has no hook for it


def bounded(header_timeout_s: float) -> type[Connection]:
    """Return the protocol class for this timeout; uvicorn makes an instance for each connection."""
    members: dict[str, Any] = {"header_timeout_s": header_timeout_s}
    return type("BoundedConnection", (Connection,), members)
