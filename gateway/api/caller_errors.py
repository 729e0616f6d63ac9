"""Replace the text of errors that replicas and upstreams cause with a fixed message per error type and a request id.

The original text may contain paths, addresses, gRPC errors, signals or an upstream's account, so only the log has it,
under the same request id. A replica's error about an input of the request is passed on: only the client can correct
the input. An upstream's 400 keeps its ``param``, if that is one of OpenAI's, and loses its message.
"""

from __future__ import annotations

from contract.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidArgument,
    ModelNotFound,
    NotFound,
    Overloaded,
    PromptTooLong,
    TridentError,
    Unavailable,
)
from gateway.routing.backend_errors import INPUT_NAME

_MESSAGES: dict[type[TridentError], str] = {
    PromptTooLong: "the prompt and max_tokens exceed the context length of the model",
    InvalidArgument: "the model rejected a field of the request",
    NotFound: "what the request names does not exist",
    ModelNotFound: "the model, or the requested version, does not exist",
    Cancelled: "the request was cancelled",
    Overloaded: "the engine's queue is full",
    Unavailable: "no healthy replica can serve the request, or the connection to its replica was lost",
    DeadlineExceeded: "the request timed out before its response was complete",
    EngineFailed: "the engine failed while it served the request",
}


def for_caller(error: TridentError, request_id: str = "") -> TridentError:
    """Return the error to send to the client: unchanged, or of the same type with a fixed message if it is internal."""
    if not error.internal:
        return error
    kind = next(kind for kind in type(error).__mro__ if kind in _MESSAGES or kind is TridentError)
    message = _MESSAGES.get(kind, _MESSAGES[EngineFailed])
    if error.attempts > 1:
        message += f"; it was tried {error.attempts} times"
    if request_id:
        message += f"; quote request {request_id} when you report it"
    if isinstance(error, InvalidArgument):
        return (PromptTooLong if kind is PromptTooLong else InvalidArgument)(
            error.field if INPUT_NAME.fullmatch(error.field) else "", message
        )
    shown = (EngineFailed if kind is TridentError else kind)(message)
    if isinstance(error, Overloaded | Unavailable) and isinstance(shown, Overloaded | Unavailable):
        shown.retry_after_s = error.retry_after_s
    return shown
