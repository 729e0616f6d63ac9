"""Read one generation as it arrives, in programs without an event loop: an iterator of TokenDelta.

The rules are those of ``token_stream``: leaving it cancels, and nothing is retried after the first token. The
thread that iterates does all the work, so a stream needs no thread of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from clients.wire.completion import Collector, Completion
from clients.wire.failures import RetryHint
from clients.wire.response_reader import ResponseReader
from clients.wire.retries import RetrySchedule
from clients.wire.token_stream import STATUS_TIMEOUT_S, Refused
from contract.errors import Cancelled, TridentError
from contract.generation import GenerationRequest, TokenDelta


class BlockingStream:
    """An iterator that ends after the delta with ``finish_reason`` and raises TridentError.

    Also a context manager: leaving the block cancels the call. ``cancel`` may be called by another thread;
    the iterating thread then gets Cancelled.
    """

    def __init__(
        self,
        send: Callable[[GenerationRequest, float], grpc.Call],
        url: str,
        request: GenerationRequest,
        schedule: RetrySchedule,
        refused: Refused = lambda error: False,
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.attempts = 0
        self._response = ResponseReader(request)
        self._send = send
        self._url = url
        self._schedule = schedule
        self._refused = refused
        self._call: Any = None  # a grpc.Call while one is in progress
        self._ended = False
        self._wake = threading.Event()  # set by cancel, so that a wait between attempts ends

    @property
    def tokens(self) -> int:
        """Tokens received so far."""
        return self._response.tokens

    def __iter__(self) -> Iterator[TokenDelta]:
        """Return what ``for`` holds: when the loop is left it is dropped, which cancels the stream."""
        try:
            while True:
                try:
                    delta = next(self)
                except StopIteration:
                    return
                yield delta
        finally:
            self.cancel()

    def __enter__(self) -> BlockingStream:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Cancel the call if it still runs. Safe to call twice, and from any thread."""
        self._ended = True
        self._wake.set()
        if self._call is not None:
            self._call.cancel()

    def __next__(self) -> TokenDelta:
        while True:
            if self._call is None or self._response.ended or self._ended:
                self._advance()
            try:
                delta = self._response.read(next(self._call))
            except StopIteration:
                self._failed(self._response.truncation_error(self._url), RetryHint())
            except grpc.RpcError as exc:
                if self._ended:
                    raise Cancelled(f"request {self.request_id} was closed while it was being read") from exc
                self._failed(*self._response.status_error(exc, self._url), cause=exc)
            except TridentError as error:
                self._failed(error, RetryHint())
            except BaseException:
                self.cancel()
                raise
            else:
                if delta is not None:
                    return delta

    def complete(self) -> Completion:
        """Read to the end. Raises what the iteration raises, and Cancelled if the stream was closed before."""
        collected = Collector(self.request)
        for delta in self:
            collected.add(delta)
        return collected.completion(self._response.complete)

    def _advance(self) -> None:
        """Open the next attempt. Raises StopIteration, or the error of a stream that has ended."""
        if self._response.deferred_error and not self._ended:
            self.cancel()
            raise self._response.deferred_error
        if self._response.complete and not self._ended:
            self._drain()
        if self._ended:
            raise StopIteration
        if self._response.remaining_s <= 0:
            self._ended = True
            raise self._response.deadline_error()
        self.attempts += 1
        try:
            self._call = self._send(self.request, self._response.remaining_s)
        except TridentError:
            self._ended = True
            raise
        if self._ended:  # a cancel in another thread came too early to find the call
            self._call.cancel()

    def _failed(self, error: TridentError, hint: RetryHint, cause: BaseException | None = None) -> None:
        """End the attempt. Return if another one follows, raise otherwise."""
        self._call.cancel()
        refused = self._refused(error)
        if not self._response.started and not self._ended:
            wait_s = 0.0 if refused else self._schedule.wait_s(error, hint, self._response.remaining_s)
            if wait_s is not None:
                self._call = None
                if self._wake.wait(wait_s):
                    raise Cancelled(f"request {self.request_id} was closed while it waited to be tried again")
                return
        self._ended = True
        raise error from cause

    def _drain(self) -> None:
        """Read up to the status after the last delta, so that the server does not see a cancel."""
        timeout = threading.Timer(STATUS_TIMEOUT_S, self._call.cancel)
        timeout.daemon = True
        timeout.start()
        # Errors after the last delta do not matter: the response is complete.
        with contextlib.suppress(grpc.RpcError, StopIteration):
            while True:
                next(self._call)
        timeout.cancel()
        self._ended = True
