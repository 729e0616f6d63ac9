"""Which errors of replicas and upstreams are internal."""

from __future__ import annotations

import pytest

from clients.wire.failures import from_error_message
from contract.errors import EngineFailed, InvalidArgument, Overloaded, PermissionDenied, Unauthenticated, Unavailable
from gateway.routing.backend_errors import from_backend, is_about_the_request


@pytest.mark.parametrize("field", ["max_tokens", "text_input[70]", "runtime_top_k (top_k)"])
def test_a_refusal_of_the_requests_own_input_is_shown_to_the_caller(field):
    error = InvalidArgument(field, "got 0")
    assert is_about_the_request(error) and from_backend(error) is error and not error.internal


def test_tritons_complaint_about_a_datatype_is_shown_too():
    text = "inference input 'temperature' data-type is 'FP64', but model 'ensemble' expects 'FP32'"
    assert is_about_the_request(from_error_message(text))


@pytest.mark.parametrize("error", [EngineFailed("signal 11"), Overloaded("full", 1.0), InvalidArgument("", "/path")])
def test_other_errors_are_internal(error):
    assert from_backend(error) is error and error.internal


@pytest.mark.parametrize("kind", [Unauthenticated, PermissionDenied])
def test_credentials_of_the_gateway_are_no_fault_of_the_caller(kind):
    error = from_backend(kind("no key"))
    assert type(error) is Unavailable and error.internal and isinstance(error.__cause__, kind)
