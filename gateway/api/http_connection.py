"""One HTTP connection, kept from abuse: headers must come soon and be few, a stalled reader can be thrown out, whoever
sends ahead is heard when it leaves, and a body is never taken for the next request.

uvicorn leaves these to whoever stands in front of it; nobody does here.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.api import error_responses

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 100
MAX_AHEAD = 16  # requests that a caller may send before the first of them is answered ...
MAX_AHEAD_BYTES = 64 * 1024  # ... and what may be read of the last one's body
LINGER_S = 1.0  # how long a refused caller may still send


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with bounds. Subclass it with ``header_timeout_s`` set (``bounded``)."""

    header_timeout_s = 10.0

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._header_bytes = self._header_count = self._unfinished = 0
        self._refused = self._declining = False
        self._patience: asyncio.TimerHandle | None = None
        self._asked: list[RequestResponseCycle] = []
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._got_headers()
        for cycle in self._unanswered():  # uvicorn tells the last one only
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            if self._patience is None and (self.cycle is None or self.cycle.response_complete):
                self._expect_headers()  # the first bytes of a further request
            self._unset_keepalive_if_required()
            self._read(data)
            if self._patience is not None and not self._refused:  # all of it was headers, one without an end perhaps
                self._unfinished += len(data)
                if self._unfinished > MAX_HEADER_BYTES:
                    self._too_many()

    def _read(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stopped:
            if self._declining:
                # The parser takes an offer of another protocol for the end of the request, and what follows, its body
                # perhaps, for another one. Nothing else is spoken here: it is read again, without the offer.
                head = self._head_without_offer()
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
                self._read(head + data[stopped.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = self._header_count = 0
        self.scope["extensions"] = {"trident.abort": self.transport.abort}

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url), 0)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value), 1)

    def on_headers_complete(self) -> None:
        self._got_headers()
        self._declining = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if not self._refused and not self._declining:
            super().on_headers_complete()
            self._asked = [*self._unanswered(), self.cycle]
            if len(self._asked) > MAX_AHEAD:
                self.transport.abort()
            elif len(self._asked) > 1:
                self.flow.resume_reading()  # uvicorn stops here, and would not hear the caller leave

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)
            if len(self.cycle.body) > MAX_AHEAD_BYTES and len(self._unanswered()) > 1:
                self.transport.abort()

    def on_message_complete(self) -> None:
        if not self._refused and not self._declining:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg, "bad_request")

    def _count(self, size: int, headers: int) -> None:
        self._header_bytes += size
        self._header_count += headers
        if (self._header_bytes > MAX_HEADER_BYTES or self._header_count > MAX_HEADERS) and not self._refused:
            self._too_many()

    def _too_many(self) -> None:
        said = f"allowed are {MAX_HEADERS} headers of {MAX_HEADER_BYTES} bytes together"
        self._refuse(431, said, "headers_too_large")

    def _unanswered(self) -> list[RequestResponseCycle]:
        return [cycle for cycle in self._asked if not cycle.response_complete]

    def _expect_headers(self) -> None:
        self._got_headers()
        self._unfinished = 0
        self._patience = self.loop.call_later(self.header_timeout_s, self._late)

    def _got_headers(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _late(self) -> None:
        self._patience = None
        self._refuse(408, "the headers did not arrive in time", "timeout")

    def _refuse(self, status: int, message: str, code: str) -> None:
        self._refused = True
        if self.transport.is_closing():
            return
        _, headers, body = error_responses.plain(status, message, code)
        head = [b"HTTP/1.1 %d \r\n" % status, *(b"%b: %b\r\n" % header for header in headers)]
        head.append(b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body))
        self.transport.write(b"".join(head) + body)
        if (self.cycle is None or self.cycle.response_complete) and self.transport.can_write_eof():
            # A caller that still sends when we close loses the answer with the connection: what it sends is ignored.
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()


def bounded(header_timeout_s: float) -> type[Connection]:
    """The class of connections with this patience; uvicorn makes one of it for each."""
    members: dict[str, Any] = {"header_timeout_s": header_timeout_s}
    return type("BoundedConnection", (Connection,), members)
