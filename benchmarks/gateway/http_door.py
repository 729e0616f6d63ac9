"""A caller of an OpenAI-style door that costs next to nothing: bytes on a socket, read as they come.

It knows as much of HTTP as it needs of servers that answer ``POST`` with an event stream in chunks, or a refusal with a
length. Connections are kept and used again, one request at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re

from benchmarks.gateway.asked import Asked
from benchmarks.gateway.script import STAMP_SIZE, Pace

_STATUS = re.compile(rb"^HTTP/1\.1 (\d+)")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_DONE, _LAST_CHUNK = b"data: [DONE]", b"0\r\n\r\n"
SOURCES = 4  # loopback addresses that connections come from, so that no address runs out of ports


class HttpDoor:
    """``ask`` for a stream; ``url`` is HOST:PORT. kept: connections are used again, else each request has its own."""

    def __init__(self, url: str, model: str, kept: bool = True) -> None:
        self.host, _, port = url.partition(":")
        self.port, self._model, self._kept = int(port), model, kept
        self._free: list[_Connection] = []
        self._sources = itertools.cycle(range(1, SOURCES + 1))

    async def ask(self, pace: Pace, tokens: int) -> Asked:
        asked = Asked()
        turn = {"role": "user", "content": pace.prompt()}
        body = json.dumps({"model": self._model, "messages": [turn], "max_tokens": tokens, "stream": True})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self.host}:{self.port}\r\nauthorization: Bearer bench\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        try:
            connection = self._free.pop() if self._free else await self._connect()
            await connection.ask((head + body).encode(), asked)
        except OSError as exc:
            asked.over(f"{type(exc).__name__}: {exc.strerror}")
            return asked
        if self._kept and connection.usable:
            self._free.append(connection)
        else:
            connection.close()
        return asked

    async def _connect(self) -> _Connection:
        # The kernel picks the port when both ends are known, and only then may one port serve several of them.
        source = (f"127.0.0.{next(self._sources)}", 0) if self.host == "127.0.0.1" else None
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self.host, self.port, local_addr=source)
        return connection

    async def close(self) -> None:
        for connection in self._free:
            connection.close()


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.usable = True

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._asked: Asked | None = None

    def ask(self, request: bytes, asked: Asked) -> asyncio.Future:
        """Resolves when the answer is over, whatever it was."""
        self._asked, self._left = asked, b""
        self._status = 0
        self._over = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._over

    def data_received(self, data: bytes) -> None:
        if self._asked is None:
            self.usable = False  # it said something that nobody asked for
            return
        data = self._left + data
        if not self._status:
            head, sep, rest = data.partition(b"\r\n\r\n")
            if not sep:
                self._left = data
                return
            self._status = int(_STATUS.match(head)[1])
            self._head = head
            data = rest
        if self._status == 200:
            self._events(data)
        else:
            self._refusal(data)

    def _events(self, data: bytes) -> None:
        self._asked.read(data)
        if data.endswith(_LAST_CHUNK):
            said_done = _DONE in data
            failed = b'"error"' in data
            self._end("ok" if said_done and not failed else "error event" if failed else "ended without [DONE]")
            return
        # What may be the first half of a token or of the end stays; a token that was counted does not.
        end = data.rfind(b"@")
        self._left = (
            data[max(end + STAMP_SIZE, len(data) - 40) :] if end >= 0 and len(data) - end >= STAMP_SIZE else data
        )

    def _refusal(self, data: bytes) -> None:
        length = _LENGTH.search(self._head)
        if length is not None and len(data) >= int(length[1]):
            hinted = b"\r\nretry-after:" in self._head.lower()
            self._end("refused" if self._status == 429 else f"status {self._status}", hinted)
        else:
            self._left = data

    def _end(self, end: str, hinted: bool = False) -> None:
        self._asked.over(end, hinted)
        self._asked = None
        if not self._over.done():
            self._over.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if self._asked is not None:
            self._end("connection lost")

    def close(self) -> None:
        self._transport.close()
