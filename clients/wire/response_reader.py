"""Read the response to one request while it arrives: what the messages of its stream mean. Does no I/O itself."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import grpc

from clients.wire import failures, infer_response, protobuf
from clients.wire.connection import DEFAULT_TIMEOUT_S
from clients.wire.failures import RetryHint
from contract.errors import DeadlineExceeded, EngineFailed, TridentError, Unavailable
from contract.generation import FinishReason, GenerationRequest, TokenDelta

Decode = Callable[[bytes], tuple[TokenDelta | None, bool, str]]


def read_message(decode: Decode, data: bytes) -> tuple[TokenDelta | None, bool]:
    """Return (the delta in one message or None, whether it is the last). Raises the error that it carries instead."""
    try:
        delta, final, message = decode(data)
    except protobuf.WireError as exc:
        raise failures.unreadable(exc) from exc
    if message:
        raise failures.from_error_message(message)
    return delta, final


class ResponseReader:
    """The state of one response.

    started: a delta was returned, so the request must not be sent again.
    complete: the last delta was returned; ``last`` is that delta.
    deferred_error: an error that came behind text in one message, to be raised after that text.
    ended: further messages hold nothing to return.
    tokens: received so far.
    deadline_s: on the monotonic clock.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self.timeout_s = DEFAULT_TIMEOUT_S if request.timeout_s is None else request.timeout_s
        self.deadline_s = time.monotonic() + self.timeout_s
        self.tokens = 0
        self.last: TokenDelta | None = None
        self.started = False
        self.complete = False
        self.ended = False
        self.deferred_error: TridentError | None = None
        self._decode = infer_response.ResponseDecoder().decode

    @property
    def remaining_s(self) -> float:
        return self.deadline_s - time.monotonic()

    def read(self, data: bytes) -> TokenDelta | None:
        """Return the delta in one message, None if it has no outputs. Raises the error that it carries instead."""
        delta, final = read_message(self._decode, data)
        if delta is None:
            if final:
                self.complete = self.ended = True
            return None
        if final or delta.finish_reason is not None:
            if delta.finish_reason is FinishReason.ERROR:
                if not (delta.text or delta.token_ids):
                    raise _error_of(delta)
                self.deferred_error = _error_of(delta)
                delta = dataclasses.replace(delta, finish_reason=None, error="", usage=None, timings=None)
            else:
                self.complete = True
                self.last = delta
            self.ended = True
        self.started = True
        self.tokens += len(delta.token_ids)
        return delta

    def status_error(self, status: grpc.RpcError, url: str) -> tuple[TridentError, RetryHint]:
        """Return the error and the retry hint of a call that ended with a bad status."""
        hint = failures.retry_hint(status.trailing_metadata())
        if status.code() is grpc.StatusCode.DEADLINE_EXCEEDED and self.remaining_s < 0.05:
            return self.deadline_error(), hint
        details = status.details() or ""
        if failures.never_reached(status.code(), details):
            hint = dataclasses.replace(hint, unsent=True)
        broken = self.started and status.code() is grpc.StatusCode.UNAVAILABLE
        if broken or status.code() is grpc.StatusCode.CANCELLED:
            # A server sends its errors in band, and our own cancels do not come here: it is stopping, or gone.
            return Unavailable(f"{url} ended the call {self._position()}: {details}"), hint
        return failures.from_rpc(status.code(), details, url, hint), hint

    def deadline_error(self) -> DeadlineExceeded:
        """Return the error of a request whose deadline has passed."""
        return DeadlineExceeded(f"the deadline of {self.timeout_s:g} s passed {self._position()}")

    def truncation_error(self, url: str) -> Unavailable:
        """Return the error of a stream that the server closed without a final response."""
        position = self._position("without a response")
        return Unavailable(f"{url} closed the stream {position}, with no final response")

    def _position(self, at_start: str = "before the first token") -> str:
        return f"after {self.tokens} tokens" if self.started else at_start


# Its caller keeps the error in no variable: with the traceback that would form a reference cycle.
def _error_of(delta: TokenDelta) -> TridentError:
    return failures.from_error_message(delta.error) if delta.error else EngineFailed("no reason given")
