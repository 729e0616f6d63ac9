"""Targets that read scripted tokens as undecoded bytes, for loads of thousands of streams: KServe gRPC, OpenAI chat.

As much of HTTP is there as answers need that are a chunked event stream, or an error with a content-length.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from typing import cast

import grpc
import grpc.aio

from benchmarks.gateway import script
from benchmarks.openai_target import http_error
from benchmarks.record import Record
from benchmarks.target import Target
from benchmarks.workload import PlannedRequest
from clients.wire import failures, infer_request
from clients.wire.request import build
from contract.errors import EngineFailed, TridentError, Unavailable

GRPC_TIMEOUT_S = 600.0
_ERROR_TAG = 0x0A  # ModelStreamInferResponse.error_message
_CHANNEL = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
_STATUS = re.compile(rb"^HTTP/1\.1 (\d+)")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_RETRY_AFTER = re.compile(rb"\r\nretry-after: *(\d+)", re.IGNORECASE)
_DONE, _LAST_CHUNK = b"data: [DONE]", b"0\r\n\r\n"
SOURCES = 4  # loopback addresses that connections come from, so that no address runs out of ports


class GrpcTarget(Target):
    """A KServe gRPC server of scripted tokens; the streams share ``connections`` connections."""

    def __init__(self, url: str, connections: int = 4) -> None:
        self._url = url
        self._channels = [grpc.aio.insecure_channel(url, _CHANNEL) for _ in range(connections)]
        self._calls = itertools.cycle([channel.unary_stream(infer_request.GENERATE) for channel in self._channels])

    async def send(self, request: PlannedRequest, record: Record) -> None:
        payload = infer_request.generation(build(request.prompt, max_tokens=request.max_tokens), "ensemble")
        failed = b""
        try:
            async for data in next(self._calls)(payload, timeout=GRPC_TIMEOUT_S):
                if data[0] == _ERROR_TAG:
                    failed = data
                script.record_tokens(data, record)
        except grpc.aio.AioRpcError as exc:
            raise failures.from_call(exc, self._url) from exc
        if failed:
            raise EngineFailed(f"error in the stream: {failed[:200].decode(errors='replace')}")
        if (tokens := record.tokens) != request.max_tokens:
            raise EngineFailed(f"the stream ended after {tokens} of {request.max_tokens} tokens")
        record.finish_reason = "length"

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


class HttpTarget(Target):
    """An OpenAI-compatible server of scripted tokens at HOST:PORT. keep_alive: a connection serves several requests."""

    def __init__(self, url: str, model: str = "demo", keep_alive: bool = True) -> None:
        self.host, _, port = url.partition(":")
        self.port, self._model, self._keep_alive = int(port), model, keep_alive
        self._head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {url}\r\nauthorization: Bearer bench\r\n"
            "content-type: application/json\r\ncontent-length: "
        )
        self._idle: list[_Connection] = []
        self._sources = itertools.cycle(range(1, SOURCES + 1))

    async def send(self, request: PlannedRequest, record: Record) -> None:
        message = {"role": "user", "content": request.prompt}
        options = {"max_tokens": request.max_tokens, "stream": True}
        body = json.dumps({"model": self._model, "messages": [message]} | options)
        try:
            connection = self._idle.pop() if self._idle else await self._connect()
            try:
                await connection.request(f"{self._head}{len(body)}\r\n\r\n{body}".encode(), record)
            finally:
                if self._keep_alive and connection.usable:
                    self._idle.append(connection)
                else:
                    connection.close()
        except OSError as exc:
            raise Unavailable(f"{self.host}:{self.port}: {exc.strerror or exc}") from exc

    async def _connect(self) -> _Connection:
        # With both ends known the kernel chooses the port at connect, and may use one port for several addresses.
        source = (f"127.0.0.{next(self._sources)}", 0) if self.host == "127.0.0.1" else None
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self.host, self.port, local_addr=source)
        return connection

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.usable = True
        self._record: Record | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def request(self, data: bytes, record: Record) -> asyncio.Future[None]:
        """Send a request; the future resolves when the answer has ended, or raises its TridentError."""
        self._record, self._rest, self._status = record, b"", 0
        self._answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return self._answered

    def data_received(self, data: bytes) -> None:
        if self._record is None:
            self.usable = False  # data without a request
            return
        data = self._rest + data
        if not self._status:
            head, separator, rest = data.partition(b"\r\n\r\n")
            if not separator:
                self._rest = data
                return
            status = _STATUS.match(head)
            if status is None:
                self._end(EngineFailed(f"the answer is not HTTP/1.1: {head[:80]!r}"))
                return
            self._status, self._head, data = int(status[1]), head, rest
        if self._status == 200:
            self._read_events(data, self._record)
        else:
            self._read_error(data)

    def _read_events(self, data: bytes, record: Record) -> None:
        recorded = script.record_tokens(data, record)
        if not data.endswith(_LAST_CHUNK):
            # Keep what may be the beginning of a stamp or of the end, never a recorded stamp.
            self._rest = data[max(recorded, len(data) - 40) :]
        elif b'"error"' in data:
            self._end(EngineFailed("error event in the stream"))
        elif _DONE not in data:
            self._end(EngineFailed("the stream ended without [DONE]"))
        else:
            record.finish_reason = "length"
            self._end(None)

    def _read_error(self, data: bytes) -> None:
        length = _LENGTH.search(self._head)
        if length is None or len(data) < int(length[1]):
            self._rest = data
            return
        retry_after = _RETRY_AFTER.search(self._head)
        text = data[:200].decode(errors="replace")
        self._end(http_error(self._status, text, float(retry_after[1]) if retry_after else None))

    def _end(self, error: TridentError | None) -> None:
        self._record = None
        if self._answered.done():
            return
        if error is None:
            self._answered.set_result(None)
        else:
            self._answered.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if self._record is not None:
            self._end(Unavailable("connection lost"))

    def close(self) -> None:
        self._transport.close()
