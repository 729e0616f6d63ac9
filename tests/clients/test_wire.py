"""The hand-written bytes against tritonclient's protobufs, both ways."""

from __future__ import annotations

import json
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from clients import wire
from contract import tensors
from contract.generation import FinishReason, GenerationRequest, SamplingParams, Timings, TokenDelta, Usage
from tests.fakes.replica import Script, content, final_only, refusal

INT32 = st.integers(-(2**31), 2**31 - 1)
OUTPUTS = {tensor.name: tensor for tensor in tensors.ENSEMBLE_OUTPUTS}


def tensor_bytes(datatype: str, values: list) -> bytes:
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(value.encode())) + value.encode() for value in values)
    return struct.pack(f"<{len(values)}{wire.STRUCT_CODES[datatype]}", *values)


def response(values: dict[str, list], final: bool = False, request_id: str = "r") -> bytes:
    """A streamed response with the official protobufs, outputs in the dictionary's order."""
    answer = service_pb2.ModelStreamInferResponse()
    inner = answer.infer_response
    inner.model_name, inner.model_version, inner.id = "ensemble", "1", request_id
    inner.parameters["triton_final_response"].bool_param = final
    inner.parameters["sequence_id"].int64_param = 7
    for name, elements in values.items():
        datatype = OUTPUTS[name].datatype if name in OUTPUTS else "FP32"
        inner.outputs.add(name=name, datatype=datatype, shape=[1, len(elements)])
        inner.raw_output_contents.append(tensor_bytes(datatype, elements))
    return answer.SerializeToString()


def parsed(payload: bytes) -> tuple[service_pb2.ModelInferRequest, dict[str, list]]:
    request = service_pb2.ModelInferRequest.FromString(payload)
    values = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        assert list(tensor.shape)[0] == 1
        if tensor.datatype == "BYTES":
            elements, at = [], 0
            while at < len(raw):
                (size,) = struct.unpack_from("<I", raw, at)
                elements.append(raw[at + 4 : at + 4 + size].decode())
                at += 4 + size
        else:
            elements = [one for (one,) in struct.iter_unpack("<" + wire.STRUCT_CODES[tensor.datatype], raw)]
        assert list(tensor.shape)[1] == len(elements)
        values[tensor.name] = elements
    return request, values


@given(st.integers(0, 2**64 - 1))
def test_an_integer_of_the_wire_comes_back_as_it_was(value: int) -> None:
    encoded = wire.varint(value)
    assert wire.read_varint(encoded, 0) == (value, len(encoded))


@given(
    prompt=st.text(min_size=1),
    max_tokens=st.integers(1, 2**31 - 1),
    stop=st.lists(st.text(min_size=1), max_size=3),
    ids=st.lists(INT32, max_size=3),
    seed=st.none() | st.integers(0, 2**64 - 1),
    temperature=st.floats(0, 100, width=32),
    timeout_s=st.none() | st.floats(1e-6, 86_400),
)
def test_the_protobufs_read_a_request_as_it_was_meant(
    prompt, max_tokens, stop, ids, seed, temperature, timeout_s
) -> None:
    asked = GenerationRequest(
        prompt,
        max_tokens=max_tokens,
        stop=tuple(stop),
        stop_token_ids=tuple(ids),
        sampling=SamplingParams(temperature=temperature, seed=seed),
        request_id="an-id",
    )
    request, values = parsed(wire.generation(asked, "ensemble", timeout_s))
    assert (request.model_name, request.id) == ("ensemble", "an-id")
    assert request.parameters["triton_enable_empty_final_response"].bool_param is True
    assert values["text_input"] == [prompt]
    assert values["max_tokens"] == [max_tokens]
    assert values.get("stop_words", []) == stop
    assert values.get("stop_token_ids", []) == ids
    assert values.get("seed", [None]) == [seed]
    assert values.get("temperature", [1.0]) == [temperature]
    if timeout_s is None:
        assert "timeout" not in request.parameters
    else:
        assert request.parameters["timeout"].int64_param == max(1, int(timeout_s * 1e6))


def test_every_field_of_a_request_travels_under_the_ensembles_name_and_type() -> None:
    sampling = SamplingParams(0.5, 5, 0.9, 0.1, 1.5, 0.25, -0.25, 2**64 - 1, 3, True, True, 4)
    asked = GenerationRequest(
        messages=({"role": "user", "content": "grüß Gott"},),
        sampling=sampling,
        stream=False,
        echo=True,
        skip_special_tokens=False,
        json_schema='{"type": "object"}',
    )
    request, values = parsed(wire.generation(asked, "ensemble", timings=True))
    declared = {tensor.name: tensor.datatype for tensor in tensors.ENSEMBLE_INPUTS}
    assert all(declared[tensor.name] == tensor.datatype for tensor in request.inputs)
    assert json.loads(values.pop("messages")[0]) == [{"role": "user", "content": "grüß Gott"}]
    assert values.pop("top_p") == [pytest.approx(0.9)] and values.pop("min_p") == [pytest.approx(0.1)]
    assert values == {
        "max_tokens": [128],
        "stream": [False],
        "exclude_input_in_output": [False],
        "skip_special_tokens": [False],
        "guided_decoding_guide_type": ["json_schema"],
        "guided_decoding_guide": ['{"type": "object"}'],
        "temperature": [0.5],
        "top_k": [5],
        "repetition_penalty": [1.5],
        "presence_penalty": [0.25],
        "frequency_penalty": [-0.25],
        "seed": [2**64 - 1],
        "min_tokens": [3],
        "ignore_eos": [True],
        "return_log_probs": [True],
        "num_top_log_probs": [4],
        "return_num_input_tokens": [True],
        "return_num_output_tokens": [True],
        "return_perf_metrics": [True],
    }


def test_a_stop_request_is_the_one_that_tensorrt_llm_knows() -> None:
    request, values = parsed(wire.stop("abc"))
    assert (request.model_name, request.id) == ("engine", "abc")
    assert values == {"input_ids": [0], "input_lengths": [0], "request_output_len": [0], "stop": [True]}
    assert [list(tensor.shape) for tensor in request.inputs] == [[1, 1]] * 4


@given(
    texts=st.lists(st.text(), min_size=1, max_size=8),
    ids=st.lists(st.lists(INT32, max_size=9), min_size=8, max_size=8),
    seed=st.integers(0, 99),
    sparse=st.booleans(),
)
def test_responses_are_read_by_name_whatever_their_order_and_length(texts, ids, seed, sparse) -> None:
    decoder, order = wire.ResponseDecoder(), random.Random(seed)
    for n, text in enumerate(texts):
        values = {"text_output": [text], "output_ids": ids[n], "unknown_tensor": [1.0, 2.0]}
        if not sparse:
            values |= {"finish_reason": [""], "num_input_tokens": [3], "num_output_tokens": [n], "error_message": [""]}
            values |= {"output_log_probs": [-0.5] * len(ids[n])}
        names = list(values)
        if order.random() < 0.3:
            order.shuffle(names)
        delta, final, error = decoder.decode(response({name: values[name] for name in names}))
        log_probs = () if sparse else (-0.5,) * len(ids[n])
        assert (delta, final, error) == (TokenDelta(text, tuple(ids[n]), log_probs), False, "")


def test_the_last_response_carries_usage_timings_and_both_reasons() -> None:
    last = {
        "text_output": ["bye"],
        "output_ids": [9],
        "finish_reason": ["stop"],
        "stop_reason": ["\n\n"],
        "num_input_tokens": [5],
        "num_output_tokens": [7],
        "num_cached_tokens": [4],
        "arrival_time_ns": [1],
        "first_scheduled_time_ns": [2],
        "first_token_time_ns": [2**40],
        "last_token_time_ns": [2**41],
    }
    decoder = wire.ResponseDecoder()
    expected = TokenDelta("bye", (9,), (), FinishReason.STOP, "\n\n", Usage(5, 7, 4), Timings(1, 2, 2**40, 2**41), "")
    for _ in range(2):  # the second time from the remembered header
        assert decoder.decode(response(last, final=True)) == (expected, True, "")


def test_the_likeliest_ids_come_as_pairs_for_each_new_id() -> None:
    values = {
        "text_output": ["ab"],
        "top_log_probs": [-0.5, -1.0, -0.25, -2.0],
        "output_ids": [7, 9],
        "top_log_probs_ids": [7, 8, 9, 7],
    }
    decoder = wire.ResponseDecoder()
    pairs = (((7, -0.5), (8, -1.0)), ((9, -0.25), (7, -2.0)))
    for _ in range(2):
        assert decoder.decode(response(values))[0] == TokenDelta("ab", (7, 9), top_log_probs=pairs)
    ended, _, _ = decoder.decode(response(values | {"finish_reason": ["stop"]}, final=True))
    assert ended == TokenDelta("ab", (7, 9), (), FinishReason.STOP, top_log_probs=pairs)
    with pytest.raises(wire.WireError, match="top_log_probs: 4 ids and 4 values do not fit 3 new tokens"):
        decoder.decode(response(values | {"output_ids": [1, 2, 3]}))


def test_one_stream_may_mix_full_sparse_and_coalesced_responses() -> None:
    decoder = wire.ResponseDecoder()
    script, order = Script(("a",) * 5), list(range(len(tensors.ENSEMBLE_OUTPUTS)))
    sparse = Script(("a",) * 5, sparse=True)
    for _ in range(3):
        for text, one in (("a", script), ("a", sparse)):
            got, final, _ = decoder.decode(content("id", "ensemble", 0, (text,), None, one, order, 3, False))
            assert (got.text, got.token_ids, final) == ("a", (0,), False)
        got, _, _ = decoder.decode(content("id", "ensemble", 3, ("b", "c"), None, sparse, order, 3, False))
        assert (got.text, got.token_ids) == ("bc", (3, 4))


def test_the_empty_final_response_and_a_refusal_carry_no_delta() -> None:
    decoder = wire.ResponseDecoder()
    assert decoder.decode(final_only("id", "ensemble")) == (None, True, "")
    assert decoder.decode(refusal("no such thing", "id")) == (None, True, "no such thing")


def test_contents_inside_the_tensor_are_read_as_well() -> None:
    answer = service_pb2.ModelStreamInferResponse()
    text = answer.infer_response.outputs.add(name="text_output", datatype="BYTES", shape=[1, 1])
    text.contents.bytes_contents.append("héllo".encode())
    ids = answer.infer_response.outputs.add(name="output_ids", datatype="INT32", shape=[1, 2])
    ids.contents.int_contents.extend([5, -6])
    probs = answer.infer_response.outputs.add(name="output_log_probs", datatype="FP32", shape=[1, 1, 2])
    probs.contents.fp32_contents.extend([-0.5, -0.25])
    delta, _, _ = wire.ResponseDecoder().decode(answer.SerializeToString())
    assert delta == TokenDelta("héllo", (5, -6), (-0.5, -0.25))


@given(st.binary(max_size=200))
def test_garbage_is_refused_as_such_and_nothing_else(data: bytes) -> None:
    try:
        wire.ResponseDecoder().decode(data)
    except wire.WireError:
        pass


@given(st.data())
def test_a_damaged_response_never_passes_for_another_kind_of_failure(data) -> None:
    good = response({"text_output": ["hello"], "output_ids": [1, 2], "finish_reason": [""]})
    decoder = wire.ResponseDecoder()
    decoder.decode(good)
    cut = data.draw(st.integers(0, len(good)))
    flipped = bytearray(good[:cut])
    for at in data.draw(st.lists(st.integers(0, max(0, cut - 1)), max_size=3)):
        if cut:
            flipped[at] ^= data.draw(st.integers(1, 255))
    try:
        decoder.decode(bytes(flipped))
    except wire.WireError:
        pass


def test_an_unknown_finish_reason_is_named_with_those_that_are_allowed() -> None:
    with pytest.raises(wire.WireError, match="finish_reason: got 'bored'; allowed is stop, length, cancelled, error"):
        wire.ResponseDecoder().decode(response({"text_output": [""], "finish_reason": ["bored"]}))


def test_an_output_of_another_type_is_named() -> None:
    answer = service_pb2.ModelStreamInferResponse()
    answer.infer_response.outputs.add(name="text_output", datatype="INT32", shape=[1, 1])
    answer.infer_response.raw_output_contents.append(b"\1\0\0\0")
    with pytest.raises(wire.WireError, match="text_output: the server sends it as INT32"):
        wire.ResponseDecoder().decode(answer.SerializeToString())
