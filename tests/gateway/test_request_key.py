"""The same answer, the same key; anything else, another."""

from __future__ import annotations

import dataclasses

import pytest

from contract.generation import GenerationRequest, Guide, SamplingParams
from gateway.request_key import deterministic, request_key

REQUEST = GenerationRequest("Hello", sampling=SamplingParams(temperature=0.0))
OTHERS = {
    "text_input": "Hello ",
    "messages": ({"role": "user", "content": "Hello"},),
    "max_tokens": 129,
    "stop": ("x",),
    "stop_token_ids": (1,),
    "echo": True,
    "skip_special_tokens": False,
    "guide": Guide("json"),
    "tools": "[]",
    "tool_choice": "none",
    "parallel_tool_calls": False,
    "chat_template_kwargs": "{}",
    "input_ids": (1, 2),
    "truncate_prompt_tokens": 5,
    "adapter": "poet",
    "continue_ids": (3,),
    "bad_words": ("x",),
}


def test_carriage_does_not_change_the_key() -> None:
    carried = dataclasses.replace(REQUEST, request_id="7", stream=False, timeout_s=3.0)
    assert request_key(carried, "a", "e") == request_key(REQUEST, "a", "e")


def test_every_field_of_the_answer_changes_the_key() -> None:
    declared = {field.name for field in dataclasses.fields(GenerationRequest)}
    assert declared == {*OTHERS, "sampling", "request_id", "stream", "timeout_s"}  # a new field must be decided on
    keys = {request_key(dataclasses.replace(REQUEST, **{name: value}), "a", "e") for name, value in OTHERS.items()}
    for field in dataclasses.fields(SamplingParams):
        default = getattr(REQUEST.sampling, field.name)
        other = (default or 0) + 1 if not isinstance(default, bool) else not default
        sampling = dataclasses.replace(REQUEST.sampling, **{field.name: other})
        keys.add(request_key(dataclasses.replace(REQUEST, sampling=sampling), "a", "e"))
    keys |= {request_key(REQUEST, "b", "e"), request_key(REQUEST, "a", "f"), request_key(REQUEST, "a", "e")}
    assert len(keys) == len(OTHERS) + len(dataclasses.fields(SamplingParams)) + 3


PARTS = [("ab", "c"), ("b", "ca"), ("a", "bc"), ('a", "b', "c"), ("b", 'c", "a')]


@pytest.mark.parametrize("parts", PARTS)
def test_tenant_and_engine_do_not_run_into_each_other(parts: tuple[str, str]) -> None:
    same = [other for other in PARTS if request_key(REQUEST, *other) == request_key(REQUEST, *parts)]
    assert same == [parts]


def test_greedy_or_seeded_is_deterministic() -> None:
    assert deterministic(REQUEST) and deterministic(GenerationRequest("x", sampling=SamplingParams(seed=0)))
    assert deterministic(GenerationRequest("x", sampling=SamplingParams(top_k=1)))
    assert not deterministic(GenerationRequest("x"))


def test_a_lone_surrogate_has_a_key() -> None:
    assert len(request_key(GenerationRequest("\udc00"), "a", "e")) == 64
