"""The messages of ext_proc, as bytes that Envoy reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.picker import ext_proc_pb2 as pb
from gateway.api.picker import messages


@given(st.binary(max_size=200), st.integers(1, 70), st.booleans())
def test_a_body_goes_on_in_parts_of_which_the_last_one_ends_it(data, most, end):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "_MOST_CHUNK", most)
        parts = messages.body("request_body", data, end)
    streamed = [part.request_body.response.body_mutation.streamed_response for part in parts]
    assert b"".join(part.body for part in streamed) == data and all(len(part.body) <= most for part in streamed)
    assert [part.end_of_stream for part in streamed] == [False] * (len(parts) - 1) + [end]


def test_headers_are_read_from_both_fields_and_joined():
    given_headers = [{"key": "a", "raw_value": b"1"}, {"key": "a", "value": "2"}, {"key": "b", "raw_value": b"\xe9"}]
    assert messages.headers_of(pb.HeaderMap(headers=given_headers)) == {"a": "1, 2", "b": "é"}


@pytest.mark.parametrize(
    ("value", "read"),
    [(["1:1", " 2:2 "], ["1:1", "2:2"]), ("1:1, 2:2,", ["1:1", "2:2"]), ([], []), ("", []), (3.0, [])],
)
def test_metadata_is_a_list_or_a_text(value, read):
    message = pb.ProcessingRequest()
    message.metadata_context.filter_metadata["n"].update({"k": value})
    assert messages.metadata(message, "n", "k") == read
    assert messages.metadata(message, "n", "other") is None and messages.metadata(message, "m", "k") is None


def test_a_pick_is_a_header_and_the_same_metadata():
    made = messages.picked(["1:1", "2:2"], {"content-length": "5"})
    headers = made.request_headers.response.header_mutation.set_headers
    assert {each.header.key: each.header.raw_value for each in headers} == {
        "content-length": b"5",
        "x-gateway-destination-endpoint": b"1:1,2:2",
    }
    assert made.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == "1:1,2:2"
    assert all(each.append_action == pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD for each in headers)


def test_only_grpc_requests_are_answered_with_a_grpc_status():
    assert not messages.immediate(503, {}, b"", None).immediate_response.HasField("grpc_status")
    assert messages.immediate(200, {}, b"", 14).immediate_response.grpc_status.status == 14
    added = messages.response_headers({"a": "b"}).response_headers.response.header_mutation.set_headers
    assert [each.header.key for each in added] == ["a"]
