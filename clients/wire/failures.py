"""Translate the errors of gRPC and Triton into ``contract.errors``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import grpc

from contract import errors
from contract.errors import TridentError

# How Triton 2.51's messages about an invalid request begin. They hold names that the client chose, so the beginning is
# matched before any phrase inside.
_PREFIX = re.compile(r"\A(in ensemble '[^']*', )?(\[request id: .*\] )?", re.DOTALL)
_WRONG_REQUEST = re.compile(
    r"unexpected (inference |explicit )?(input|output|shape|tensor|number of|'content')|incomplete string"
    r"|inference input '.*' data-?type is"
    r"|input '.*' (already exists|batch size|has no shape)|input byte size mismatch|inference request batch-size"
    r"|expected \d+ (string|inputs)|unable to find (data for input|shared memory)|contents field must not"
    r"|'shared_memory_byte_size' must|out of bounds index|failed to get model version|invalid value (type )?for '"
    r"|parameter keys starting with",
    re.IGNORECASE | re.DOTALL,
)

# Triton has no status code for most errors, and uses UNAVAILABLE for three different ones. First match wins.
_TRITON_PHRASES: tuple[tuple[re.Pattern[str], type[TridentError]], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), error)
    for pattern, error in (
        (r"exceeds maximum queue size|PEFT cache is full", errors.Overloaded),
        # The next request does (request_id_streams.py).
        (r"Please send LoRA weights with request", errors.Unavailable),
        (r"request timeout expired", errors.DeadlineExceeded),
        (r"protocol is restricted", errors.PermissionDenied),
        (r"has no available versions|is not ready|is not healthy|server is (stopping|exiting)", errors.Unavailable),
        (r"unknown model|model .* (is )?not found|failed to find", errors.ModelNotFound),
        (r"cancell?ed", errors.Cancelled),
        (r"unexpected (inference )?(input|output|shape)|data-?type is|expected \d+ inputs", errors.InvalidArgument),
        (r"missing .*input|input .* (must|dims)|(failed|unable) to parse|invalid argument", errors.InvalidArgument),
    )
)


# gRPC's messages when there was no connection.
_UNCONNECTED = ("failed to connect", "DNS resolution failed", "errors resolving")


@dataclass(frozen=True)
class RetryHint:
    """What is known about trying again.

    after_s: the wait that the server requests, None without one. never: it requests no retry. unsent: the request
    never reached a server, so that an attempt elsewhere adds no load.
    """

    after_s: float | None = None
    never: bool = False
    unsent: bool = False


def _without_prefix(text: str) -> str:
    return _PREFIX.sub("", text, count=1)


def is_wrong_request(text: str) -> bool:
    """Whether ``text`` is one of Triton's own complaints about the inputs or outputs of a request."""
    return bool(_WRONG_REQUEST.match(_without_prefix(text)))


def from_error_message(text: str) -> TridentError:
    """The error in a response's ``error_message``: ours in its in-band form, or Triton's own words."""
    words = _without_prefix(text)
    if _WRONG_REQUEST.match(words):
        return errors.InvalidArgument("", text)
    return errors.from_text(words) or _from_words(words, errors.EngineFailed)


def from_call(exc: grpc.RpcError, url: str) -> TridentError:
    """The error of a call that ended with a bad status."""
    return from_rpc(exc.code(), exc.details() or "", url, retry_hint(exc.trailing_metadata()))


def from_rpc(code: grpc.StatusCode, details: str, url: str = "", hint: RetryHint | None = None) -> TridentError:
    """The error a gRPC status means. ``url`` is named where the server could not be reached."""
    ours = errors.from_text(details)
    if ours is None:
        fallback = errors.BY_GRPC_STATUS.get(code.name, errors.EngineFailed)
        if code is grpc.StatusCode.NOT_FOUND:
            fallback = errors.ModelNotFound
        if never_reached(code, details):
            ours = errors.Unavailable(f"cannot reach {url or 'the server'}: {_short(details)}")
        elif code is grpc.StatusCode.UNIMPLEMENTED:
            ours = errors.EngineFailed(f"{url or 'the server'} does not offer this call: {details}")
        elif code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL):
            ours = _from_words(details, fallback)
        else:
            ours = errors.make(fallback, details or code.name)
    if hint and hint.after_s is not None and isinstance(ours, errors.Overloaded | errors.Unavailable):
        ours.retry_after_s = hint.after_s
    return ours


def retry_hint(trailers: Iterable[tuple[str, str | bytes]] | None) -> RetryHint:
    """The hint in a call's trailers.

    ``retry-after-ms`` and ``grpc-retry-pushback-ms`` (negative: do not retry), and google.rpc.RetryInfo in
    ``grpc-status-details-bin``. The longest wait wins.
    """
    waits_s: list[float] = []
    for key, value in trailers or ():
        if key in ("retry-after-ms", "grpc-retry-pushback-ms"):
            wait_ms = _number(value)
            if key == "grpc-retry-pushback-ms" and (wait_ms is None or wait_ms < 0):
                return RetryHint(never=True)  # gRPC's rule: a pushback that is no number means never
            if wait_ms is not None and wait_ms >= 0:
                waits_s.append(wait_ms / 1e3)
        elif key == "grpc-status-details-bin" and isinstance(value, bytes):
            waits_s += _retry_info_s(value)
    return RetryHint(max(waits_s, default=None))


def _retry_info_s(data: bytes) -> list[float]:
    """Return the delays of every RetryInfo in a google.rpc.Status, none if it cannot be parsed.

    The classes are imported here: most programs never get such a status, and the import takes 10 ms.
    """
    from google.protobuf.message import DecodeError
    from google.rpc.error_details_pb2 import RetryInfo
    from google.rpc.status_pb2 import Status

    delays_s = []
    try:
        for detail in Status.FromString(data).details:
            if detail.Is(RetryInfo.DESCRIPTOR):
                delays_s.append(RetryInfo.FromString(detail.value).retry_delay.ToNanoseconds() / 1e9)
    except DecodeError:
        return []
    return [delay_s for delay_s in delays_s if delay_s >= 0]


def _from_words(text: str, fallback: type[TridentError]) -> TridentError:
    for pattern, error in _TRITON_PHRASES:
        if pattern.search(text):
            return errors.InvalidArgument("", text) if error is errors.InvalidArgument else error(text)
    return errors.make(fallback, text)


def unreadable(problem: Exception) -> errors.EngineFailed:
    """Return the error for bytes that are not a response; raise it from ``problem``."""
    return errors.EngineFailed(f"the server sent an unreadable response: {problem}")


def never_reached(code: grpc.StatusCode, details: str) -> bool:
    """Whether a call failed before anything of it was sent."""
    return code is grpc.StatusCode.UNAVAILABLE and any(words in details for words in _UNCONNECTED)


def _short(details: str) -> str:
    """gRPC's last cause alone: ``Connection refused`` out of two lines of addresses."""
    return details.rsplit("last error: ", 1)[-1].rsplit("endpoint: ", 1)[-1][:200]


def _number(value: str | bytes) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
