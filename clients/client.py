"""The client for programs without an event loop: one server, one connection, streams in any number of threads.

with Client("127.0.0.1:8001") as client:
    for delta in client.generate("def fibonacci(n):", max_tokens=64, temperature=0.0):
        print(delta.text, end="", flush=True)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import grpc
import grpc.experimental

from clients.base import BaseClient
from clients.wire import failures, infer_request, infer_response, request, response_reader, status
from clients.wire.arguments import ClientOptions, GenerateArguments
from clients.wire.blocking_stream import BlockingStream
from clients.wire.completion import Completion
from clients.wire.connection import Connection, trace_context
from clients.wire.status import UnaryCall
from clients.wire.stream_model import ASK_TIMEOUT_S, PackedEnsemble, StreamModel
from contract import packed_delta
from contract.errors import Cancelled, TridentError
from contract.generation import GenerationRequest

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The reading thread polls the network itself: half the cost per message of gRPC's own thread and condition.
_SINGLE_THREADED = (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)


class Client(BaseClient[BlockingStream]):
    """Talk to one server, from any number of threads.

    url: HOST:PORT; None is $TRIDENT_URL or 127.0.0.1:8001.
    options: see ``ClientOptions``.
    """

    def __init__(self, url: str | Connection | None = None, **options: Unpack[ClientOptions]) -> None:
        super().__init__(**options)
        self.connection = self._connection(url)
        self.url = self.connection.url
        self._credentials = self.connection.tls.credentials() if self.connection.tls else None
        self._opening = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._generate: grpc.UnaryStreamMultiCallable | None = None  # of ``_channel``: set and unset together
        self._packed = PackedEnsemble()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Streams that still run are cancelled."""
        with self._opening:
            channel, self._channel, self._generate = self._channel, None, None
        self._cancel_streams()  # after that, so that it finds all that were sent in the old channel
        if channel is not None:
            channel.close()

    def open(self, generation: GenerationRequest, *, traceparent: str = "", timings: bool = False) -> BlockingStream:
        """Return a stream for a valid request. Nothing is sent before it is read."""
        context = trace_context(traceparent)  # one trace for all attempts
        model = StreamModel(self._options.get("model"), generation.stream)

        def send(generation: GenerationRequest, remaining_s: float) -> grpc.Call:
            channel, method = self._opened()
            if model.chooses and self._packed.due():
                threading.Thread(target=self._ask, args=(channel,), daemon=True).start()
            payload = infer_request.generation(generation, model.at(self._packed), remaining_s, timings)
            metadata = self.connection.call_metadata(generation.request_id, context)
            with self._errors():
                return method(payload, timeout=remaining_s, metadata=metadata)

        generation = request.with_id(generation)
        return self._tracked(BlockingStream(send, self.url, generation, self._schedule(), model.refused))

    def complete(self, prompt: str | None = None, **arguments: Unpack[GenerateArguments]) -> Completion:
        """Return the whole text, sent in one response; arguments as for ``generate``."""
        arguments.setdefault("stream", False)
        return self.generate(prompt, **arguments).complete()

    def stop(self, request_id: str, timeout_s: float = 5.0) -> None:
        """End a running request in the engine, from any client; an engine ignores an id that it does not know."""
        payload = infer_request.stop(request.sendable_id(request_id))
        metadata = self.connection.call_metadata(request_id)
        decode = infer_response.ResponseDecoder().decode
        with self._errors():
            for data in self._opened()[1](payload, timeout=timeout_s, metadata=metadata):
                response_reader.read_message(decode, data)

    def health(self, timeout_s: float = 5.0) -> status.Health:
        """Return whether the server is live, is ready, and has loaded the model. Raises Unavailable."""
        responses = [self._call(call, timeout_s) for call in status.health_calls(self.model)]
        return status.read_health(self.url, self.model, responses)

    def models(self, timeout_s: float = 5.0) -> list[status.Model]:
        """Return the models of the server and their state."""
        return status.read_models(self._call(status.REPOSITORY_INDEX, timeout_s))

    def model_ready(self, model: str, timeout_s: float = 5.0) -> bool:
        """Return whether one model is loaded and ready."""
        return status.read_flag(self._call(status.model_ready(model), timeout_s))

    def _call(self, call: UnaryCall, timeout_s: float, channel: grpc.Channel | None = None) -> bytes:
        with self._errors():
            method = (channel or self._opened()[0]).unary_unary(call.method)
            return method(call.payload, timeout=timeout_s, metadata=self.connection.call_metadata())

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise gRPC's errors as TridentError."""
        try:
            yield
        except grpc.RpcError as exc:
            raise failures.from_call(exc, self.url) from exc
        except ValueError as exc:
            if "closed" not in str(exc):  # gRPC has no class for a channel that another thread closed
                raise
            raise Cancelled("the client was closed") from exc

    def _ask(self, channel: grpc.Channel) -> None:
        """Ask over the request's own channel: a client that was closed meanwhile does not open again."""
        with contextlib.suppress(TridentError):
            response = self._call(status.model_ready(packed_delta.MODEL), ASK_TIMEOUT_S, channel)
            self._packed.ready = status.read_flag(response)

    def _opened(self) -> tuple[grpc.Channel, grpc.UnaryStreamMultiCallable]:
        """Return the channel and its method that generates."""
        with self._opening:
            if self._channel is None or self._generate is None:
                options = [*self.connection.options(), _SINGLE_THREADED]
                self._channel = channel = self.connection.opened(grpc, self._credentials, options)
                self._generate = channel.unary_stream(infer_request.GENERATE)
            return self._channel, self._generate
