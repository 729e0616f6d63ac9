"""Errors of replicas and upstreams, marked internal unless they are about the request itself."""

from __future__ import annotations

import re

from clients.wire.failures import is_wrong_request
from contract.errors import InvalidArgument, PermissionDenied, TridentError, Unauthenticated, Unavailable

_NAME = r"[A-Za-z_][\w.-]{0,63}"
# With the row of a batch, or with the name that the ensemble's callers know.
INPUT_NAME = re.compile(rf"{_NAME}(\[\d{{1,9}}\]| \({_NAME}\))?")


def from_backend(error: TridentError) -> TridentError:
    """Return the error of a stream, marked internal unless it is about the request. Unauthenticated and
    PermissionDenied become Unavailable: they are about the gateway, not about its client."""
    if error.internal or is_about_the_request(error):
        return error
    if isinstance(error, Unauthenticated | PermissionDenied):
        refused = Unavailable(f"{type(error).__name__}: {error}")
        refused.__cause__ = error
        error = refused
    error.internal = True
    return error


def is_about_the_request(error: TridentError) -> bool:
    """Return whether a replica refused the request's own inputs, in our words or in Triton's."""
    if not isinstance(error, InvalidArgument):
        return False
    return bool(INPUT_NAME.fullmatch(error.field)) or is_wrong_request(error.problem)
