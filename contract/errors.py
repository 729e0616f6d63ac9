"""The one tree of errors, and what each of them is called on the wire.

    TridentError
    ├── InvalidArgument      a field holds a value that is not allowed        INVALID_ARGUMENT    400
    │   └── PromptTooLong    prompt + max_tokens exceed the engine's limits   INVALID_ARGUMENT    400
    ├── Unauthenticated      no key, or an unknown one                        UNAUTHENTICATED     401
    ├── PermissionDenied     a known key that may not do this                 PERMISSION_DENIED   403
    ├── NotFound             unknown model, engine or stream                  NOT_FOUND           404
    ├── Cancelled            the caller went away or asked to stop            CANCELLED           499
    ├── Overloaded           a bounded queue or a budget is full              RESOURCE_EXHAUSTED  429  retry
    ├── Unavailable          no healthy replica, starting, draining           UNAVAILABLE         503  retry
    ├── DeadlineExceeded     the deadline passed, in a queue or mid-stream    DEADLINE_EXCEEDED   504
    └── EngineFailed         the engine or a step of the ensemble broke       INTERNAL            500

Foreign errors (grpc, Triton, OpenVINO, tokenizers) are translated once, at the boundary where they
enter, with ``raise X(...) from exc``. Inside a Triton ensemble a started stream cannot carry an error
status (docs/decisions/0004), so errors travel in band as ``kind: message``; :func:`to_text` and
:func:`from_text` are that form.
"""

from __future__ import annotations

import re


class TridentError(Exception):
    """Base of everything Trident raises on purpose.

    internal: the text is for operators, and the gateway tells callers another. attempts: calls made for the request
    before it was given up, 0 if not counted.
    """

    grpc_status: str = "INTERNAL"
    http_status: int = 500
    retryable: bool = False
    internal: bool = False
    attempts: int = 0

    @property
    def message(self) -> str:
        return str(self)


class InvalidArgument(TridentError):
    """A field of the request holds a value that is not allowed. ``field`` names it."""

    grpc_status, http_status = "INVALID_ARGUMENT", 400

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        self.problem = problem
        super().__init__(f"{field}: {problem}" if field else problem)


class PromptTooLong(InvalidArgument):
    """Prompt and requested output do not fit the engine's limits."""


class Unauthenticated(TridentError):
    grpc_status, http_status = "UNAUTHENTICATED", 401


class PermissionDenied(TridentError):
    grpc_status, http_status = "PERMISSION_DENIED", 403


class NotFound(TridentError):
    grpc_status, http_status = "NOT_FOUND", 404


class Cancelled(TridentError):
    grpc_status, http_status = "CANCELLED", 499


class Overloaded(TridentError):
    """Refused at once because a bound is reached. ``retry_after_s`` is a hint, or None."""

    grpc_status, http_status, retryable = "RESOURCE_EXHAUSTED", 429, True

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class Unavailable(TridentError):
    """Nothing healthy to serve the request now. ``retry_after_s`` is a hint, or None."""

    grpc_status, http_status, retryable = "UNAVAILABLE", 503, True

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class DeadlineExceeded(TridentError):
    grpc_status, http_status = "DEADLINE_EXCEEDED", 504


class EngineFailed(TridentError):
    grpc_status, http_status = "INTERNAL", 500


def _leaves(cls: type[TridentError]) -> list[type[TridentError]]:
    return [cls] + [leaf for sub in cls.__subclasses__() for leaf in _leaves(sub)]


BY_NAME: dict[str, type[TridentError]] = {cls.__name__: cls for cls in _leaves(TridentError)}
# The first kind named in a text is the error; a later one is part of what it says.
_KIND = re.compile(rf"\b({'|'.join(BY_NAME)}): ")

# The first class of the tree that wears a status speaks for it when only the status is known.
BY_GRPC_STATUS: dict[str, type[TridentError]] = {}
for _cls in _leaves(TridentError)[1:]:
    BY_GRPC_STATUS.setdefault(_cls.grpc_status, _cls)


def make(cls: type[TridentError], message: str) -> TridentError:
    """An error of ``cls`` with ``message``, whatever its constructor asks for besides."""
    if issubclass(cls, InvalidArgument):
        field, sep, problem = message.partition(": ")
        return cls(field, problem) if sep and " " not in field else cls("", message)
    return cls(message)


def to_text(error: TridentError) -> str:
    """``Overloaded: the engine's queue is full …``: the in-band form of an error."""
    return f"{type(error).__name__}: {error}"


def from_text(text: str) -> TridentError | None:
    """The error inside ``text`` (Triton prefixes it with the ensemble's name), or None if there is none."""
    found = _KIND.search(text)
    return make(BY_NAME[found[1]], text[found.end() :]) if found else None
