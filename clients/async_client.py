"""The client for asyncio programs: one server, one connection, many streams.

async with AsyncClient("127.0.0.1:8001") as client:
    async for delta in client.generate("def fibonacci(n):", max_tokens=64, temperature=0.0):
        print(delta.text, end="", flush=True)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc.aio

from clients.base import AsyncBaseClient
from clients.wire import infer_request, request, status
from clients.wire.arguments import ClientOptions
from clients.wire.channel import AsyncChannel
from clients.wire.connection import Connection, trace_context
from clients.wire.stream_model import StreamModel
from clients.wire.token_stream import SingleRoute, TokenStream
from contract.generation import GenerationRequest

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AsyncClient(AsyncBaseClient):
    """Talk to one server with any number of concurrent streams.

    Make it anywhere; the connection opens with the first call, on the running loop, and again on another loop.
    url: HOST:PORT; None is $TRIDENT_URL or 127.0.0.1:8001.
    options: see ``ClientOptions``.
    """

    def __init__(self, url: str | Connection | None = None, **options: Unpack[ClientOptions]) -> None:
        super().__init__(**options)
        self.connection = self._connection(url)
        self.url = self.connection.url
        self._channel = AsyncChannel(self.connection)

    async def close(self) -> None:
        """Close the connection. Streams that still run are cancelled."""
        self._cancel_streams()
        await self._channel.close()

    def open(self, generation: GenerationRequest, *, traceparent: str = "", timings: bool = False) -> TokenStream:
        """Return a stream for a valid request. Nothing is sent before it is read."""
        context = trace_context(traceparent)  # one trace for all attempts
        model = StreamModel(self._options.get("model"), generation.stream)

        def send(generation: GenerationRequest, remaining_s: float) -> grpc.aio.UnaryStreamCall:
            payload = infer_request.generation(generation, self._channel.model(model), remaining_s, timings)
            metadata = self.connection.call_metadata(generation.request_id, context)
            return self._channel.generate(payload, remaining_s, metadata)

        route = SingleRoute(self.url, send, model.refused)
        return self._tracked(TokenStream(route, request.with_id(generation), self._schedule()))

    async def stop(self, request_id: str, timeout_s: float = 5.0) -> None:
        """End a running request in the engine, from any client; an engine ignores an id that it does not know."""
        await self._channel.stop(request_id, timeout_s)

    async def health(self, timeout_s: float = 5.0) -> status.Health:
        """Return whether the server is live, is ready, and has loaded the model. Raises Unavailable."""
        responses = [await self._channel.call(call, timeout_s) for call in status.health_calls(self.model)]
        return status.read_health(self.url, self.model, responses)

    async def models(self, timeout_s: float = 5.0) -> list[status.Model]:
        """Return the models of the server and their state."""
        return status.read_models(await self._channel.call(status.REPOSITORY_INDEX, timeout_s))

    async def model_ready(self, model: str, timeout_s: float = 5.0) -> bool:
        """Return whether one model is loaded and ready."""
        return await self._channel.model_ready(model, timeout_s)
