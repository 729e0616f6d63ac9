"""The client for asyncio programs: one server, one connection, many streams.

async with AsyncClient("127.0.0.1:8001") as client:
    async for delta in client.generate("def fibonacci(n):", max_tokens=64, temperature=0.0):
        print(delta.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping
from typing import Any

import grpc
import grpc.aio

from clients.generations import Generations
from clients.running import Running
from clients.wire import answer, failures, infer_request, infer_response, request, status
from clients.wire.answer import Answer
from clients.wire.completion import Completion
from clients.wire.connection import DEFAULT_MODEL, TLS, Connection, connection, trace_context
from clients.wire.retries import RetryBudget, RetryPolicy, RetrySchedule
from clients.wire.token_stream import TokenStream
from contract.errors import TridentError
from contract.generation import GenerationRequest


class AsyncClient(Generations[TokenStream]):
    """Talks to one server. Make it anywhere; the connection opens with the first call, on the running loop, and
    again if it is used on another one.

    url: HOST:PORT; None is $TRIDENT_URL or 127.0.0.1:8001. tls: True or TLS(…). retry and budget: when and how
    often requests that produced nothing are tried again. One client serves any number of concurrent streams.
    """

    def __init__(
        self,
        url: str | Connection | None = None,
        *,
        model: str = DEFAULT_MODEL,
        tls: TLS | bool | None = None,
        api_key: str = "",
        metadata: Mapping[str, str] | Iterable[tuple[str, str]] = (),
        retry: RetryPolicy | None = None,
        budget: RetryBudget | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.connection = connection(url, tls, api_key, metadata)
        self.model = model
        self._retry = retry or RetryPolicy()
        self._budget = budget or RetryBudget()
        self._rng = rng or random.Random()
        self._credentials = self.connection.tls.credentials() if self.connection.tls else None
        self._running = Running()
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the one the channel belongs to
        self._generate: grpc.aio.UnaryStreamMultiCallable | None = None

    @property
    def url(self) -> str:
        return self.connection.url

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; streams that still run are cancelled."""
        self._running.cancel()
        channel, self._channel, self._generate = self._channel, None, None
        if channel is not None:
            await channel.close()

    def open(self, asked: GenerationRequest, *, traceparent: str = "", timings: bool = False) -> TokenStream:
        """A stream for a request that is already valid. Nothing is sent before it is read."""
        schedule = RetrySchedule(self._retry, self._budget, self._rng)
        door = _OneServer(self, trace_context(traceparent), timings)
        return self._running.add(TokenStream(door, request.identified(asked), schedule))

    async def complete(self, prompt: str | None = None, **arguments: Any) -> Completion:
        """The whole answer, in one response; arguments as for ``generate``."""
        return await self.generate(prompt, **{"stream": False, **arguments}).complete()

    def call(
        self, asked: GenerationRequest, left_s: float, traceparent: str = "", timings: bool = False
    ) -> grpc.aio.UnaryStreamCall:
        """Sends one request, once, and returns the raw call."""
        payload = infer_request.generation(asked, self.model, left_s, timings)
        metadata = self.connection.call_metadata(asked.request_id, traceparent)
        if self._generate is None or self._loop is not asyncio.get_running_loop():
            # One request per stream: the method streams both ways, but after one message we have said it all.
            self._generate = self._opened().unary_stream(infer_request.GENERATE)
        return self._generate(payload, timeout=left_s, metadata=metadata)

    async def stop(self, request_id: str, timeout_s: float = 5.0) -> None:
        """Ends a running request of anybody by its id, in the engine; unknown ids are ignored there."""
        call = self._opened().unary_stream(infer_request.GENERATE)(
            infer_request.stop(request.sendable_id(request_id)),
            timeout=timeout_s,
            metadata=self.connection.call_metadata(request_id),
        )
        decode = infer_response.ResponseDecoder().decode
        try:
            async for data in call:
                answer.read(decode, data)
        except grpc.aio.AioRpcError as exc:
            raise self._translated(exc) from exc

    async def health(self, timeout_s: float = 5.0) -> status.Health:
        """Whether the server lives, is ready, and has the model ready. Raises Unavailable if it cannot be reached."""
        answers = [await self._ask(question, timeout_s) for question in status.health_questions(self.model)]
        return status.read_health(self.url, self.model, answers)

    async def models(self, timeout_s: float = 5.0) -> list[status.Model]:
        """The models of the server and their state."""
        return status.read_models(await self._ask(status.MODELS_QUESTION, timeout_s))

    async def model_ready(self, model: str, timeout_s: float = 5.0) -> bool:
        """Whether one model is loaded and ready."""
        return status.read_flag(await self._ask(status.model_ready(model), timeout_s))

    async def _ask(self, question: status.Question, timeout_s: float) -> bytes:
        try:
            call = self._opened().unary_unary(question.method)
            return await call(question.payload, timeout=timeout_s, metadata=self.connection.call_metadata())
        except grpc.aio.AioRpcError as exc:
            raise self._translated(exc) from exc

    def _opened(self) -> grpc.aio.Channel:
        running = asyncio.get_running_loop()
        if self._channel is None or self._loop is not running:
            self._loop = running
            target, options = self.connection.url, self.connection.options()
            secure = self._credentials
            self._channel = (
                grpc.aio.secure_channel(target, secure, options)
                if secure
                else grpc.aio.insecure_channel(target, options)
            )
        return self._channel

    def _translated(self, exc: grpc.aio.AioRpcError) -> TridentError:
        return failures.from_rpc(
            exc.code(), exc.details() or "", self.url, failures.retry_hint(exc.trailing_metadata())
        )


class _OneServer:
    """The door of a request that has one place to go."""

    def __init__(self, client: AsyncClient, traceparent: str, timings: bool) -> None:
        self._client, self._traceparent, self._timings = client, traceparent, timings

    async def open(self, asked: GenerationRequest, left_s: float) -> _OneCall:
        return _OneCall(self._client.call(asked, left_s, self._traceparent, self._timings), self._client.url)

    def has_alternative(self) -> bool:
        return False


class _OneCall:
    def __init__(self, call: grpc.aio.UnaryStreamCall, url: str) -> None:
        self.call, self.url = call, url

    def began(self) -> None:
        """Nothing is booked with a single server."""

    def release(self, error: TridentError | None, answer: Answer) -> None:
        """Nor is anything settled."""
