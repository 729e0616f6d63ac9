"""What callers are shown of errors that replicas and upstreams cause: a fixed sentence for each kind, an id to quote.

The error's own text may hold paths, addresses, wire errors, signals or an upstream's account, so it goes to the log
only, under the same request id. What a replica says about the request itself, naming an input, is passed on: only the
caller can mend it. An upstream's 400 is shown with its ``param``, if that is one of OpenAI's, and without its message.
"""

from __future__ import annotations

from contract.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidArgument,
    NotFound,
    Overloaded,
    PromptTooLong,
    TridentError,
    Unavailable,
)
from gateway.routing.backend_errors import INPUT_NAME

_SENTENCES: dict[type[TridentError], str] = {
    PromptTooLong: "the prompt and the tokens asked for do not fit the model that was to serve the request",
    InvalidArgument: "the model that was to serve the request does not take it as it is",
    NotFound: "the model, or the version asked for, is not there",
    Cancelled: "the request was cancelled",
    Overloaded: "the engine's queue is full",
    Unavailable: "no engine is fit to serve the request, or the one that served it was lost",
    DeadlineExceeded: "the request's time was up before its answer was complete",
    EngineFailed: "the engine failed while it served the request",
}


def for_caller(error: TridentError, request_id: str = "") -> TridentError:
    """The error as its caller may read it: itself, or one of the same kind with a fixed sentence if it is internal."""
    if not error.internal:
        return error
    kind = next(kind for kind in type(error).__mro__ if kind in _SENTENCES or kind is TridentError)
    message = _SENTENCES.get(kind, _SENTENCES[EngineFailed])
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
