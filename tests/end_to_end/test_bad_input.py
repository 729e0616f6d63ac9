"""Everything a client can get wrong is refused by name with what is allowed, and disturbs nobody else."""

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
    ("inputs", "said"),
    [
        ({"text_input": ""}, "text_input: is empty"),
        ({"max_tokens": 4}, "text_input: is missing"),
        ({**GOOD, "text_input": "word " * 3000}, "text_input: the prompt has"),
        ({**GOOD, "text_input": b"\xff\xfe"}, "text_input: must be UTF-8, got an invalid sequence at byte 0"),
        ({**GOOD, "text_input": "a\0b"}, "text_input: must hold no NUL character, got one at position 1"),
        ({**GOOD, "text_input": "x" * 1_000_000}, "text_input: has 1000000 bytes"),
        ({**GOOD, "max_tokens": -1}, "max_tokens: got -1; allowed are 1 to 1024"),
        ({**GOOD, "max_tokens": 0}, "max_tokens: got 0; allowed are 1 to 1024"),
        ({**GOOD, "max_tokens": 2**31 - 1}, "max_tokens: got 2147483647; allowed are 1 to 1024"),
        ({**GOOD, "max_tokens": 1024}, "allowed are 1024 (max_seq_len), so max_tokens may be at most"),
        ({**GOOD, "temperature": math.nan}, "temperature: got nan; allowed is a finite number"),
        ({**GOOD, "temperature": math.inf}, "temperature: got inf"),
        ({**GOOD, "temperature": -0.5}, "temperature: got -0.5"),
        ({**GOOD, "top_p": 1.5}, "runtime_top_p (top_p): got 1.5"),
        ({**GOOD, "top_p": -0.1}, "runtime_top_p (top_p): got -0.1"),
        ({**GOOD, "top_k": -1}, "runtime_top_k (top_k): got -1"),
        ({**GOOD, "min_p": 1.0}, "min_p: got 1.0"),
        ({**GOOD, "repetition_penalty": 0.0}, "repetition_penalty: got 0.0"),
        ({**GOOD, "presence_penalty": 3.0}, "presence_penalty: got 3.0"),
        ({**GOOD, "frequency_penalty": math.nan}, "frequency_penalty: got nan"),
        ({**GOOD, "min_tokens": -1}, "min_tokens: got -1"),
        ({**GOOD, "min_tokens": 2, "min_length": 3}, "min_length: got 3, but min_tokens"),
        ({**GOOD, "seed": 1, "random_seed": 2}, "random_seed: got 2, but seed"),
        ({**GOOD, "stop_words": [f"stop {i}" for i in range(10_000)]}, "stop_words: holds 10000 strings"),
        ({**GOOD, "stop_words": "x" * 5000}, "stop_words: holds a string of 5000 characters"),
        ({**GOOD, "stop_words": [b"\xff"]}, "stop_words: must be UTF-8"),
        ({**GOOD, "stop_token_ids": [99_999]}, "stop_token_ids: holds the id 99999; allowed are 0 to"),
        ({**GOOD, "end_id": 99_999}, "end_id: got 99999"),
        ({**GOOD, "num_top_log_probs": 21}, "num_top_log_probs: got 21; allowed is an integer from 0 to 20"),
        ({**GOOD, "beam_width": 4}, "beam_width: got 4; this CPU engine does not do beam search"),
        ({**GOOD, "num_return_sequences": 2}, "num_return_sequences: got 2"),
        ({**GOOD, "length_penalty": 0.5}, "len_penalty: got 0.5"),
        ({**GOOD, "bad_words": "x"}, "bad_words: the CPU engine cannot ban words"),
        ({**GOOD, "embedding_bias_words": "x", "embedding_bias_weights": 1.0}, "embedding_bias_words: the CPU engine"),
        ({**GOOD, "embedding_bias_words": "x"}, "embedding_bias_weights: has 0 values for 1 words"),
        ({**GOOD, "return_context_logits": True}, "return_context_logits: got True"),
        ({**GOOD, "return_generation_logits": True}, "return_generation_logits: got True"),
        ({**GOOD, "lora_task_id": 7}, "lora_task_id: got 7"),
        ({**GOOD, "guided_decoding_guide_type": "json"}, "guided_decoding_guide_type: this CPU engine"),
        ({**GOOD, "messages": "[]"}, "messages: was sent together with text_input"),
        ({"messages": "not json"}, "messages: is not JSON"),
        ({"messages": "[]"}, "messages: must be"),
        ({"messages": json.dumps([{"content": "x"}])}, 'messages: entry 0 has no "role"'),
    ],
)
async def test_the_ensemble_refuses_it_by_name(client, inputs, said):
    answer = await ask(client, inputs)
    assert said in answer.error
    assert answer.ids == []


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"temperature": 0.5}, "temperature: was sent as a request parameter; send it as an input tensor"),
        ({"temprature": 0.5}, "temprature: is neither an input nor a known request parameter; did you mean"),
    ],
)
async def test_a_parameter_nobody_reads_is_refused_by_name(client, parameters, said):
    assert said in (await ask(client, GOOD, parameters=parameters)).error


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ([tensor("text_input", "a", shape=(1,))], "unexpected shape for input 'text_input'"),
        ([tensor("text_input", ["a", "b"], shape=(2, 1))], "batch-size must be <= 1"),
        ([tensor("text_input", "a"), tensor("max_tokens", 4.0, "FP32")], "'max_tokens' data-type is 'FP32'"),
        ([tensor("text_input", "a"), tensor("stop_words", ["a", "b"], shape=(2, 1))], "batch"),
    ],
)
async def test_wrong_shapes_and_types_are_refused_by_name(client, inputs, said):
    assert said in (await ask(client, inputs)).error


ENGINE = {"input_ids": [5, 6], "input_lengths": 2, "request_output_len": 3}


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({**ENGINE, "input_ids": [5, 4096]}, "input_ids: holds the id 4096; allowed are 0 to 4095"),
        ({**ENGINE, "input_ids": [5, -1]}, "input_ids: holds the id -1"),
        ({**ENGINE, "input_lengths": 3}, "input_lengths: got 3; allowed is 2"),
        ({**ENGINE, "request_output_len": 0}, "request_output_len: got 0"),
        ({**ENGINE, "request_output_len": 1023}, "request_output_len: the prompt has 2 tokens"),
        ({"input_lengths": 0, "request_output_len": 3}, "input_ids: holds no token ids"),
        ({**ENGINE, "stop": True}, "request_id: is empty"),
    ],
)
async def test_the_engine_door_refuses_it_by_name(client, inputs, said):
    assert said in (await ask(client, inputs, model="engine")).error


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
def test_whatever_is_sent_to_the_engine_door_is_answered_or_refused(replica, inputs):
    async def send():
        async with triton.InferenceServerClient(replica.grpc_url) as client:
            return await asyncio.wait_for(ask(client, inputs, model="engine"), timeout=PATIENCE_S)

    answer = asyncio.run(send())
    assert bool(answer.error) != bool(answer.finals)
