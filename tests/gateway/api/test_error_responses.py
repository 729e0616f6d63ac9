"""One error in each protocol's words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from starlette.requests import Request
from starlette.responses import Response

from clients.wire.failures import from_rpc, retry_hint
from contract.errors import BY_NAME, InvalidArgument, NotFound, Overloaded, Unauthenticated, make
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


@pytest.mark.parametrize("after_s", [0.0, 0.25, 2.0, 59.9999999999])
def test_a_grpc_status_carries_a_retry_info_that_googles_own_types_read(after_s: float):
    trailers = dict(error_responses.grpc_status(Overloaded("full: \u00e9", after_s))[2])
    status = Status.FromString(trailers["grpc-status-details-bin"])
    info = RetryInfo()
    assert status.details[0].Unpack(info) and (status.code, status.message) == (8, "full: \u00e9")
    assert info.retry_delay.seconds + info.retry_delay.nanos / 1e9 == pytest.approx(after_s)


def test_the_budgets_headers_go_along():
    error = Overloaded("full", 1.0)
    error.headers = {"x-ratelimit-remaining-tokens": "0"}
    assert dict(error_responses.http(error)[1])[b"x-ratelimit-remaining-tokens"] == b"0"
    assert ("x-ratelimit-remaining-tokens", "0") in error_responses.grpc_status(error)[2]


async def test_an_endpoint_sends_json_or_its_response_or_the_error():
    async def handle(request: Request) -> Any:
        if request.url.path == "/json":
            return {"a": 1}
        if request.url.path == "/text":
            return Response("text", 201)
        raise NotFound("no such key")

    async def sent(path: str) -> tuple[int, bytes]:
        response = await error_responses.answering(handle)(Request({"type": "http", "path": path, "headers": []}))
        return response.status_code, response.body

    assert await sent("/json") == (200, b'{"a":1}') and await sent("/text") == (201, b"text")
    status, body = await sent("/other")
    assert status == 404 and json.loads(body)["error"]["message"] == "no such key"
