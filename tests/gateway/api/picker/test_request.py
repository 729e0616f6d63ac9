"""What admission needs of a forwarded request, in each of its forms."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from contract.errors import InvalidArgument
from gateway.api import kserve
from gateway.api.picker import request
from gateway.config.settings import Settings

SETTINGS = Settings(max_choices=4)
CHAT, COMPLETION = {":path": "/v1/chat/completions"}, {":path": "/v1/completions"}
GENERATE = {":path": "/v2/models/ensemble/generate_stream"}
GRPC = {":path": "/inference.GRPCInferenceService/ModelStreamInfer", "content-type": "application/grpc"}
HI = [{"role": "user", "content": "hi"}]


def read(headers: dict[str, str], body: object) -> request.PickRequest:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = request.read(headers, data, SETTINGS, 5.0)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("headers", "form", "is_read"),
    [
        (CHAT, "openai", True),
        ({":path": "/v1/responses?x=1"}, "openai", True),
        ({":path": "/v1/models"}, "openai", False),
        ({":path": "/v1/embeddings"}, "openai", False),
        (GENERATE, "triton", True),
        ({":path": "/v2/models/m/versions/1/generate"}, "triton", True),
        ({":path": "/v2/health/ready"}, "triton", False),
        (GRPC, "grpc", True),
        ({**GRPC, ":path": "/inference.GRPCInferenceService/ServerReady"}, "grpc", False),
        ({":path": "/v1/chat/completion%73?x=%2F"}, "openai", True),
        ({":path": "/%76%31/responses"}, "openai", True),
        ({":path": "//v1/models/..//./completions/"}, "openai", True),
        ({":path": "/%762/models/a%2Fb/generate"}, "triton", True),
        ({":path": "/v1/chat/completion%2573"}, "openai", False),
        ({}, "openai", False),
    ],
)
def test_forms_and_what_is_read_of_them(headers, form, is_read):
    assert request.form_of(headers) == form and bool(request.generation(headers)) == is_read


@pytest.mark.parametrize(
    ("path", "operation"),
    [
        ("/v1/chat/completions", "chat"),
        ("/v1/ch%61t/completions", "chat"),
        ("/v1/responses?x=1", "responses"),
        ("/v1/responses/resp_1", "responses"),
        ("/v1/embeddings", "embeddings"),
        ("/v1/rerank", "rerank"),
        ("/v1/score", "score"),
        ("/v1/completions", "text_completion"),
        ("/v1/chats", "text_completion"),
    ],
)
def test_an_operation_is_told_by_the_path(path, operation):
    assert request.operation_of({":path": path}) == operation


def nested(levels: int) -> dict[str, object]:
    value: dict[str, object] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def test_a_body_of_more_levels_than_can_be_written_is_refused_where_it_must_be():
    deep = read(CHAT, {"model": "m", "messages": HI, "vendor_field": nested(254)})
    with pytest.raises(InvalidArgument, match="body: must have fewer levels"):
        deep.shortened(4)
    assert read(CHAT, {"model": "m", "messages": HI, "vendor_field": nested(253)}).shortened(4)
    with pytest.raises(InvalidArgument, match="tools: must have fewer levels"):
        read(CHAT, {"model": "m", "messages": HI, "tools": [nested(254)]})


def test_openais_bodies_are_read():
    [chat] = read(CHAT, {"model": "m", "messages": HI, "max_completion_tokens": 9, "tools": [{"a": 1}]}).requests
    assert chat.messages == tuple(HI) and chat.max_tokens == 9 and chat.tools == '[{"a":1}]' and chat.timeout_s == 5.0
    assert read(CHAT, {"model": "m", "messages": HI}).requests[0].max_tokens == SETTINGS.default_max_tokens
    many = read(COMPLETION, {"model": "m", "prompt": ["a", "b"], "n": 2})
    assert [each.text_input for each in many.requests] == ["a", "b", "a", "b"] and many.requests[0].max_tokens == 16
    assert many.requests[0].text_input is many.requests[2].text_input  # one prompt: counted once
    assert read(COMPLETION, {"model": "m", "prompt": [1, 2]}).requests[0].input_ids == (1, 2)
    assert read({":path": "/v1/responses"}, {"model": "m", "input": "x"}).requests[0].text_input == "x"


def test_tritons_json_is_read():
    found = read(GENERATE, {"text_input": "x", "max_tokens": 7})
    assert found.model == "ensemble" and found.requests[0].text_input == "x" and found.requests[0].max_tokens == 7
    assert read({":path": "/v2/models/a%2Fb%20c/versions/1/generate"}, {"text_input": "x"}).model == "a/b c"
    chat = read(GENERATE, {"messages": json.dumps(HI)})
    assert chat.requests[0].messages == tuple(HI) and chat.requests[0].max_tokens == kserve.DEFAULT_MAX_TOKENS


RESPONSES = {":path": "/v1/responses"}
STORED: dict[str, object] = {"model": "m", "prompt": {"id": "support"}}


@pytest.mark.parametrize(
    ("headers", "body", "text", "limit"),
    [
        (CHAT, STORED, "", "max_tokens"),
        (CHAT, {**STORED, "messages": []}, "", "max_tokens"),
        (RESPONSES, {**STORED, "input": "hi"}, "hi", "max_output_tokens"),
        (RESPONSES, STORED, "", "max_output_tokens"),
        (RESPONSES, {"model": "m", "previous_response_id": "r"}, "", "max_output_tokens"),
        (RESPONSES, {"model": "m", "previous_response_id": "r", "input": []}, "", "max_output_tokens"),
    ],
)
def test_a_prompt_that_the_endpoint_has_counts_as_empty(headers, body, text, limit):
    found = read(headers, body)
    assert [each.text_input for each in found.requests] == [text]
    assert found.requests[0].max_tokens == SETTINGS.default_max_tokens
    assert json.loads(found.shortened(4)) == {**body, limit: 4}


def test_the_adapter_of_a_triton_request_belongs_to_the_models_name():
    assert read(GENERATE, {"text_input": "x", "lora_name": "poet", "lora_task_id": 0}).model == "ensemble:poet"
    sent = message()
    sent.inputs.add(name="lora_name", datatype="BYTES", shape=[1, 1]).contents.bytes_contents.append(b"poet")
    assert read(GRPC, framed(sent.SerializeToString())).model == "ensemble:poet"
    with pytest.raises(InvalidArgument, match="lora_task_id: must be 0 or left out"):
        read(GENERATE, {"text_input": "x", "lora_task_id": 2})


def message(**parameters: int) -> service_pb2.ModelInferRequest:
    made = service_pb2.ModelInferRequest(model_name="ensemble")
    made.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1]).contents.bytes_contents.append(b"hi")
    made.inputs.add(name="max_tokens", datatype="INT32", shape=[1, 1]).contents.int_contents.append(30)
    return made


def framed(data: bytes, compressed: int = 0) -> bytes:
    return struct.pack(">BI", compressed, len(data)) + data


def test_grpc_is_read_from_its_first_message():
    body = framed(message().SerializeToString())
    for size in range(len(body)):
        assert request.read(GRPC, body[:size], SETTINGS, 5.0) is None
    found = read(GRPC, body + body[:4])
    assert (found.model, found.requests[0].text_input, found.requests[0].max_tokens) == ("ensemble", "hi", 30)
    changed = found.shortened(5)
    assert changed.endswith(body[:4]) and read(GRPC, changed).requests[0].max_tokens == 5


@pytest.mark.parametrize(
    ("headers", "body", "field"),
    [
        (CHAT, [], ""),
        (CHAT, {"messages": HI}, "model"),
        (CHAT, {"model": 3, "messages": HI}, "model"),
        (CHAT, {"model": "m"}, "prompt"),
        (CHAT, {"model": "m", "messages": ["x", {}]}, "messages"),
        (COMPLETION, {"model": "m", "prompt": ["x", 3]}, "prompt"),
        (COMPLETION, {"model": "m", "prompt": []}, "prompt"),
        (COMPLETION, {"model": "m", "prompt": "x", "n": 5}, "n"),
        (COMPLETION, {"model": "m", "prompt": "x", "n": 0}, "n"),
        (COMPLETION, {"model": "m", "prompt": "x", "max_tokens": -1}, "max_tokens"),
        (COMPLETION, {"model": "m", "prompt": "x", "max_tokens": True}, "max_tokens"),
        (GENERATE, {"max_tokens": 3}, "prompt"),
        (GRPC, framed(b"x", 1), "grpc-encoding"),
        (GRPC, framed(b"\xff\xff"), ""),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(headers, body, field):
    with pytest.raises(InvalidArgument) as caught:
        read(headers, body)
    assert caught.value.field == field


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens", None])
def test_a_shortened_body_differs_in_its_limit_alone(limit):
    body = {"model": "m", "messages": HI, "vendor_field": {"a": [1]}, **({limit: 50} if limit else {})}
    shortened = read(CHAT, body).shortened(4)
    assert json.loads(shortened) == {**body, limit or "max_tokens": 4}
    assert read(CHAT, shortened).requests[0].max_tokens == 4


FIELDS = st.dictionaries(
    st.sampled_from(["model", "prompt", "messages", "n", "max_tokens"]),
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.lists(st.integers() | st.text() | st.just({}), max_size=3),
)


@given(FIELDS)
def test_any_json_is_read_or_refused(body):
    try:
        found = request.read(CHAT, json.dumps(body).encode(), SETTINGS, 5.0)
    except InvalidArgument:
        return
    assert found is not None and all(each.max_tokens >= 1 for each in found.requests)
