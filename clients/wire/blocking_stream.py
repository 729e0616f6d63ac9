"""One generation as it arrives, for programs without an event loop: an iterator of TokenDelta.

The same rules as ``token_stream``: leaving it cancels, and nothing is tried again after the first token. The
thread that reads it does all the work, so a stream costs no thread and no hand-over between threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import grpc

from clients.wire import completion
from clients.wire.answer import Answer
from clients.wire.failures import RetryHint
from clients.wire.latency import Stopwatch
from clients.wire.retries import RetrySchedule
from clients.wire.token_stream import STATUS_PATIENCE_S
from contract.errors import Cancelled, TridentError
from contract.generation import GenerationRequest, TokenDelta


class BlockingStream:
    """``for delta in stream`` ends after the delta with ``finish_reason``; errors are raised, typed.

    Also a context manager: leaving the block cancels what still runs. ``cancel`` may be called by another thread;
    the reader then sees Cancelled.
    """

    def __init__(
        self,
        send: Callable[[GenerationRequest, float], grpc.Call],
        url: str,
        request: GenerationRequest,
        schedule: RetrySchedule,
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.attempts = 0
        self._answer = Answer(request)
        self._send = send
        self._url = url
        self._schedule = schedule
        self._call: grpc.Call | None = None
        self._ended = False
        self._wake = threading.Event()  # set by cancel, so that a wait between attempts ends

    @property
    def tokens(self) -> int:
        """Tokens received so far."""
        return self._answer.tokens

    def __iter__(self) -> _Loop:
        return _Loop(self)

    def __enter__(self) -> BlockingStream:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Cancels the call if it still runs. Safe to call twice, and from any thread."""
        self._ended = True
        self._wake.set()
        if self._call is not None:
            self._call.cancel()

    def __next__(self) -> TokenDelta:
        while True:
            if self._call is None or self._answer.over or self._ended:
                self._advance()
            try:
                delta = self._answer.take(next(self._call))
            except StopIteration:
                self._failed(self._answer.cut(self._url), RetryHint())
            except grpc.RpcError as exc:
                if self._ended:
                    raise Cancelled(f"request {self.request_id} was closed while it was being read") from exc
                self._failed(*self._answer.broke(exc, self._url), cause=exc)
            except TridentError as error:
                self._failed(error, RetryHint())
            except BaseException:
                self.cancel()
                raise
            else:
                if delta is not None:
                    return delta

    def complete(self) -> completion.Completion:
        """Reads to the end. The errors are those of the iteration; Cancelled if the stream was closed before."""
        watch, deltas = Stopwatch(), []
        for delta in self:
            watch.observe(delta)
            deltas.append(delta)
        if not self._answer.whole:  # closed between two deltas, which ends an iteration without a word
            raise Cancelled(f"request {self.request.request_id} was closed while it was being read")
        ttft_s = watch.ttft_s if self.request.stream else None
        return completion.join(deltas, self.request_id, ttft_s, watch.total_s)

    def _advance(self) -> None:
        """Opens the next attempt; raises StopIteration or the error of a stream that is over."""
        if self._answer.broken and not self._ended:
            self.cancel()
            raise self._answer.broken
        if self._answer.whole and not self._ended:
            self._drain()
        if self._ended:
            raise StopIteration
        if self._answer.left_s <= 0:
            self._ended = True
            raise self._answer.late()
        self.attempts += 1
        try:
            self._call = self._send(self.request, self._answer.left_s)
        except TridentError:
            self._ended = True
            raise

    def _failed(self, error: TridentError, hint: RetryHint, cause: BaseException | None = None) -> None:
        """Ends the attempt. Returns if there shall be another one, raises otherwise."""
        self._call.cancel()
        if not self._answer.started and not self._ended:
            wait_s = self._schedule.wait_s(error, hint, self._answer.left_s)
            if wait_s is not None:
                self._call = None
                if self._wake.wait(wait_s):
                    raise Cancelled(f"request {self.request_id} was closed while it waited to be tried again")
                return
        self._ended = True
        raise error from cause

    def _drain(self) -> None:
        """The answer is whole: reads up to the status, so that the server never takes our leaving for a cancel."""
        patience = threading.Timer(STATUS_PATIENCE_S, self._call.cancel)
        patience.daemon = True
        patience.start()
        # Whatever breaks after the answer does not take the answer back.
        with contextlib.suppress(grpc.RpcError, StopIteration):
            while True:
                next(self._call)
        patience.cancel()
        self._ended = True


class _Loop:
    """What ``for`` holds, and drops when the loop is left: then the stream is cancelled."""

    __slots__ = ("_stream",)

    def __init__(self, stream: BlockingStream) -> None:
        self._stream = stream

    def __iter__(self) -> _Loop:
        return self

    def __next__(self) -> TokenDelta:
        return next(self._stream)

    def __del__(self) -> None:
        self._stream.cancel()
