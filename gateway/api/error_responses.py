"""An error as each protocol says it: OpenAI's error object with its headers, or a gRPC status with its trailers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import grpc
import orjson

from clients.wire.protobuf import chunk, text, varint
from contract.errors import (
    InvalidArgument,
    NotFound,
    Overloaded,
    PromptTooLong,
    TridentError,
    Unauthenticated,
    Unavailable,
)
from gateway.api.caller_errors import for_caller

# error → OpenAI's (type, code), by HTTP status.
_OPENAI = {
    400: ("invalid_request_error", "invalid_value"),
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("permission_error", "permission_denied"),
    404: ("invalid_request_error", "model_not_found"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    499: ("cancelled", "cancelled"),
    503: ("server_error", "unavailable"),
    504: ("timeout_error", "deadline_exceeded"),
    500: ("server_error", "engine_failed"),
}
_JSON = (b"content-type", b"application/json")


def error_object(error: TridentError) -> dict:
    """``{"error": {...}}`` as OpenAI's clients read it."""
    error = for_caller(error)
    kind, code = _OPENAI[error.http_status]
    param = (error.field or None) if isinstance(error, InvalidArgument) else None
    if isinstance(error, NotFound):
        param = "model"
    if isinstance(error, PromptTooLong):
        code = "context_length_exceeded"  # by which callers know to send less
    return {"error": {"message": error.message, "type": kind, "param": param, "code": code}}


def http(error: TridentError) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body."""
    return error.http_status, [_JSON, *_as_headers(hints(error))], orjson.dumps(error_object(error))


def plain(status: int, message: str, code: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """The same for what only HTTP knows: no such path, a body too large."""
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return status, [_JSON], orjson.dumps(body)


def hints(error: TridentError) -> dict[str, str]:
    """What a refusal says about trying again, in the headers of either protocol."""
    found = dict(error.headers)
    if isinstance(error, Unauthenticated):
        found["www-authenticate"] = "Bearer"
    after_s = retry_after_s(error)
    if after_s is not None:
        found["retry-after"] = str(max(1, math.ceil(after_s)))
        found["retry-after-ms"] = str(max(1, round(after_s * 1e3)))
    return found


def retry_after_s(error: TridentError) -> float | None:
    if not isinstance(error, Overloaded | Unavailable):
        return None
    return 1.0 if error.retry_after_s is None else error.retry_after_s


def grpc_status(error: TridentError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]:
    """Code, details and trailers, ``google.rpc.RetryInfo`` among them."""
    error = for_caller(error)
    code, trailers = grpc.StatusCode[error.grpc_status], []
    for key, value in hints(error).items():
        if key not in ("retry-after", "www-authenticate"):
            trailers.append((key, value))
    after_s = retry_after_s(error)
    if after_s is not None:
        trailers.append(("grpc-retry-pushback-ms", str(max(1, round(after_s * 1e3)))))
        trailers.append(("grpc-status-details-bin", _status(code, error.message, after_s)))
    return code, error.message, tuple(trailers)


def _status(code: grpc.StatusCode, message: str, after_s: float) -> bytes:
    """google.rpc.Status{1: code, 2: message, 3: Any{1: type_url, 2: RetryInfo{1: Duration{1: s, 2: ns}}}}."""
    seconds = int(after_s)
    duration = b"\x08" + varint(seconds) + b"\x10" + varint(int((after_s - seconds) * 1e9))
    detail = text(1, "type.googleapis.com/google.rpc.RetryInfo") + chunk(2, chunk(1, duration))
    return b"\x08" + varint(code.value[0]) + text(2, message) + chunk(3, detail)


def _as_headers(values: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(key.encode(), value.encode()) for key, value in values.items()]
