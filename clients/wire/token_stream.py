"""One generation as it arrives: an asynchronous iterator of TokenDelta over one gRPC stream.

Leaving it, by ``break``, by an exception, by ``aclose`` or because the task was cancelled, cancels the call,
and with it the server's work. Failures before the first token may be tried again; after it they never are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

import grpc
import grpc.aio

from clients.wire import completion
from clients.wire.answer import Answer
from clients.wire.failures import RetryHint
from clients.wire.latency import Stopwatch
from clients.wire.protobuf import WireError
from clients.wire.retries import RetrySchedule
from contract.errors import Cancelled, TridentError
from contract.generation import GenerationRequest, TokenDelta

# How long to wait for the status after the final response; it usually arrives in the same packet.
STATUS_PATIENCE_S = 2.0
# Stands for a message without outputs in a stream that is read raw.
NO_OUTPUTS = TokenDelta()


class Attempt(Protocol):
    """One call in progress, at one replica."""

    call: grpc.aio.UnaryStreamCall
    url: str

    def began(self) -> None:
        """The first token is here. Called at most once."""

    def release(self, error: TridentError | None, answer: Answer) -> None:
        """The call is over: with ``error``, or None for a good end. Called exactly once."""


class Door(Protocol):
    """Where the attempts of one request go."""

    async def open(self, request: GenerationRequest, left_s: float) -> Attempt:
        """Sends the request. Raises Unavailable where there is nowhere to send it."""

    def has_alternative(self) -> bool:
        """Whether the next attempt would reach a replica that has not failed this request yet."""


class TokenStream:
    """``async for delta in stream`` ends after the delta with ``finish_reason``; errors are raised, typed.

    Also an asynchronous context manager, for callers that keep it: leaving the block cancels what still runs.
    ``request_id`` is what ``stop`` takes; ``attempts`` counts the calls made for it.

    raw: for relays. Every message yields a delta, one without outputs NO_OUTPUTS. ``message`` holds the bytes of the
    latest, also of one that carried the error which is raised; it is empty where the error came otherwise.
    ``deferred_error`` is an error that came behind text in one message: raised after the delta with the text.
    """

    def __init__(self, door: Door, request: GenerationRequest, schedule: RetrySchedule, raw: bool = False) -> None:
        self.request = request
        self.request_id = request.request_id
        self.attempts = 0
        self.message = b""
        self._raw = raw
        self._answer = Answer(request)
        self._door = door
        self._schedule = schedule
        self._attempt: Attempt | None = None
        self._pause: asyncio.Task | None = None  # the wait before another attempt
        self._abandoned: TridentError | None = None
        self._read: Callable | None = None
        self._next: Callable | None = None  # self._read, or None where something else than reading comes next
        self._began = False
        self._ended = False

    @property
    def tokens(self) -> int:
        """Tokens received so far."""
        return self._answer.tokens

    @property
    def whole(self) -> bool:
        """Whether the last delta has been handed out."""
        return self._answer.whole

    @property
    def deferred_error(self) -> TridentError | None:
        return self._answer.broken

    def __aiter__(self) -> _Loop:
        return _Loop(self)

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self.cancel()

    async def aclose(self) -> None:
        """Cancels the call if it still runs. Safe to call twice."""
        self.cancel()

    def cancel(self) -> None:
        """As ``aclose``, for callers that cannot await. A reader that waits sees Cancelled."""
        if not self._ended:
            self._end(Cancelled("the stream was left"))
            if self._pause is not None:
                self._pause.cancel()

    def abandon(self, error: TridentError) -> None:
        """Gives up the attempt under way if it has no token yet. Its reader goes on with the next attempt, or gets
        ``error`` if the schedule allows none. The attempt itself is released as cancelled."""
        if self._attempt is not None and not self._answer.started and not self._ended:
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
                delta = self._answer.take(data)
            except StopAsyncIteration:
                self.message = b""
                await self._failed(self._answer.cut(self._attempt.url), RetryHint())
            except grpc.aio.AioRpcError as exc:
                self.message = b""
                await self._failed(*self._answer.broke(exc, self._attempt.url), cause=exc)
            except TridentError as error:
                if isinstance(error.__cause__, WireError):  # a relay's client could not read it either
                    self.message = b""
                await self._failed(error, RetryHint())
            except asyncio.CancelledError:
                if self._ended:  # closed by another task: this one was not cancelled
                    raise Cancelled(f"request {self.request_id} was closed while it was being read") from None
                if self._abandoned is None or is_cancelled():
                    self.cancel()
                    raise
                await self._next_attempt()
            except BaseException:
                self.cancel()
                raise
            else:
                if self._answer.over:
                    self._next = None
                if delta is not None:
                    if not self._began:
                        self._began = True
                        self._attempt.began()
                    return delta
                if self._raw:
                    return NO_OUTPUTS

    async def complete(self) -> completion.Completion:
        """Reads to the end. The errors are those of the iteration; Cancelled if the stream was closed before."""
        watch, deltas = Stopwatch(), []
        async for delta in self:
            watch.observe(delta)
            deltas.append(delta)
        if not self._answer.whole:  # closed between two deltas, which ends an iteration without a word
            raise Cancelled(f"request {self.request.request_id} was closed while it was being read")
        ttft_s = watch.ttft_s if self.request.stream else None
        return completion.join(deltas, self.request_id, ttft_s, watch.total_s)

    async def _advance(self) -> None:
        """Opens the next attempt; raises StopAsyncIteration or the error of a stream that is over."""
        while self._next is None:
            if self._answer.broken and not self._ended:
                self._end(self._answer.broken)
                raise self._answer.broken
            if self._answer.whole and not self._ended:
                await self._drain()
            if self._ended:
                raise StopAsyncIteration
            if self._answer.left_s <= 0:
                self._end(error := self._answer.late())
                raise error
            self.attempts += 1
            self.message = b""
            try:
                attempt = await self._door.open(self.request, self._answer.left_s)
            except TridentError as error:
                await self._failed(error, RetryHint(getattr(error, "retry_after_s", None)))
                continue
            if self._ended:  # closed while a replica was looked for
                attempt.call.cancel()
                attempt.release(Cancelled("the stream was left"), self._answer)
                raise Cancelled(f"request {self.request_id} was closed before it was sent")
            self._attempt = attempt
            self._next = self._read = attempt.call.__aiter__().__anext__

    async def _next_attempt(self) -> None:
        """As ``_failed``, for an attempt that was abandoned, which says nothing more about its replica."""
        error, self._abandoned = self._abandoned, None
        self._release(Cancelled("the attempt was given up"))
        await self._failed(error, RetryHint())

    async def _failed(self, error: TridentError, hint: RetryHint, cause: BaseException | None = None) -> None:
        """Ends the attempt. Returns if there shall be another one, raises otherwise."""
        self._release(error)
        if not self._answer.started and not self._ended:
            wait_s = self._schedule.wait_s(error, hint, self._answer.left_s, self._door.has_alternative())
            if wait_s is not None:
                self._pause = asyncio.ensure_future(asyncio.sleep(wait_s))
                try:
                    await self._pause
                except asyncio.CancelledError:
                    if not self._ended:  # else closed by another task: this one was not cancelled
                        self.cancel()
                        raise
                if self._ended:
                    raise Cancelled(f"request {self.request_id} was closed while it waited to be tried again")
                return
        self._ended = True
        raise error from cause

    async def _drain(self) -> None:
        """The answer is whole: reads up to the status, so that the server never takes our leaving for a cancel."""

        async def read_rest() -> None:
            while True:
                await self._read()

        # Whatever breaks after the answer does not take the answer back.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.TimeoutError, StopAsyncIteration):
            try:
                await asyncio.wait_for(read_rest(), STATUS_PATIENCE_S)
            except asyncio.CancelledError:
                if not self._ended:  # else closed by another task: this one was not cancelled
                    raise
        self._end(None)

    def _end(self, error: TridentError | None) -> None:
        self._ended = True
        self._release(error)

    def _release(self, error: TridentError | None) -> None:
        attempt, self._attempt, self._next = self._attempt, None, None
        if attempt is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is gone, and the call with it
                attempt.call.cancel()
            attempt.release(error, self._answer)


def is_cancelled() -> bool:
    """Whether the running task itself was cancelled, not only the call it waited for. Python 3.10 cannot tell: no."""
    cancelling = getattr(asyncio.current_task(), "cancelling", None)
    return cancelling is not None and cancelling() > 0


class _Loop:
    """What ``async for`` holds, and drops when the loop is left: then the stream is cancelled."""

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
