"""Which errors of replicas and upstreams are internal."""

from __future__ import annotations

import pytest

from contract.errors import EngineFailed, InvalidArgument, Overloaded, PermissionDenied, Unauthenticated, Unavailable
from gateway.routing.backend_errors import from_backend, is_about_the_request


def test_a_refusal_of_the_requests_own_input_is_shown_to_the_caller():
    error = InvalidArgument("max_tokens", "got 0")
    assert is_about_the_request(error) and from_backend(error) is error and not error.internal


@pytest.mark.parametrize("error", [EngineFailed("signal 11"), Overloaded("full", 1.0), InvalidArgument("", "/path")])
def test_other_errors_are_internal(error):
    assert from_backend(error) is error and error.internal


@pytest.mark.parametrize("kind", [Unauthenticated, PermissionDenied])
def test_credentials_of_the_gateway_are_no_fault_of_the_caller(kind):
    error = from_backend(kind("no key"))
    assert type(error) is Unavailable and error.internal and isinstance(error.__cause__, kind)
