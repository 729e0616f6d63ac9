"""Requests by hand, as tritonclient's protobufs read them."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from clients.wire import infer_request
from contract import tensors
from contract.errors import InvalidArgument
from contract.generation import GenerationRequest, Guide, SamplingParams

INT32 = st.integers(-(2**31), 2**31 - 1)


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
            elements = [one for (one,) in struct.iter_unpack("<" + infer_request.STRUCT_CODES[tensor.datatype], raw)]
        assert list(tensor.shape)[1] == len(elements)
        values[tensor.name] = elements
    return request, values


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
    request, values = parsed(infer_request.generation(asked, "ensemble", timeout_s))
    assert (request.model_name, request.id) == ("ensemble", "an-id")
    assert request.parameters["triton_enable_empty_final_response"].bool_param is True
    assert values["text_input"] == [prompt]
    assert values["max_tokens"] == [max_tokens]
    assert values.get("stop_words", []) == stop
    assert values.get("stop_token_ids", []) == ids
    assert values.get("seed", [None]) == [seed]
    assert values["temperature"] == [temperature]  # 1 too: an ensemble that is told nothing is greedy
    if timeout_s is None:
        assert "timeout" not in request.parameters
    else:
        assert request.parameters["timeout"].int64_param == max(1, int(timeout_s * 1e6))


def test_every_field_of_a_request_travels_under_the_ensembles_name_and_type() -> None:
    sampling = SamplingParams(0.5, 5, 0.9, 0.1, 1.5, 0.25, -0.25, 2**64 - 1, 3, True, True, 4, True)
    asked = GenerationRequest(
        messages=({"role": "user", "content": "grüß Gott"},),
        tools="[1]",
        chat_template_kwargs="{}",
        adapter="poet",
        sampling=sampling,
        stream=False,
        echo=True,
        skip_special_tokens=False,
        guide=Guide("json_schema", '{"type": "object"}'),
    )
    request, values = parsed(infer_request.generation(asked, "ensemble", timings=True))
    declared = {tensor.name: tensor.datatype for tensor in tensors.ENSEMBLE_INPUTS}
    assert all(declared[tensor.name] == tensor.datatype for tensor in request.inputs)
    assert json.loads(values.pop("messages")[0]) == [{"role": "user", "content": "grüß Gott"}]
    assert values.pop("top_p") == [pytest.approx(0.9)] and values.pop("min_p") == [pytest.approx(0.1)]
    assert values == {
        "max_tokens": [128],
        "tools": ["[1]"],
        "chat_template_kwargs": ["{}"],
        "lora_name": ["poet"],
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
        "return_prompt_log_probs": [True],
        "return_num_input_tokens": [True],
        "return_num_output_tokens": [True],
        "return_perf_metrics": [True],
    }


def test_ids_travel_in_place_of_a_text() -> None:
    asked = GenerationRequest(
        input_ids=(0, 2**31 - 1), truncate_prompt_tokens=-1, continue_ids=(7, 8), bad_words=("x",)
    )
    request, values = parsed(infer_request.generation(asked, "ensemble"))
    assert (values["input_ids"], values["truncate_prompt_tokens"]) == ([0, 2**31 - 1], [-1])
    assert (values["continue_ids"], values["bad_words"]) == ([7, 8], ["x"])
    assert [list(tensor.shape) for tensor in request.inputs if tensor.name == "input_ids"] == [[1, 2]]
    assert not {"text_input", "messages"} & values.keys()


def test_text_that_utf8_cannot_hold_is_refused_by_the_tensors_name() -> None:
    with pytest.raises(InvalidArgument, match="stop_words: must be .* UTF-8, got a lone surrogate at index 1"):
        infer_request.generation(GenerationRequest("x", stop=("a", "b\ud800")), "ensemble")


def test_a_stop_request_is_the_one_that_tensorrt_llm_knows() -> None:
    request, values = parsed(infer_request.stop("abc"))
    assert (request.model_name, request.id) == ("engine", "abc")
    assert values == {"input_ids": [0], "input_lengths": [0], "request_output_len": [0], "stop": [True]}
    assert [list(tensor.shape) for tensor in request.inputs] == [[1, 1]] * 4


@given(st.floats(-100, 100) | st.sampled_from([1e-46, -1e-50, 0.9999999999, 1.0000000001, 1e-45, 0.0, 1.0]))
def test_a_number_becomes_no_other_kind_of_number_as_fp32(value: float) -> None:
    """0 and 1 mean something else than what is close to them."""
    sent = infer_request._fp32(value)
    assert struct.unpack("<f", struct.pack("<f", sent))[0] == sent
    assert sent.is_integer() == value.is_integer() and (sent > 0, sent < 0) == (value > 0, value < 0)
    assert abs(sent - value) <= max(2**-23 * abs(value), 2**-149)
