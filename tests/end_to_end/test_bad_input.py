"""Everything a client can get wrong is refused by name with what is allowed, and disturbs no other request."""

from __future__ import annotations

import asyncio
import json
import math

import pytest
import tritonclient.grpc.aio as triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton_requests import ask, tensor

from tests.end_to_end.watching import PATIENCE_S

GOOD = {"text_input": "def f(x):\n", "max_tokens": 4}


@pytest.fixture
async def client(replica):
    async with triton.InferenceServerClient(replica.grpc_url) as connection:
        yield connection


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"text_input": ""}, "text_input: must have at least one character"),
        ({"max_tokens": 4}, "text_input: must be sent"),
        ({**GOOD, "text_input": "word " * 3000}, "text_input: must have at most"),
        ({**GOOD, "text_input": b"\xff\xfe"}, "text_input: must be UTF-8, got an invalid sequence at byte 0"),
        ({**GOOD, "text_input": "a\0b"}, "text_input: must hold no NUL character, got one at position 1"),
        ({**GOOD, "text_input": "x" * 1_000_000}, "text_input: must have at most"),
        ({**GOOD, "max_tokens": -1}, "max_tokens: must be 1 to 1024, or 0 with exclude_input_in_output=false, got -1"),
        ({**GOOD, "max_tokens": 0}, "max_tokens: must be 1 to 1024, or 0 with exclude_input_in_output=false, got 0"),
        ({**GOOD, "max_tokens": 2**31 - 1}, "max_tokens: must be 1 to 1024, got 2147483647"),
        ({**GOOD, "max_tokens": 1024}, "max_tokens: must be at most"),
        ({**GOOD, "temperature": math.nan}, "temperature: must be a finite number"),
        ({**GOOD, "temperature": math.inf}, "temperature: must be "),
        ({**GOOD, "temperature": -0.5}, "temperature: must be "),
        ({**GOOD, "top_p": 1.5}, "runtime_top_p (top_p): must be "),
        ({**GOOD, "top_p": -0.1}, "runtime_top_p (top_p): must be "),
        ({**GOOD, "top_k": -1}, "runtime_top_k (top_k): must be "),
        ({**GOOD, "min_p": 1.0}, "min_p: must be "),
        ({**GOOD, "repetition_penalty": 0.0}, "repetition_penalty: must be "),
        ({**GOOD, "presence_penalty": 3.0}, "presence_penalty: must be "),
        ({**GOOD, "frequency_penalty": math.nan}, "frequency_penalty: must be "),
        ({**GOOD, "min_tokens": -1}, "min_tokens: must be "),
        ({**GOOD, "min_tokens": 2, "min_length": 3}, "min_length: must equal min_tokens"),
        ({**GOOD, "seed": 1, "random_seed": 2}, "random_seed: must equal seed"),
        ({**GOOD, "stop_words": [f"stop {i}" for i in range(10_000)]}, "stop_words: must hold at most 100 strings"),
        ({**GOOD, "stop_words": "x" * 5000}, "stop_words: must hold strings of at most"),
        ({**GOOD, "stop_words": [b"\xff"]}, "stop_words: must be UTF-8"),
        ({**GOOD, "stop_token_ids": [99_999]}, "stop_token_ids: must hold ids from 0 to"),
        ({**GOOD, "end_id": 99_999}, "end_id: must be "),
        ({**GOOD, "num_top_log_probs": 21}, "num_top_log_probs: must be an integer from 0 to 20, got 21"),
        ({**GOOD, "beam_width": 4}, "beam_width: must be 1, got 4; beam search: not supported"),
        ({**GOOD, "num_return_sequences": 2}, "num_return_sequences: must be "),
        ({**GOOD, "length_penalty": 0.5}, "len_penalty (length_penalty): must be "),
        ({**GOOD, "bad_words": "x"}, "bad_words: must be left out"),
        (
            {**GOOD, "embedding_bias_words": "x", "embedding_bias_weights": 1.0},
            "embedding_bias_words: must be",
        ),
        ({**GOOD, "embedding_bias_words": "x"}, "embedding_bias_weights: must have a value per word"),
        ({**GOOD, "return_context_logits": True}, "return_context_logits: must be "),
        ({**GOOD, "return_generation_logits": True}, "return_generation_logits: must be "),
        ({**GOOD, "lora_task_id": 7}, "lora_task_id: must be "),
        ({**GOOD, "guided_decoding_guide_type": "yaml"}, "guided_decoding_guide_type: must be one of json"),
        ({**GOOD, "guided_decoding_guide_type": "json", "ignore_eos": True}, "ignore_eos: must be false with a guide"),
        ({**GOOD, "guided_decoding_guide_type": "json", "min_tokens": 2}, "min_tokens: must be 0 with a guide"),
        ({**GOOD, "messages": "[]"}, "messages: must be left out"),
        ({"messages": "not json"}, "messages: must be"),
        ({"messages": "[]"}, "messages: must be"),
        ({"messages": json.dumps([{"content": "x"}])}, 'messages: entry 0 must have a "role"'),
    ],
)
async def test_the_ensemble_refuses_it_by_name(client, inputs, message):
    answer = await ask(client, inputs)
    assert message in answer.error
    assert answer.ids == []


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"temperature": 0.5}, "temperature: must be sent as an input tensor"),
        ({"temprature": 0.5}, "temprature: must be an input or a known request parameter; did you mean"),
    ],
)
async def test_a_parameter_that_is_not_read_is_refused_by_name(client, parameters, message):
    assert message in (await ask(client, GOOD, parameters=parameters)).error


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([tensor("text_input", "a", shape=(1,))], "unexpected shape for input 'text_input'"),
        ([tensor("text_input", ["a", "b"], shape=(2, 1))], "batch-size must be <= 1"),
        ([tensor("text_input", "a"), tensor("max_tokens", 4.0, "FP32")], "'max_tokens' data-type is 'FP32'"),
        ([tensor("text_input", "a"), tensor("stop_words", ["a", "b"], shape=(2, 1))], "batch"),
    ],
)
async def test_wrong_shapes_and_types_are_refused_by_name(client, inputs, message):
    assert message in (await ask(client, inputs)).error


ENGINE = {"input_ids": [5, 6], "input_lengths": 2, "request_output_len": 3}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({**ENGINE, "input_ids": [5, 4096]}, "input_ids: must hold ids from 0 to 4095, got 4096"),
        ({**ENGINE, "input_ids": [5, -1]}, "input_ids: must hold ids from 0"),
        ({**ENGINE, "input_lengths": 3}, "input_lengths: must be 2, "),
        ({**ENGINE, "request_output_len": 0}, "request_output_len: must be "),
        ({**ENGINE, "request_output_len": 1023}, "request_output_len: must be at most 1022 with a prompt of 2 tokens"),
        ({"input_lengths": 0, "request_output_len": 3}, "input_ids: must hold at least one"),
        ({**ENGINE, "stop": True}, "request_id: must be the id"),
    ],
)
async def test_the_engine_model_refuses_it_by_name(client, inputs, message):
    assert message in (await ask(client, inputs, model="engine")).error


async def test_bad_requests_disturb_no_running_stream(client):
    good = {**GOOD, "max_tokens": 200, "ignore_eos": True, "stream": True}
    alone = await ask(client, good)
    bad = [{"text_input": b"\xff"}, {**GOOD, "max_tokens": 0}, {**GOOD, "top_p": math.nan}, {**GOOD, "beam_width": 9}]
    running = asyncio.create_task(ask(client, good))
    refused = await asyncio.gather(*[ask(client, bad[index % 4]) for index in range(100)])
    assert all(answer.error for answer in refused)
    assert (await running).text == alone.text


scalars = {
    "max_tokens": st.integers(-(2**31), 2**31 - 1),
    "top_k": st.integers(-(2**31), 2**31 - 1),
    "temperature": st.floats(width=32),
    "top_p": st.floats(width=32),
    "min_p": st.floats(width=32),
    "repetition_penalty": st.floats(width=32),
    "seed": st.integers(0, 2**64 - 1),
    "stop_words": st.lists(st.binary(max_size=8), max_size=4),
    "stop_token_ids": st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4),
    "min_tokens": st.integers(-3, 2000),
    "stream": st.booleans(),
    "exclude_input_in_output": st.booleans(),
    "return_log_probs": st.booleans(),
}
requests = st.fixed_dictionaries({"text_input": st.binary(max_size=40)}, optional=scalars)


def _drop_empty(inputs: dict) -> dict:
    return {name: value for name, value in inputs.items() if value != []}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(inputs=requests)
def test_whatever_is_sent_to_the_ensemble_is_answered_or_refused(replica, inputs):
    async def send():
        async with triton.InferenceServerClient(replica.grpc_url) as client:
            return await asyncio.wait_for(ask(client, _drop_empty(inputs)), timeout=PATIENCE_S)

    answer = asyncio.run(send())
    assert bool(answer.error) != bool(answer.finish_reasons)
    if answer.error:
        assert any(kind in answer.error for kind in ("InvalidArgument: ", "PromptTooLong: "))


engine_requests = st.fixed_dictionaries(
    {
        "input_ids": st.lists(st.integers(-5, 5000), min_size=1, max_size=20),
        "input_lengths": st.integers(0, 20),
        "request_output_len": st.integers(-2, 30),
    },
    optional={
        "end_id": st.integers(-2, 5000),
        "runtime_top_k": st.integers(-2, 10),
        "runtime_top_p": st.floats(width=32),
        "streaming": st.booleans(),
        "seed": st.integers(0, 2**64 - 1),
    },
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(inputs=engine_requests)
def test_whatever_is_sent_to_the_engine_model_is_answered_or_refused(replica, inputs):
    async def send():
        async with triton.InferenceServerClient(replica.grpc_url) as client:
            return await asyncio.wait_for(ask(client, inputs, model="engine"), timeout=PATIENCE_S)

    answer = asyncio.run(send())
    assert bool(answer.error) != bool(answer.finals)
