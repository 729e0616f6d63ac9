from __future__ import annotations

import numpy as np
import pytest

from clients.wire import request
from contract.errors import InvalidArgument
from contract.generation import Guide, SamplingParams


def test_arguments_become_one_valid_request_with_an_id() -> None:
    built = request.build("hi", max_tokens=3, stop="\n", stop_token_ids=[1, 2], temperature=0.0, seed=5, timeout_s=2)
    assert (built.text_input, built.max_tokens, built.stop, built.stop_token_ids) == ("hi", 3, ("\n",), (1, 2))
    assert built.sampling == SamplingParams(temperature=0.0, seed=5)
    assert len(built.request_id) == 32 and built.request_id != request.build("hi").request_id


def test_a_chat_and_a_schema_are_taken_as_python_has_them() -> None:
    built = request.build(
        messages=[{"role": "user", "content": "hi"}], json_schema={"type": "object"}, request_id="mine"
    )
    assert built.messages == ({"role": "user", "content": "hi"},)
    assert built.guide == Guide("json_schema", '{"type": "object"}')
    assert built.request_id == "mine"
    assert request.with_id(built) is built


def test_ids_are_taken_from_any_iterable_of_integers() -> None:
    built = request.build(input_ids=np.array([3, 1], np.int32), truncate_prompt_tokens=-1)
    assert built.input_ids == (3, 1) and all(type(token) is int for token in built.input_ids)
    assert (built.text_input, built.truncate_prompt_tokens) == (None, -1)


def test_numbers_of_numpy_become_those_of_python() -> None:
    built = request.build("x", max_tokens=np.int32(4), temperature=np.float32(0.5), seed=np.uint64(5))
    numbers = (built.max_tokens, built.sampling.temperature, built.sampling.seed)
    assert numbers == (4, 0.5, 5) and [type(number) for number in numbers] == [int, float, int]


def test_true_is_a_schema() -> None:
    assert request.build("x", json_schema=True).guide == Guide("json_schema", "true")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": "x", "temprature": 1}, "temprature: no such argument; did you mean temperature"),
        ({"prompt": "x", "temperature": -1}, r"temperature: must be a finite number in \[0, 100\], got -1"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens: must be an integer from 1"),
        ({"prompt": "x", "stop": ["a", ""]}, "stop: must hold strings of at least one character, got"),
        ({"prompt": "x", "timeout_s": 0}, "timeout_s: must be a finite number"),
        ({"prompt": "x", "request_id": "é"}, "request_id: must be at most 256 printable ASCII characters, got 'é'"),
        ({"prompt": "x", "request_id": "a\nb"}, "request_id: must .*got"),
        ({"prompt": ""}, "prompt: must have at least one character"),
        ({}, "prompt: must be set if neither messages nor input_ids is"),
        (
            {"prompt": "x", "messages": [{"role": "user", "content": "y"}]},
            "must be set if neither messages nor input_ids",
        ),
        ({"prompt": "x", "input_ids": [1]}, "must be set if neither messages nor input_ids is, else left out"),
        ({"input_ids": []}, "input_ids: must hold at least one token id, got none"),
        ({"input_ids": [1, -1]}, "input_ids: must hold integers from 0 to 2147483647, got -1"),
        ({"prompt": "x", "continue_ids": [-1]}, "continue_ids: must hold integers from 0 to 2147483647, got -1"),
        ({"prompt": "x", "bad_words": ["a", ""]}, "bad_words: must hold strings of at least one character, got"),
        ({"prompt": "x", "bad_words": "a"}, "bad_words: must be a list, got 'a'"),
        ({"input_ids": "12"}, "input_ids: must be a list, got '12'"),
        (
            {"prompt": "x", "truncate_prompt_tokens": 0},
            "truncate_prompt_tokens: must be an integer from 1 to 2147483647, or -1 for what fits, got 0",
        ),
        ({"messages": []}, "messages: allowed is a non-empty list"),
        ({"messages": [{"content": "y"}]}, "messages: allowed is a non-empty list"),
        ({"messages": ["hi"]}, "messages: allowed is a non-empty list"),
        ({"messages": "hi"}, "messages: must be a list, got 'hi'"),
        ({"prompt": b"x"}, "prompt: must be text, got b'x'"),
        ({"prompt": 5}, "prompt: must be text, got 5"),
        ({"prompt": "x", "truncate_prompt_tokens": 2**31}, "truncate_prompt_tokens: must be .*, got 2147483648"),
        ({"prompt": "x", "stop": 5}, "stop: must be a string or a list of strings, got 5"),
        ({"prompt": "x", "stop": None}, "stop: must be a string or a list of strings, got None"),
        ({"prompt": "x", "adapter": None}, "adapter: must be text, got None"),
        ({"prompt": "x", "adapter": 3}, "adapter: must be text, got 3"),
        ({"messages": [{"role": "user", "content": {1}}]}, "messages: must be a list that JSON can hold, got"),
        ({"prompt": "x", "guide": "x"}, "guide: must be a Guide, got 'x'"),
        ({"prompt": "x", "guide": {}, "json_schema": {}}, "guide: must be a Guide, got {}"),
        ({"prompt": "x", "guide": Guide("regex", 5)}, "guide.text: must be text, got 5"),
        ({"prompt": "x", "max_tokens": np.bool_(True)}, "max_tokens: must be an integer"),
        ({"prompt": "x", "stop_token_ids": ["a"]}, "stop_token_ids: must hold integers from 0 to 2147483647, got"),
        ({"prompt": "x", "stop_token_ids": [2**31]}, "stop_token_ids: must .*got"),
        ({"prompt": "x", "stop_token_ids": 7}, "stop_token_ids: must be a list, got 7"),
        ({"prompt": "x", "request_id": 5}, "request_id: must .*got 5"),
        ({"prompt": "x", "ignore_eos": "no"}, "ignore_eos: must be True or False, got 'no'"),
        ({"prompt": "x", "log_probs": 3}, "log_probs: must be True or False, got 3"),
        ({"prompt": "x", "stream": "no"}, "stream: must be True or False, got 'no'"),
        (
            {"prompt": "x", "json_schema": {"a": {1}}},
            "json_schema: must be a schema that JSON can hold, or its text, got",
        ),
        ({"messages": [{"role": "user", "content": "y"}], "tools": 5}, "tools: must be a list of tools .* got 5"),
        ({"prompt": "x", "tools": True}, "tools: must be a list of tools .* got True"),
        ({"prompt": "x", "chat_template_kwargs": []}, r"chat_template_kwargs: must be a dict .* got \[\]"),
        ({"prompt": "x", "tools": []}, "tools: must be left out without messages"),
        ({"prompt": "x", "chat_template_kwargs": {}}, "chat_template_kwargs: must be left out without messages"),
        ({"prompt": "x", "json_schema": {}, "guide": Guide("regex", "a")}, "guide: must be left out with json_schema"),
        ({"prompt": "x", "guide": Guide("regex")}, "guide.text: must be sent with the type regex"),
        ({"prompt": "x", "guide": Guide("yaml", "a")}, "guide.kind: must be one of json, json_schema"),
        ({"prompt": "x", "json_schema": "{" * 2**18}, "json_schema: must have at most 131072 bytes, got 262144"),
    ],
)
def test_a_bad_argument_is_named_with_what_is_allowed(arguments: dict, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        request.build(**arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt", "a\ud800"),
        ("messages", [{"role": "user", "content": "a\ud800"}]),
        ("tools", "a\ud800"),
        ("chat_template_kwargs", "a\ud800"),
        ("adapter", "a\ud800"),
        ("stop", "a\ud800"),
        ("bad_words", ["b", "a\ud800"]),
        ("json_schema", "a\ud800"),
        ("guide.text", Guide("regex", "a\ud800")),
    ],
)
def test_text_that_utf8_cannot_hold_is_refused_by_the_arguments_name(name: str, value: object) -> None:
    prompt = {} if name in ("prompt", "messages") else {"prompt": "x"}
    with pytest.raises(InvalidArgument, match="must be encodable as UTF-8, got a lone surrogate at index") as refusal:
        request.build(**prompt, **{name.removesuffix(".text"): value})
    assert refusal.value.field == name


def test_tools_and_template_variables_travel_as_json() -> None:
    asked = [{"role": "assistant", "tool_calls": []}]
    built = request.build(messages=asked, tools=({"a": 1},), chat_template_kwargs={"enable_thinking": False})
    assert (built.tools, built.chat_template_kwargs) == ('[{"a": 1}]', '{"enable_thinking": false}')
    assert request.build(messages=asked, tools="[]").tools == "[]"
