"""An OpenAI-compatible upstream at the least CPU in Python, for proxies that do not speak KServe gRPC.

    python -m benchmarks.gateway.scripted_openai        # prints its port, serves until its input closes

Every ``POST`` with a content-length is answered with chat chunks, paced by its prompt (``script``).
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from typing import cast

import uvloop

from benchmarks.child_process import serve_until_input_closes
from benchmarks.gateway import script

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Upstream(asyncio.Protocol):
    """One connection; requests are served one after the other."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._data = b""
        self._answering: asyncio.Task | None = None

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, sep, body = self._data.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        size = int(length[1]) if length else 0
        if sep and len(body) >= size:
            self._data = body[size:]
            self._answering = asyncio.ensure_future(self._answer(body[:size]))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answering is not None:
            self._answering.cancel()

    async def _answer(self, body: bytes) -> None:
        tokens = json.loads(body or b"{}").get("max_tokens", 16)
        pace, write = script.pace_of(body), self._transport.write
        write(_HEAD)
        write(chunk({"role": "assistant", "content": ""}))
        before, after = chunk({"content": "@" * script.STAMP_SIZE}).split(b"@" * script.STAMP_SIZE)
        for due_s in pace.instants(tokens, time.monotonic(), random.Random()):
            wait_s = due_s - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            write(b"%b%b%b" % (before, script.stamp(), after))
        write(chunk({}, "length") + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def chunk(delta: dict, reason: str | None = None) -> bytes:
    """Encode one event as one chunk of the body."""
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    event = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "demo", "choices": [choice]}
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", 0, backlog=4096)
    await serve_until_input_closes(server.sockets[0].getsockname()[1])
    server.close()


if __name__ == "__main__":
    uvloop.run(serve())
