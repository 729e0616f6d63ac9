"""What is said in an order that Envoy does not keep to, and the messages as bytes that Envoy reads. The usual order is
tested through the endpoint."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.picker import endpoint
from gateway.api.picker import ext_proc_pb2 as pb
from gateway.api.picker.endpoint import Exchange
from tests.gateway.api.picker.endpoints import pool
from tests.gateway.api.picker.test_endpoint import header_map, headers


@pytest.mark.slow
async def test_a_response_before_the_request_is_refused_and_nothing_is_held():
    async with pool(1) as running:
        made = Exchange(running.running.service, lambda error: None)
        begin = pb.ProcessingRequest(request_headers={"headers": header_map(headers())})
        assert await made.answers(begin) == []
        [answer] = await made.answers(pb.ProcessingRequest(response_body={"body": b"x"}))
        assert answer.immediate_response.status.code == 400 and made.done
        assert b"must go on with request_body, got response_body" in answer.immediate_response.body
        made.close()
        assert not running.running.service.live


@pytest.mark.slow
async def test_a_request_that_ends_with_trailers_is_picked_for():
    async with pool(1) as running:
        made = Exchange(running.running.service, lambda error: None)
        await made.answers(pb.ProcessingRequest(request_headers={"headers": header_map(headers())}))
        body = b'{"model": "demo", "messages": [{"role": "user", "content": "x"}]}'
        assert await made.answers(pb.ProcessingRequest(request_body={"body": body})) == []
        answers = await made.answers(pb.ProcessingRequest(request_trailers={}))
        assert [each.WhichOneof("response") for each in answers] == [
            "request_headers",
            "request_body",
            "request_trailers",
        ]
        assert not answers[1].request_body.response.body_mutation.streamed_response.end_of_stream
        made.close()
        assert not running.running.service.live and not running.running.service.bodies.held


@pytest.mark.slow
async def test_a_permit_is_settled_where_its_body_cannot_be_shortened():
    config = '[classes.short]\npriority = 5\nmax_tokens = 2\noperations = ["responses"]\n'
    async with pool(1, config=config) as running:
        service = running.running.service
        made = Exchange(service, lambda error: None)
        given = header_map(headers("/v1/response%73"))
        await made.answers(pb.ProcessingRequest(request_headers={"headers": given}))
        body = b'{"model": "demo", "input": "x", "vendor_field": %b%b}' % (b"[" * 300, b"]" * 300)
        message = pb.ProcessingRequest(request_body={"body": body, "end_of_stream": True})
        [answer] = await made.answers(message)
        assert answer.immediate_response.status.code == 400
        assert b"body: must have fewer levels" in answer.immediate_response.body
        made.close()
        assert not service.admission.running and not service.live


@given(st.binary(max_size=200), st.integers(1, 70), st.booleans())
def test_a_body_goes_on_in_parts_of_which_the_last_one_ends_it(data, most, end):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endpoint, "_MOST_CHUNK", most)
        parts = endpoint.streamed("request_body", data, end)
    streamed = [part.request_body.response.body_mutation.streamed_response for part in parts]
    assert b"".join(part.body for part in streamed) == data and all(len(part.body) <= most for part in streamed)
    assert [part.end_of_stream for part in streamed] == [False] * (len(parts) - 1) + [end]


def test_headers_are_read_from_both_fields_and_joined():
    given_headers = [{"key": "a", "raw_value": b"1"}, {"key": "a", "value": "2"}, {"key": "b", "raw_value": b"\xe9"}]
    assert endpoint.headers_of(pb.HeaderMap(headers=given_headers)) == {"a": "1, 2", "b": "é"}


@pytest.mark.parametrize(
    ("value", "read"),
    [(["1:1", " 2:2 "], ["1:1", "2:2"]), ("1:1, 2:2,", ["1:1", "2:2"]), ([], []), ("", []), (3.0, [])],
)
def test_metadata_is_a_list_or_a_text(value, read):
    message = pb.ProcessingRequest()
    message.metadata_context.filter_metadata["n"].update({"k": value})
    assert endpoint.metadata(message, "n", "k") == read
    assert endpoint.metadata(message, "n", "other") is None and endpoint.metadata(message, "m", "k") is None


def test_a_pick_is_a_header_and_the_same_metadata():
    made = endpoint.picked(["1:1", "2:2"], {"content-length": "5"})
    headers = made.request_headers.response.header_mutation.set_headers
    assert {each.header.key: each.header.raw_value for each in headers} == {
        "content-length": b"5",
        "x-gateway-destination-endpoint": b"1:1,2:2",
    }
    assert made.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == "1:1,2:2"
    assert all(each.append_action == pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD for each in headers)


def test_only_grpc_requests_are_answered_with_a_grpc_status():
    assert not endpoint.immediate(503, {}, b"", None).immediate_response.HasField("grpc_status")
    assert endpoint.immediate(200, {}, b"", 14).immediate_response.grpc_status.status == 14
