"""What all clients share: their options, ``generate``, and the streams that closing them cancels."""

from __future__ import annotations

import random
import threading
import weakref
from typing import TYPE_CHECKING, Generic, TypeVar

from clients.wire import connection, request
from clients.wire.arguments import ClientOptions, GenerateArguments
from clients.wire.blocking_stream import BlockingStream
from clients.wire.completion import Completion
from clients.wire.connection import DEFAULT_MODEL, Connection
from clients.wire.retries import RetryBudget, RetryPolicy, RetrySchedule
from clients.wire.token_stream import TokenStream
from contract.errors import InvalidArgument
from contract.generation import GenerationRequest

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


# Options that are not used until a request is sent: their classes, and those in words.
_KINDS = {
    "model": (str, "text"),
    "retry": (RetryPolicy, "a RetryPolicy"),
    "budget": (RetryBudget, "a RetryBudget"),
    "rng": (random.Random, "a random.Random"),
}


Stream = TypeVar("Stream", TokenStream, BlockingStream)


class BaseClient(Generic[Stream]):
    """A client of any kind; see ``ClientOptions`` for its arguments."""

    def __init__(self, **options: Unpack[ClientOptions]) -> None:
        unknown = options.keys() - ClientOptions.__annotations__.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {min(unknown)!r}")
        for name, (kind, what) in _KINDS.items():
            value = options.get(name)
            if not isinstance(value, kind | None):
                raise InvalidArgument(name, f"must be {what}, got {value!r}")
        self.model = options.get("model") or DEFAULT_MODEL
        self._options = options
        self._retry = options.get("retry") or RetryPolicy()
        self._budget = options.get("budget") or RetryBudget()
        self._rng = options.get("rng") or random.Random()
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()  # keeps none alive; a dropped stream cancels itself
        self._lock = threading.Lock()

    def open(self, generation: GenerationRequest, *, traceparent: str = "", timings: bool = False) -> Stream:
        """Return a stream for a valid request. Nothing is sent before it is read."""
        raise NotImplementedError

    def generate(
        self,
        prompt: str | None = None,
        *,
        traceparent: str = "",
        timings: bool = False,
        **arguments: Unpack[GenerateArguments],
    ) -> Stream:
        """Generate text: ``for delta in client.generate(prompt, max_tokens=64)``, or ``async for``.

        Leaving the loop cancels the request.
        prompt: the text to continue; or ``messages``, see ``GenerateArguments``.
        traceparent: W3C trace context to join.
        timings: whether the last delta carries the engine's own instants.
        Raises InvalidArgument at once; the loop raises every other TridentError.
        """
        return self.open(request.build(prompt, **arguments), traceparent=traceparent, timings=timings)

    def _connection(self, url: str | Connection | None) -> Connection:
        tls, api_key = self._options.get("tls"), self._options.get("api_key", "")
        return connection.connection(url, tls, api_key, self._options.get("metadata", ()))

    def _schedule(self) -> RetrySchedule:
        return RetrySchedule(self._retry, self._budget, self._rng)

    def _tracked(self, stream: Stream) -> Stream:
        with self._lock:
            self._streams.add(stream)
        return stream

    def _cancel_streams(self) -> None:
        """Cancel the streams that have been sent, whose readers get Cancelled; the others are not sent until read."""
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            if stream.attempts:
                stream.cancel()


class AsyncBaseClient(BaseClient[TokenStream]):
    """A client for asyncio programs."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection. Streams that still run are cancelled."""
        raise NotImplementedError

    async def complete(self, prompt: str | None = None, **arguments: Unpack[GenerateArguments]) -> Completion:
        """Return the whole text, sent in one response; arguments as for ``generate``."""
        arguments.setdefault("stream", False)
        return await self.generate(prompt, **arguments).complete()
