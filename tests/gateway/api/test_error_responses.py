"""One error in each protocol's words."""

from __future__ import annotations

import json

import pytest

from clients.wire.failures import from_rpc, retry_hint
from contract.errors import BY_NAME, InvalidArgument, Overloaded, Unauthenticated, make
from gateway.api import error_responses


@pytest.mark.parametrize("name", [name for name in BY_NAME if name != "TridentError"])
def test_every_error_has_a_status_in_both_protocols(name: str):
    error = make(BY_NAME[name], "field: problem")
    status, headers, body = error_responses.http(error)
    table = json.loads(body)["error"]
    assert status == error.http_status and set(table) == {"message", "type", "param", "code"}
    assert (b"retry-after" in dict(headers)) is error.retryable
    code, details, trailers = error_responses.grpc_status(error)
    assert type(from_rpc(code, details)).http_status == error.http_status
    assert (retry_hint(trailers).after_s is not None) is error.retryable


def test_a_field_is_named_and_a_wait_is_told_in_whole_seconds_upward():
    assert json.loads(error_responses.http(InvalidArgument("top_p", "is wrong"))[2])["error"]["param"] == "top_p"
    headers = dict(error_responses.http(Overloaded("full", 1.2))[1])
    assert headers[b"retry-after"] == b"2" and headers[b"retry-after-ms"] == b"1200"
    assert dict(error_responses.http(Unauthenticated("who"))[1])[b"www-authenticate"] == b"Bearer"


def test_what_admission_says_of_its_limits_goes_along():
    error = Overloaded("full", 1.0)
    error.headers = {"x-ratelimit-remaining-tokens": "0"}
    assert dict(error_responses.http(error)[1])[b"x-ratelimit-remaining-tokens"] == b"0"
    assert ("x-ratelimit-remaining-tokens", "0") in error_responses.grpc_status(error)[2]
