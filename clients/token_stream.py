"""One generation as it arrives: an asynchronous iterator of TokenDelta over one gRPC stream.

Leaving it, by ``break``, by an exception, by ``aclose`` or because the task was cancelled, cancels the call,
and with it the server's work. Failures before the first token may be tried again; after it they never are.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Protocol

import grpc
import grpc.aio

from clients import completion, failures, wire
from clients.connection import DEFAULT_TIMEOUT_S
from clients.failures import RetryHint
from clients.latency import Stopwatch
from clients.retries import RetrySchedule
from contract.errors import Cancelled, DeadlineExceeded, EngineFailed, TridentError, Unavailable
from contract.generation import FinishReason, GenerationRequest, TokenDelta

# How long to wait for the status after the final response; it usually arrives in the same packet.
_STATUS_PATIENCE_S = 2.0


class Attempt(Protocol):
    """One call in progress, at one replica."""

    call: grpc.aio.UnaryStreamCall
    url: str

    def release(self, error: TridentError | None) -> None:
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
    ``request_id`` is what ``stop`` takes. ``tokens`` counts those received.
    """

    def __init__(self, door: Door, request: GenerationRequest, schedule: RetrySchedule) -> None:
        self.request = request
        self.request_id = request.request_id
        self.tokens = 0
        self.attempts = 0
        self._door = door
        self._schedule = schedule
        self._timeout_s = DEFAULT_TIMEOUT_S if request.timeout_s is None else request.timeout_s
        self._deadline_s = time.monotonic() + self._timeout_s
        self._attempt: Attempt | None = None
        self._next: Callable | None = None  # None where something else than reading comes next
        self._read_rest: Callable | None = None
        self._decode = wire.ResponseDecoder().decode
        self._started = False  # a delta was handed out
        self._answered = False  # the last delta was handed out
        self._ended = False
        self._pending_error: TridentError | None = None

    def __aiter__(self) -> _Loop:
        return _Loop(self)

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancels the call if it still runs. Safe to call twice."""
        self.cancel()

    def cancel(self) -> None:
        """As ``aclose``, for callers that cannot await. A reader that waits sees Cancelled."""
        if not self._ended:
            self._end(Cancelled("the stream was left"))

    async def __anext__(self) -> TokenDelta:
        while True:
            if self._next is None:
                await self._advance()
            try:
                data = await self._next()
            except StopAsyncIteration:
                await self._failed(self._silent_end(), RetryHint())
                continue
            except grpc.aio.AioRpcError as exc:
                await self._failed(*self._translated(exc), cause=exc)
                continue
            except asyncio.CancelledError:
                if self._ended:  # closed by another task: this one was not cancelled
                    raise Cancelled(f"request {self.request_id} was closed while it was being read") from None
                self.cancel()
                raise
            delta, final, message = self._decode(data)
            if message:
                await self._failed(failures.from_error_message(message), RetryHint())
            elif delta is None:
                if final:
                    await self._drained()
                    raise StopAsyncIteration
            elif delta.finish_reason is FinishReason.ERROR:
                error = failures.from_error_message(delta.error) if delta.error else EngineFailed("no reason given")
                if not (delta.text or delta.token_ids):
                    await self._failed(error, RetryHint())
                    continue
                self._pending_error, self._next = error, None
                return self._handed_out(
                    dataclasses.replace(delta, finish_reason=None, error="", usage=None, timings=None)
                )
            else:
                if final or delta.finish_reason is not None:
                    self._answered, self._read_rest, self._next = True, self._next, None
                return self._handed_out(delta)

    def _handed_out(self, delta: TokenDelta) -> TokenDelta:
        self._started = True
        self.tokens += len(delta.token_ids)
        return delta

    async def complete(self) -> completion.Completion:
        """Reads to the end. The errors are those of the iteration."""
        watch, deltas = Stopwatch(), []
        async for delta in self:
            watch.observe(delta)
            deltas.append(delta)
        ttft_s = watch.ttft_s if self.request.stream else None
        return completion.join(deltas, self.request_id, ttft_s, watch.total_s)

    async def _advance(self) -> None:
        """Opens the next attempt; raises StopAsyncIteration or the error of a stream that is over."""
        while self._next is None:
            if self._pending_error is not None and not self._ended:
                self._end(self._pending_error)
                raise self._pending_error
            if self._answered and not self._ended:
                await self._drained()
            if self._ended:
                raise StopAsyncIteration
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                self._end(error := self._late())
                raise error
            self.attempts += 1
            try:
                attempt = await self._door.open(self.request, left_s)
            except TridentError as error:
                await self._failed(error, RetryHint(getattr(error, "retry_after_s", None)))
                continue
            if self._ended:  # closed while a replica was looked for
                attempt.call.cancel()
                attempt.release(None)
                raise Cancelled(f"request {self.request_id} was closed before it was sent")
            self._attempt = attempt
            self._next = self._read_rest = attempt.call.__aiter__().__anext__

    async def _failed(self, error: TridentError, hint: RetryHint, cause: BaseException | None = None) -> None:
        """Ends the attempt. Returns if there shall be another one, raises otherwise."""
        self._release(error)
        if not self._started:
            left_s = self._deadline_s - time.monotonic()
            wait_s = self._schedule.wait_s(error, hint, left_s, self._door.has_alternative())
            if wait_s is not None:
                try:
                    await asyncio.sleep(wait_s)
                except asyncio.CancelledError:
                    self.cancel()
                    raise
                return
        self._ended = True
        raise error from cause

    async def _drained(self) -> None:
        """The answer is whole: reads up to the status, so that the server never takes our leaving for a cancel."""

        async def read_rest() -> None:
            while True:
                await self._read_rest()

        # Whatever breaks after the answer does not take the answer back.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.TimeoutError, StopAsyncIteration):
            await asyncio.wait_for(read_rest(), _STATUS_PATIENCE_S)
        self._end(None)

    def _translated(self, exc: grpc.aio.AioRpcError) -> tuple[TridentError, RetryHint]:
        hint = failures.retry_hint(exc.trailing_metadata())
        if exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED and self._deadline_s - time.monotonic() < 0.05:
            return self._late(), hint
        return failures.from_rpc(exc.code(), exc.details() or "", self._attempt.url, hint), hint

    def _late(self) -> DeadlineExceeded:
        where = f"after {self.tokens} tokens" if self._started else "before the first token"
        return DeadlineExceeded(f"the deadline of {self._timeout_s:g} s passed {where}")

    def _silent_end(self) -> TridentError:
        where = f"after {self.tokens} tokens" if self._started else "without an answer"
        return Unavailable(f"{self._attempt.url} closed the stream {where}, with no final response")

    def _end(self, error: TridentError | None) -> None:
        self._ended = True
        self._release(error)

    def _release(self, error: TridentError | None) -> None:
        attempt, self._attempt, self._next = self._attempt, None, None
        if attempt is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is gone, and the call with it
                attempt.call.cancel()
            attempt.release(error)


class _Loop:
    """What ``async for`` holds, and drops when the loop is left: then the stream is cancelled."""

    __slots__ = ("_stream",)

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream

    def __aiter__(self) -> _Loop:
        return self

    def __anext__(self):
        return self._stream.__anext__()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __del__(self) -> None:
        self._stream.cancel()
