"""Open one asynchronous gRPC channel to one server, and make its calls."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import grpc.aio

from clients.wire import failures, infer_request, infer_response, response_reader, status
from clients.wire.connection import Connection
from clients.wire.request import sendable_id
from clients.wire.status import UnaryCall
from clients.wire.stream_model import ASK_TIMEOUT_S, PackedEnsemble, StreamModel
from contract import packed_delta
from contract.errors import TridentError

Metadata = tuple[tuple[str, str], ...]


class AsyncChannel:
    """A channel that opens with its first call, on the running event loop, and again if it is used on another one.

    shared: whether gRPC may use a TCP connection that another channel of this process opened to the same server. If
    that one could not connect, a call fails at once until its back-off is over, even when the server is there by now.
    Raises InvalidArgument for TLS files that cannot be used.
    """

    def __init__(self, connection: Connection, shared: bool = True) -> None:
        self.connection, self.url = connection, connection.url
        self._options = connection.options() + ([] if shared else [("grpc.use_local_subchannel_pool", 1)])
        self._credentials = connection.tls.credentials() if connection.tls else None
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # that the channel belongs to
        self._generate: grpc.aio.UnaryStreamMultiCallable | None = None  # of ``_channel``
        self._packed = PackedEnsemble()
        self._discovery: asyncio.Task | None = None

    def generate(self, payload: bytes, timeout_s: float, metadata: Metadata) -> grpc.aio.UnaryStreamCall:
        """Send one serialised ModelInferRequest; the call yields serialised ModelStreamInferResponses."""
        self._opened()
        assert self._generate is not None
        return self._generate(payload, timeout=timeout_s, metadata=metadata)

    async def call(self, call: UnaryCall, timeout_s: float, metadata: Metadata | None = None) -> bytes:
        """Return the response to one unary call. metadata: None for the connection's own. Raises TridentError."""
        try:
            method = self._opened().unary_unary(call.method)
            own = self.connection.call_metadata() if metadata is None else metadata
            return await method(call.payload, timeout=timeout_s, metadata=own)
        except grpc.aio.AioRpcError as exc:
            raise failures.from_call(exc, self.url) from exc

    async def model_ready(self, model: str, timeout_s: float) -> bool:
        """Return whether one model is loaded and ready. Raises TridentError."""
        return status.read_flag(await self.call(status.model_ready(model), timeout_s))

    def model(self, of: StreamModel) -> str:
        """Return the model for an attempt of a request here. Asks the server in the background which ones it has."""
        if of.chooses and self._packed.due():
            self._discovery = asyncio.ensure_future(self._ask())
        return of.at(self._packed)

    async def stop(self, request_id: str, timeout_s: float) -> None:
        """End a running request in the engine; an engine ignores an id that it does not know. Raises TridentError."""
        payload = infer_request.stop(sendable_id(request_id))
        decode = infer_response.ResponseDecoder().decode
        try:
            async for data in self.generate(payload, timeout_s, self.connection.call_metadata(request_id)):
                response_reader.read_message(decode, data)
        except grpc.aio.AioRpcError as exc:
            raise failures.from_call(exc, self.url) from exc

    async def close(self) -> None:
        channel, self._channel, self._generate = self._channel, None, None
        if self._discovery is not None and self._discovery.get_loop() is asyncio.get_running_loop():
            self._discovery.cancel()
            await asyncio.gather(self._discovery, return_exceptions=True)
        if channel is not None:
            await channel.close()

    async def _ask(self) -> None:
        with contextlib.suppress(TridentError):
            self._packed.ready = await self.model_ready(packed_delta.MODEL, ASK_TIMEOUT_S)

    def _opened(self) -> grpc.aio.Channel:
        running = asyncio.get_running_loop()
        if self._channel is None or self._loop is not running:
            self._loop = running
            self._channel = channel = self.connection.opened(grpc.aio, self._credentials, self._options)
            # One request per stream: ModelStreamInfer streams both ways, and this side ends after one message.
            self._generate = channel.unary_stream(infer_request.GENERATE)
        return self._channel
