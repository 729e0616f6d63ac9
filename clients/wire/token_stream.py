"""Read one generation as it arrives: an asynchronous iterator of TokenDelta over one gRPC stream.

Leaving it, by ``break``, by an exception, by ``aclose`` or because the task was cancelled, cancels the call,
and with it the server's work. Failures before the first token may be retried; later ones never are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import grpc
import grpc.aio

from clients.wire.completion import Collector, Completion
from clients.wire.failures import RetryHint
from clients.wire.protobuf import WireError
from clients.wire.response_reader import ResponseReader
from clients.wire.retries import RetrySchedule
from contract.errors import Cancelled, TridentError
from contract.generation import GenerationRequest, TokenDelta

# How long to wait for the status after the final response; it usually arrives in the same packet.
STATUS_TIMEOUT_S = 2.0
# Stands for a message without outputs in a stream that is read raw.
NO_OUTPUTS = TokenDelta()
Send = Callable[[GenerationRequest, float], grpc.aio.UnaryStreamCall]
Refused = Callable[[TridentError], bool]  # see Route.refused


class Attempt(Protocol):
    """One call in progress, at one replica."""

    call: grpc.aio.UnaryStreamCall
    url: str

    def began(self) -> None:
        """Take note of the first token. Called at most once."""

    def release(self, error: TridentError | None, response: ResponseReader) -> None:
        """Take note of the end: ``error``, or None for success. Called exactly once."""


class Route(Protocol):
    """Where the attempts of one request go."""

    async def open(self, request: GenerationRequest, remaining_s: float) -> Attempt:
        """Send the request. Raises Unavailable if there is no replica for it."""

    def has_alternative(self) -> bool:
        """Return whether the next attempt would reach a replica that has not failed this request yet."""

    def refused(self, error: TridentError) -> bool:
        """Take note of how an attempt failed; return whether the request was only sent to the wrong model."""


class SingleRoute:
    """The route to one server, and each attempt on it."""

    def __init__(self, url: str, send: Send, refused: Refused = lambda error: False) -> None:
        self.url, self._send, self.refused = url, send, refused

    async def open(self, request: GenerationRequest, remaining_s: float) -> SingleRoute:
        self.call = self._send(request, remaining_s)
        return self

    def has_alternative(self) -> bool:
        return False

    def began(self) -> None:
        """Nothing is reserved at a single server."""

    def release(self, error: TridentError | None, response: ResponseReader) -> None:
        """Nothing is reserved at a single server."""


class TokenStream:
    """An iterator that ends after the delta with ``finish_reason`` and raises TridentError.

    Also an asynchronous context manager: leaving the block cancels the call.
    request_id: the argument of ``stop``.
    attempts: calls made so far.
    raw: for relays. Every message yields a delta, a message without outputs yields NO_OUTPUTS.
    message: bytes of the latest message, also of the one that carried the raised error; empty if that came otherwise.
    finished: the last delta has been received.
    deferred_error: an error that came behind text in one message; raised after the delta with the text.
    """

    def __init__(self, route: Route, request: GenerationRequest, schedule: RetrySchedule, raw: bool = False) -> None:
        self.request = request
        self.request_id = request.request_id
        self.attempts = 0
        self.message = b""
        self.finished = False
        self.deferred_error: TridentError | None = None
        self._raw = raw
        self._response = ResponseReader(request)
        self._route = route
        self._schedule = schedule
        self._attempt: Any = None  # an Attempt while a call is in progress
        self._pause: asyncio.Task | None = None  # the wait before another attempt
        self._abandoned: TridentError | None = None
        self._read: Any = None
        self._next: Any = None  # self._read, or None where something else than reading comes next
        self._began = False
        self._ended = False

    @property
    def tokens(self) -> int:
        """Tokens received so far."""
        return self._response.tokens

    def __aiter__(self) -> _Loop:
        return _Loop(self)

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self.cancel()

    async def aclose(self) -> None:
        """Cancel the call if it still runs. Safe to call twice."""
        self.cancel()

    def cancel(self) -> None:
        """Do as ``aclose`` without await. A task that waits for the next delta gets Cancelled."""
        if not self._ended:
            self._end(Cancelled("the stream was left"))
            if self._pause is not None:
                self._pause.cancel()

    def abandon(self, error: TridentError) -> None:
        """End the current attempt if it has no token yet. The iteration continues with the next attempt, or raises
        ``error`` if the schedule allows none. The attempt itself is released as cancelled."""
        if self._attempt is not None and not self._response.started and not self._ended:
            self._abandoned = error
            self._attempt.call.cancel()

    async def __anext__(self) -> TokenDelta:
        while True:
            if self._next is None:
                await self._advance()
            try:
                data = await self._next()
                if self._abandoned is not None:
                    await self._next_attempt()
                    continue
                self.message = data
                delta = self._response.read(data)
            except StopAsyncIteration:
                self.message = b""
                await self._failed(self._response.truncation_error(self._attempt.url), RetryHint())
            except grpc.aio.AioRpcError as exc:
                self.message = b""
                await self._failed(*self._response.status_error(exc, self._attempt.url), cause=exc)
            except TridentError as error:
                if isinstance(error.__cause__, WireError):  # a relay's client could not read it either
                    self.message = b""
                await self._failed(error, RetryHint())
            except asyncio.CancelledError:
                if self._ended:  # closed by another task; this task was not cancelled
                    self.message = b""
                    raise Cancelled(f"request {self.request_id} was closed while it was being read") from None
                if self._abandoned is None or is_cancelled():
                    self.cancel()
                    raise
                await self._next_attempt()
            except BaseException:
                self.cancel()
                raise
            else:
                response = self._response
                if response.ended:
                    self._next, self.finished, self.deferred_error = None, response.complete, response.deferred_error
                if delta is not None:
                    if not self._began and not self._ended:  # else closed when the message had arrived
                        self._began = True
                        self._attempt.began()
                    return delta
                if self._raw:
                    return NO_OUTPUTS

    async def complete(self) -> Completion:
        """Read to the end. Raises what the iteration raises, and Cancelled if the stream was closed before."""
        collected = Collector(self.request)
        async for delta in self:
            collected.add(delta)
        return collected.completion(self._response.complete)

    async def _advance(self) -> None:
        """Open the next attempt. Raises StopAsyncIteration, or the error of a stream that has ended."""
        while self._next is None:
            if self.deferred_error and not self._ended:
                self._end(self.deferred_error)
                raise self.deferred_error
            if self._response.complete and not self._ended:
                await self._drain()
            if self._ended:
                if not self._response.ended:
                    self.message = b""  # the latest one was returned
                raise StopAsyncIteration
            if self._response.remaining_s <= 0:
                self._end(error := self._response.deadline_error())
                raise error
            self.attempts += 1
            self.message = b""
            try:
                attempt = await self._route.open(self.request, self._response.remaining_s)
            except TridentError as error:
                await self._failed(error, RetryHint(error.retry_after_s))
                continue
            except asyncio.CancelledError:
                if not self._ended or is_cancelled():
                    raise
                # the route was closed with its client; this task was not cancelled
                raise Cancelled(f"request {self.request_id} was closed before it was sent") from None
            if self._ended:  # closed while the route was opened
                attempt.call.cancel()
                attempt.release(Cancelled("the stream was left"), self._response)
                raise Cancelled(f"request {self.request_id} was closed before it was sent")
            self._attempt = attempt
            self._next = self._read = attempt.call.__aiter__().__anext__

    async def _next_attempt(self) -> None:
        """Do as ``_failed`` for an abandoned attempt, which is no failure of its replica."""
        error, self._abandoned = self._abandoned, None
        assert error is not None
        self._release(Cancelled("the attempt was abandoned"))
        await self._failed(error, RetryHint())

    async def _failed(self, error: TridentError, hint: RetryHint, cause: BaseException | None = None) -> None:
        """End the attempt. Return if another one follows, raise otherwise."""
        self._release(error)
        refused = self._route.refused(error)
        if not self._response.started and not self._ended:
            if refused:
                return
            wait_s = self._schedule.wait_s(error, hint, self._response.remaining_s, self._route.has_alternative())
            if wait_s is not None:
                self._pause = asyncio.ensure_future(asyncio.sleep(wait_s))
                try:
                    await self._pause
                except asyncio.CancelledError:
                    if not self._ended:  # else closed by another task; this task was not cancelled
                        self.cancel()
                        raise
                if self._ended:
                    raise Cancelled(f"request {self.request_id} was closed while it waited to be tried again")
                return
        self._ended = True
        try:
            raise error from cause
        finally:  # else error and traceback form a cycle that keeps the call and its channel until a garbage collection
            del error, cause

    async def _drain(self) -> None:
        """Read up to the status after the last delta, so that the server does not see a cancel."""

        late = False

        def give_up() -> None:
            nonlocal late
            late = True
            if self._attempt is not None:
                self._attempt.call.cancel()

        timer = asyncio.get_running_loop().call_later(STATUS_TIMEOUT_S, give_up)  # a task would cost more than the rest
        try:
            while True:
                await self._read()
        except (grpc.aio.AioRpcError, StopAsyncIteration):
            pass  # errors after the last delta do not matter: the response is complete
        except asyncio.CancelledError:
            if not self._ended and (not late or is_cancelled()):  # else closed here, and this task was not cancelled
                raise
        finally:
            timer.cancel()
        self._end(None)

    def _end(self, error: TridentError | None) -> None:
        self._ended = True
        self._release(error)

    def _release(self, error: TridentError | None) -> None:
        attempt, self._attempt, self._next = self._attempt, None, None
        if attempt is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is gone, and the call with it
                attempt.call.cancel()
            attempt.release(error, self._response)


def is_cancelled() -> bool:
    """Return whether the running task itself was cancelled, not only the call that it awaits; False on Python 3.10."""
    cancelling = getattr(asyncio.current_task(), "cancelling", None)
    return cancelling is not None and cancelling() > 0


class _Loop:
    """The iterator that ``async for`` holds: when the loop is left it is dropped, which cancels the stream."""

    __slots__ = ("_stream",)

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream

    def __aiter__(self) -> _Loop:
        return self

    async def __anext__(self) -> TokenDelta:  # awaits, and so lives as long: anext(aiter(stream)) gets its delta
        return await self._stream.__anext__()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __del__(self) -> None:
        self._stream.cancel()
