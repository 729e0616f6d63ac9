"""The client for programs without an event loop: one server, one connection, streams in any number of threads.

with Client("127.0.0.1:8001") as client:
    for delta in client.generate("def fibonacci(n):", max_tokens=64, temperature=0.0):
        print(delta.text, end="", flush=True)
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import grpc
import grpc.experimental

from clients.generations import Generations
from clients.running import Running
from clients.wire import answer, failures, infer_request, infer_response, request, status
from clients.wire.blocking_stream import BlockingStream
from clients.wire.completion import Completion
from clients.wire.connection import DEFAULT_MODEL, TLS, Connection, connection, trace_context
from clients.wire.retries import RetryBudget, RetryPolicy, RetrySchedule
from contract.errors import TridentError
from contract.generation import GenerationRequest

# The reading thread polls the network itself: half the cost per message of gRPC's own thread and condition.
_SINGLE_THREADED = (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)


class Client(Generations[BlockingStream]):
    """Talks to one server; arguments as for AsyncClient. One client serves any number of threads."""

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
        self._opening = threading.Lock()
        self._running = Running()
        self._channel: grpc.Channel | None = None
        self._generate: grpc.UnaryStreamMultiCallable | None = None

    @property
    def url(self) -> str:
        return self.connection.url

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; streams that still run are cancelled."""
        self._running.cancel()
        with self._opening:
            channel, self._channel, self._generate = self._channel, None, None
        if channel is not None:
            channel.close()

    def open(self, asked: GenerationRequest, *, traceparent: str = "", timings: bool = False) -> BlockingStream:
        """A stream for a request that is already valid. Nothing is sent before it is read."""
        context = trace_context(traceparent)  # one trace for all attempts

        def send(asked: GenerationRequest, left_s: float) -> grpc.Call:
            channel_call = self._generate or self._opened().unary_stream(infer_request.GENERATE)
            self._generate = channel_call
            metadata = self.connection.call_metadata(asked.request_id, context)
            return channel_call(
                infer_request.generation(asked, self.model, left_s, timings), timeout=left_s, metadata=metadata
            )

        schedule = RetrySchedule(self._retry, self._budget, self._rng)
        return self._running.add(BlockingStream(send, self.url, request.identified(asked), schedule))

    def complete(self, prompt: str | None = None, **arguments: Any) -> Completion:
        """The whole answer, in one response; arguments as for ``generate``."""
        return self.generate(prompt, **{"stream": False, **arguments}).complete()

    def stop(self, request_id: str, timeout_s: float = 5.0) -> None:
        """Ends a running request of anybody by its id, in the engine; unknown ids are ignored there."""
        call = self._opened().unary_stream(infer_request.GENERATE)(
            infer_request.stop(request.sendable_id(request_id)),
            timeout=timeout_s,
            metadata=self.connection.call_metadata(request_id),
        )
        decode = infer_response.ResponseDecoder().decode
        try:
            for data in call:
                answer.read(decode, data)
        except grpc.RpcError as exc:
            raise self._translated(exc) from exc

    def health(self, timeout_s: float = 5.0) -> status.Health:
        """Whether the server lives, is ready, and has the model ready. Raises Unavailable if it cannot be reached."""
        answers = [self._ask(question, timeout_s) for question in status.health_questions(self.model)]
        return status.read_health(self.url, self.model, answers)

    def models(self, timeout_s: float = 5.0) -> list[status.Model]:
        """The models of the server and their state."""
        return status.read_models(self._ask(status.MODELS_QUESTION, timeout_s))

    def model_ready(self, model: str, timeout_s: float = 5.0) -> bool:
        """Whether one model is loaded and ready."""
        return status.read_flag(self._ask(status.model_ready(model), timeout_s))

    def _ask(self, question: status.Question, timeout_s: float) -> bytes:
        try:
            call = self._opened().unary_unary(question.method)
            return call(question.payload, timeout=timeout_s, metadata=self.connection.call_metadata())
        except grpc.RpcError as exc:
            raise self._translated(exc) from exc

    def _opened(self) -> grpc.Channel:
        with self._opening:
            if self._channel is None:
                target, options = self.connection.url, [*self.connection.options(), _SINGLE_THREADED]
                secure = self._credentials
                self._channel = (
                    grpc.secure_channel(target, secure, options) if secure else grpc.insecure_channel(target, options)
                )
            return self._channel

    def _translated(self, exc: grpc.RpcError) -> TridentError:
        hint = failures.retry_hint(exc.trailing_metadata())
        return failures.from_rpc(exc.code(), exc.details() or "", self.url, hint)
