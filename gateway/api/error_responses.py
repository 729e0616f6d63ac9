"""Convert errors to each protocol: OpenAI's error object with its headers, or a gRPC status with its trailers.

What replicas and upstreams say when they fail (paths, addresses, signals, accounts) only the log has; callers get a
fixed message per error type and a request id. A replica's error about an input of the request is passed on. An
upstream's 400 keeps its ``param``, if that is one of OpenAI's.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import orjson
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from starlette.requests import Request
from starlette.responses import Response

from contract import errors
from contract.errors import InvalidArgument, Overloaded, TridentError, Unavailable
from gateway.routing.backend_errors import INPUT_NAME

_MESSAGES: dict[type[TridentError], str] = {
    errors.PromptTooLong: "the prompt and max_tokens exceed the context length of the model",
    InvalidArgument: "the model rejected a field of the request",
    errors.NotFound: "what the request names does not exist",
    errors.ModelNotFound: "the model, or the requested version, does not exist",
    errors.Cancelled: "the request was cancelled",
    Overloaded: "the engine's queue is full",
    Unavailable: "no healthy replica can serve the request, or the connection to its replica was lost",
    errors.DeadlineExceeded: "the request timed out before its response was complete",
    errors.EngineFailed: "the engine failed while it served the request",
}
# OpenAI's (type, code) by HTTP status.
_OPENAI = {
    400: ("invalid_request_error", "invalid_value"),
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("permission_error", "permission_denied"),
    404: ("invalid_request_error", "not_found"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    499: ("cancelled", "cancelled"),
    503: ("server_error", "unavailable"),
    504: ("timeout_error", "deadline_exceeded"),
    500: ("server_error", "engine_failed"),
}
JSON = (b"content-type", b"application/json")


def for_caller(error: TridentError, request_id: str = "") -> TridentError:
    """Return the error to send to the client: unchanged, or of the same type with a fixed message if it is internal."""
    if not error.internal:
        return error
    kind = next((kind for kind in type(error).__mro__ if kind in _MESSAGES), errors.EngineFailed)
    message = _MESSAGES[kind]
    if error.attempts > 1:
        message += f"; it was tried {error.attempts} times"
    if request_id:
        message += f"; quote request {request_id} when you report it"
    if isinstance(error, InvalidArgument) and INPUT_NAME.fullmatch(error.field):
        message = f"{error.field}: {message}"
    shown = errors.make(kind, message)
    shown.retry_after_s = error.retry_after_s
    return shown


def error_object(error: TridentError) -> dict[str, Any]:
    """Return ``{"error": {...}}`` as OpenAI's clients read it."""
    error = for_caller(error)
    kind, code = _OPENAI[error.http_status]
    param = (error.field or None) if isinstance(error, InvalidArgument) else None
    if isinstance(error, errors.ModelNotFound):
        param, code = "model", "model_not_found"
    if error.reason == "quota":
        kind = code = "insufficient_quota"  # what OpenAI's clients do not try again soon
    if isinstance(error, errors.PromptTooLong):
        code = "context_length_exceeded"  # clients recognise this code and send less
    return {"error": {"message": error.message, "type": kind, "param": param, "code": code}}


def http(error: TridentError) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Return status, headers and body."""
    headers = ((key.encode(), value.encode()) for key, value in hints(error).items())
    return error.http_status, [JSON, *headers], orjson.dumps(error_object(error))


def plain(status: int, message: str, code: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Return status, headers and body of an error that only HTTP has, such as an unknown path."""
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return status, [JSON], orjson.dumps(body)


def response(status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> Response:
    """Return what ``http`` or ``plain`` returned as a response of Starlette."""
    return Response(body, status, {key.decode(): value.decode() for key, value in headers})


def answering(handle: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint that sends what ``handle`` returns, as JSON if it is no response, or its error."""

    async def endpoint(request: Request) -> Response:
        try:
            fields = await handle(request)
        except TridentError as error:
            return response(*http(error))
        return fields if isinstance(fields, Response) else Response(orjson.dumps(fields), media_type="application/json")

    return endpoint


def hints(error: TridentError) -> dict[str, str]:
    """Return the headers, or trailers, that tell a client when to retry and how to authenticate."""
    found = dict(error.headers)
    if isinstance(error, errors.Unauthenticated):
        found.setdefault("www-authenticate", "Bearer")
    # Admission says when to return after a wait in its queue, too.
    after_s = error.retry_after_s if isinstance(error, errors.DeadlineExceeded) else retry_after_s(error)
    if after_s is not None:
        found["retry-after"] = str(max(1, math.ceil(after_s)))
        found["retry-after-ms"] = str(max(1, round(after_s * 1e3)))
    return found


def retry_after_s(error: TridentError) -> float | None:
    """Return when a client may retry, None for an error that a retry does not mend."""
    if not isinstance(error, Overloaded | Unavailable):
        return None
    return 1.0 if error.retry_after_s is None else error.retry_after_s


def grpc_status(error: TridentError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]:
    """Return code, details and trailers, with a ``google.rpc.RetryInfo`` where a retry helps."""
    error = for_caller(error)
    code = grpc.StatusCode[error.grpc_status]
    left_out = ("retry-after", "www-authenticate")
    trailers: list[tuple[str, str | bytes]] = [one for one in hints(error).items() if one[0] not in left_out]
    after_s = retry_after_s(error)
    if after_s is not None:
        trailers.append(("grpc-retry-pushback-ms", str(max(1, round(after_s * 1e3)))))
        detail = AnyMessage()
        detail.Pack(RetryInfo(retry_delay=Duration(seconds=int(after_s), nanos=int(after_s % 1 * 1e9))))
        status = Status(code=code.value[0], message=error.message, details=[detail])
        trailers.append(("grpc-status-details-bin", status.SerializeToString()))
    return code, error.message, tuple(trailers)
