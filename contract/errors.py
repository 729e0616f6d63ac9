"""The errors and their names on the wire.

    TridentError
    ├── InvalidArgument      a field holds a value that is not allowed        INVALID_ARGUMENT    400
    │   └── PromptTooLong    prompt + max_tokens exceed the engine's limits   INVALID_ARGUMENT    400
    ├── Unauthenticated      no key, or an unknown one                        UNAUTHENTICATED     401
    ├── PermissionDenied     a known key that may not do this                 PERMISSION_DENIED   403
    ├── NotFound             unknown engine, stream, file, key                NOT_FOUND           404
    │   └── ModelNotFound    unknown model                                    NOT_FOUND           404
    ├── Cancelled            the client disconnected or sent a stop request   CANCELLED           499
    ├── Overloaded           a bounded queue or a budget is full              RESOURCE_EXHAUSTED  429  retry
    ├── Unavailable          no healthy replica, starting, draining           UNAVAILABLE         503  retry
    ├── DeadlineExceeded     the deadline passed, in a queue or mid-stream    DEADLINE_EXCEEDED   504
    └── EngineFailed         the engine or a step of the ensemble broke       INTERNAL            500

Errors of libraries (grpc, Triton, OpenVINO, tokenizers) are translated once, where they enter, with ``raise X(...) from
exc``. A started stream of a Triton ensemble cannot end with an error status (docs/decisions/0004), so errors are sent
in band as ``kind: message``; :func:`to_text` writes that form and :func:`from_text` reads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType


class TridentError(Exception):
    """Base of the errors that Trident raises.

    grpc_status, http_status: how the error is reported to a client.
    retryable: the same request may succeed later or on another replica.
    internal: the message is for operators; the gateway sends callers a general one.
    attempts: calls made for the request, 0 if not counted.
    retry_after_s: hint when to retry, or None.
    reason: label of the refusal in metrics, empty for the class name.
    headers: HTTP response headers to send with the error.
    """

    grpc_status: str = "INTERNAL"
    http_status: int = 500
    retryable: bool = False
    internal: bool = False
    attempts: int = 0
    retry_after_s: float | None = None
    reason: str = ""
    headers: Mapping[str, str] = MappingProxyType({})

    def __init__(self, message: str = "", retry_after_s: float | None = None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)

    @property
    def message(self) -> str:
        return str(self)


class InvalidArgument(TridentError):
    """A field holds a value that is not allowed. field: its name, or empty. problem: the message without it."""

    grpc_status, http_status = "INVALID_ARGUMENT", 400

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        self.problem = problem
        super().__init__(f"{field}: {problem}" if field else problem)

    def __reduce__(self) -> tuple[type, tuple[str, str], dict]:
        return type(self), (self.field, self.problem), self.__dict__


class PromptTooLong(InvalidArgument):
    """Prompt and requested output do not fit the engine's limits."""


class Unauthenticated(TridentError):
    grpc_status, http_status = "UNAUTHENTICATED", 401


class PermissionDenied(TridentError):
    grpc_status, http_status = "PERMISSION_DENIED", 403


class NotFound(TridentError):
    grpc_status, http_status = "NOT_FOUND", 404


class ModelNotFound(NotFound):
    """The model that a request names does not exist."""


class Cancelled(TridentError):
    grpc_status, http_status = "CANCELLED", 499


class Overloaded(TridentError):
    """A bounded queue or a budget is full."""

    grpc_status, http_status, retryable = "RESOURCE_EXHAUSTED", 429, True


class Unavailable(TridentError):
    """No healthy replica can serve the request now."""

    grpc_status, http_status, retryable = "UNAVAILABLE", 503, True


class DeadlineExceeded(TridentError):
    grpc_status, http_status = "DEADLINE_EXCEEDED", 504


class EngineFailed(TridentError):
    grpc_status, http_status = "INTERNAL", 500


def _leaves(cls: type[TridentError]) -> list[type[TridentError]]:
    return [cls] + [leaf for sub in cls.__subclasses__() for leaf in _leaves(sub)]


BY_NAME: dict[str, type[TridentError]] = {cls.__name__: cls for cls in _leaves(TridentError)}
# The first kind named in a text is the error; a later one is part of its message.
_KIND = re.compile(rf"\b({'|'.join(BY_NAME)}): ")

_FIELD = re.compile(r"\S+( \(\S+\))?")  # such as runtime_top_p (top_p)

# The first class of the tree with a status stands for that status.
BY_GRPC_STATUS = {cls.grpc_status: cls for cls in reversed(_leaves(TridentError)[1:])}


def make(cls: type[TridentError], message: str) -> TridentError:
    """Return an error of ``cls`` with ``message``, whatever its constructor's parameters."""
    if issubclass(cls, InvalidArgument):
        field, sep, problem = message.partition(": ")
        return cls(field, problem) if sep and _FIELD.fullmatch(field) else cls("", message)
    return cls(message)


def of_ours(exc: Exception, problem: str) -> TridentError:
    """Return ``exc`` if it is one of these errors, else EngineFailed, which says ``problem`` before it."""
    return exc if isinstance(exc, TridentError) else EngineFailed(f"{problem}: {exc!r}")


def to_text(error: TridentError) -> str:
    """Return the in-band form of an error, e.g. ``Overloaded: queue full: …``."""
    return f"{type(error).__name__}: {error}"


def from_text(text: str) -> TridentError | None:
    """Return the error in ``text``, which Triton may have prefixed with the ensemble's name; None if there is none."""
    found = _KIND.search(text)
    return make(BY_NAME[found[1]], text[found.end() :]) if found else None
