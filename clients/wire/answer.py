"""The answer to one request while it arrives: what the messages of its stream mean. Moves no bytes itself."""

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


def read(decode: Callable[[bytes], tuple[TokenDelta | None, bool, str]], data: bytes) -> tuple[TokenDelta | None, bool]:
    """(the delta in one message or None, whether it is the last). Raises the error it carries instead."""
    try:
        delta, final, message = decode(data)
    except protobuf.WireError as exc:
        raise failures.unreadable(exc) from exc
    if message:
        raise failures.from_error_message(message)
    return delta, final


class Answer:
    """What is known of the answer so far.

    started: a delta was handed out, so nothing may be tried again. whole: the last delta was handed out; ``last``
    is that one. broken: an error that was found behind text, to be raised once that text has been handed out.
    Instants are on the monotonic clock; first_s is 0 before the first delta.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self.timeout_s = DEFAULT_TIMEOUT_S if request.timeout_s is None else request.timeout_s
        self.begun_s = time.monotonic()
        self.deadline_s = self.begun_s + self.timeout_s
        self.first_s = 0.0
        self.tokens = 0
        self.last: TokenDelta | None = None
        self.started = False
        self.whole = False
        self.broken: TridentError | None = None
        self._decode = infer_response.ResponseDecoder().decode

    @property
    def over(self) -> bool:
        """Whether reading on would bring nothing to hand out."""
        return self.whole or self.broken is not None

    @property
    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()

    def take(self, data: bytes) -> TokenDelta | None:
        """The delta in one message, None if it carries none. Raises the error it carries instead."""
        delta, final = read(self._decode, data)
        if delta is None:
            self.whole = self.whole or final
            return None
        if final or delta.finish_reason is not None:
            if delta.finish_reason is FinishReason.ERROR:
                error = failures.from_error_message(delta.error) if delta.error else EngineFailed("no reason given")
                if not (delta.text or delta.token_ids):
                    raise error
                self.broken = error
                delta = dataclasses.replace(delta, finish_reason=None, error="", usage=None, timings=None)
            else:
                self.whole = True
                self.last = delta
        if not self.started:
            self.started = True
            self.first_s = time.monotonic()
        self.tokens += len(delta.token_ids)
        return delta

    def broke(self, status: grpc.RpcError, url: str) -> tuple[TridentError, RetryHint]:
        """The error and the hint of a call that ended with a bad status."""
        hint = failures.retry_hint(status.trailing_metadata())
        if status.code() is grpc.StatusCode.DEADLINE_EXCEEDED and self.left_s < 0.05:
            return self.late(), hint
        details = status.details() or ""
        if failures.never_reached(status.code(), details):
            hint = dataclasses.replace(hint, unsent=True)
        if status.code() is grpc.StatusCode.CANCELLED:
            # Our own cancels do not come here: it is a server that stops, and that is what the caller is to hear.
            return Unavailable(f"{url} gave the call up {self._where('before the first token')}: {details}"), hint
        return failures.from_rpc(status.code(), details, url, hint), hint

    def late(self) -> DeadlineExceeded:
        """The error of a request whose deadline has passed."""
        return DeadlineExceeded(f"the deadline of {self.timeout_s:g} s passed {self._where('before the first token')}")

    def cut(self, url: str) -> Unavailable:
        """The error of a stream that the server closed without an end."""
        return Unavailable(f"{url} closed the stream {self._where('without an answer')}, with no final response")

    def _where(self, nowhere: str) -> str:
        return f"after {self.tokens} tokens" if self.started else nowhere
