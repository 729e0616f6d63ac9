"""The tokens of a response, however it is cut into parts, and where a replica serves each form of requests. The rest of
a pick is tested through its endpoint."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import Overloaded
from contract.generation import GenerationRequest, Usage
from gateway.api.kserve import _in_band
from gateway.api.picker.pick import ResponseUsage, endpoint
from gateway.config.settings import Settings

SETTINGS = Settings(picker_endpoints={"10.0.0.3:8001": "10.0.0.3:7000"})
REQUEST = GenerationRequest(text_input="x", max_tokens=4)
TOLD = {"prompt_tokens": 12, "completion_tokens": 34, "total_tokens": 46}
QUOTED = '{"completion_tokens": 9}'
BODIES = {
    "whole": ("application/json", json.dumps({"choices": [{"text": QUOTED}], "usage": TOLD}).encode()),
    "first": ("application/json", json.dumps({"usage": TOLD, "choices": [{"text": QUOTED}]}).encode()),
    "events": (
        "text/event-stream",
        b"".join(f"data: {json.dumps(e)}\n\n".encode() for e in ({"choices": [{"text": QUOTED}]}, {"usage": TOLD})),
    ),
    "triton": (
        "text/event-stream",
        "".join(
            f"data: {json.dumps({'num_input_tokens': prompt, 'num_output_tokens': tokens, 'text_output': QUOTED})}\n\n"
            for prompt, tokens in ((0, 0), (0, 0), (12, 34))
        ).encode(),
    ),
    "responses": (
        "text/event-stream",
        f"data: {json.dumps({'response': {'usage': {'input_tokens': 12, 'output_tokens': 34}}})}\n\n".encode(),
    ),
}


@pytest.mark.parametrize("name", BODIES)
@given(cuts=st.lists(st.integers(0, 400), max_size=8))
def test_usage_is_found_however_the_body_is_cut(name, cuts):
    content_type, body = BODIES[name]
    usage, at = ResponseUsage(REQUEST, content_type), 0
    for cut in [*sorted(cut for cut in cuts if cut < len(body)), len(body)]:
        usage.feed(body[at:cut])
        at = cut
    assert usage.usage == Usage(12, 34)


def test_without_usage_events_are_counted():
    usage = ResponseUsage(REQUEST, "text/event-stream; charset=utf-8")
    usage.feed(b'data: {"a": 1}\n\n' * 5 + b": keep-alive\n\n" + b"data: [DONE]\n\n")
    assert usage.usage is None and usage.tokens == 5


@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_events_are_counted_however_the_body_is_cut_and_whatever_their_text(cuts):
    body = b'data: {"text": "data: {}"}\n\n: keep-alive\n\nid: 1\ndata:{"text": "data:"}\n\ndata: [DONE]\n\n'
    usage, at = ResponseUsage(REQUEST, "text/event-stream"), 0
    for cut in [*sorted(cut for cut in cuts if cut < len(body)), len(body)]:
        usage.feed(body[at:cut])
        at = cut
    assert usage.tokens == 2


def test_a_body_of_another_kind_tells_nothing():
    usage = ResponseUsage(REQUEST, "text/plain")
    usage.feed(b"data: x")
    assert (usage.usage, usage.tokens, usage.error) == (None, 0, None)


def test_an_error_in_a_grpc_message_is_told():
    usage, message = ResponseUsage(REQUEST, "application/grpc"), _in_band(Overloaded("full"), "r")
    data = struct.pack(">BI", 0, len(message)) + message
    usage.feed(data[:7])
    assert usage.error is None
    usage.feed(data[7:] + struct.pack(">BI", 1, 1) + b"x")
    assert isinstance(usage.error, Overloaded) and usage.usage is None


@pytest.mark.parametrize(
    ("replica", "form", "where"),
    [
        ("10.0.0.1:8001", "grpc", "10.0.0.1:8001"),
        ("10.0.0.1:8001", "triton", "10.0.0.1:8000"),
        ("10.0.0.1:8001", "openai", "10.0.0.1:9000"),
        ("[fd00::1]:8001", "triton", "[fd00::1]:8000"),
        ("10.0.0.3:8001", "openai", "10.0.0.3:7000"),
        ("10.0.0.3:8001", "grpc", "10.0.0.3:8001"),
        ("replica-0.svc:8001", "grpc", ""),
    ],
)
def test_an_endpoint_is_an_address_and_a_port(replica, form, where):
    assert endpoint(SETTINGS, replica, form) == where
