import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import InvalidArgument
from contract.generation import INT32_MAX, UINT64_MAX, FinishReason, GenerationRequest, SamplingParams, changed

NAN, INFINITY = float("nan"), float("inf")

# field -> values at the edge that are allowed, and values that are not.
EDGES = {
    "temperature": ([0, 0.0, 1e-9, 100.0], [-1e-9, 100.1, NAN, INFINITY, "1", None, True]),
    "top_k": ([0, 1, INT32_MAX], [-1, INT32_MAX + 1, 1.0, NAN, "1", None, True]),
    "top_p": ([1e-46, 1e-9, 1, 1.0], [0.0, 1.1, -0.5, NAN, INFINITY, None]),
    "min_p": ([0.0, 0.999, 0.9999999999], [1.0, -0.1, NAN]),
    "repetition_penalty": ([1e-50, 1e-9, 100.0], [0.0, 100.1, -1.0, NAN, INFINITY]),
    "presence_penalty": ([-2.0, 2.0], [-2.1, 2.1, NAN]),
    "frequency_penalty": ([-2.0, 2.0], [-2.1, 2.1, NAN]),
    "seed": ([None, 0, UINT64_MAX], [-1, UINT64_MAX + 1, 1.5, True]),
    "min_tokens": ([0, INT32_MAX], [-1, INT32_MAX + 1, 1.0]),
    "top_log_probs": ([0, 20], [-1, 21, 1.5]),
}


@pytest.mark.parametrize("name", EDGES)
def test_a_sampling_value_is_allowed_up_to_its_edge_and_refused_beyond_by_name(name):
    allowed, refused = EDGES[name]
    for value in allowed:
        params = SamplingParams(**{name: value})
        assert params.validate() is params
    for value in refused:
        with pytest.raises(InvalidArgument, match="must be .*, got ") as caught:
            SamplingParams(**{name: value}).validate()
        assert caught.value.field == name and repr(value) in str(caught.value)


def test_every_numeric_sampling_value_has_its_edges_tested():
    switches = {"ignore_eos", "log_probs", "prompt_log_probs"}
    assert set(EDGES) == {field.name for field in dataclasses.fields(SamplingParams)} - switches


@given(st.floats(), st.floats(), st.floats(), st.integers(), st.integers())
def test_what_passes_is_finite_and_in_range(temperature, top_p, presence_penalty, top_k, seed):
    params = SamplingParams(
        temperature=temperature, top_p=top_p, presence_penalty=presence_penalty, top_k=top_k, seed=seed
    )
    try:
        params.validate()
    except InvalidArgument:
        return
    assert 0 <= temperature <= 100 and 0 < top_p <= 1 and abs(presence_penalty) <= 2
    assert 0 <= top_k <= INT32_MAX and 0 <= seed <= UINT64_MAX and math.isfinite(temperature)


def test_the_defaults_are_neutral_and_valid():
    assert SamplingParams().validate().greedy is False
    assert SamplingParams(temperature=0.0).greedy and SamplingParams(top_k=1).greedy


def test_a_prompt_or_a_chat_makes_a_request():
    GenerationRequest(text_input="a").validate()
    GenerationRequest(messages=({"role": "user", "content": "a"},)).validate()


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({}, "text_input", "must be set if neither messages nor input_ids is"),
        ({"text_input": "a", "messages": ()}, "text_input", "must be set if neither messages nor input_ids is"),
        ({"text_input": "a", "input_ids": (1,)}, "text_input", "else left out"),
        ({"input_ids": ()}, "input_ids", "must hold at least one token id, got none"),
        ({"input_ids": (3, -1)}, "input_ids", "must be an integer from 0 to"),
        ({"input_ids": (3, True)}, "input_ids", "must be an integer from 0 to"),
        ({"text_input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "must be an integer from 1 to"),
        (
            {"text_input": "a", "truncate_prompt_tokens": 2**31},
            "truncate_prompt_tokens",
            "must be an integer from 1 to",
        ),
        ({"text_input": "a", "echo": True, "max_tokens": -1}, "max_tokens", "an integer from 0 to"),
        (
            {"text_input": "a", "sampling": SamplingParams(prompt_log_probs=True, log_probs=True)},
            "prompt_log_probs",
            "must be false without echo and log_probs",
        ),
        (
            {"text_input": "a", "echo": True, "sampling": SamplingParams(prompt_log_probs=True)},
            "prompt_log_probs",
            "must be false without echo and log_probs",
        ),
        ({"text_input": ""}, "text_input", "must have at least one character"),
        ({"text_input": "a", "max_tokens": 0}, "max_tokens", "an integer from 1 to"),
        ({"text_input": "a", "max_tokens": INT32_MAX + 1}, "max_tokens", "an integer from 1 to"),
        ({"text_input": "a", "timeout_s": 0.0}, "timeout_s", r"a finite number in \(0, 86400\]"),
        ({"text_input": "a", "timeout_s": INFINITY}, "timeout_s", r"a finite number in \(0, 86400\]"),
        ({"text_input": "a", "sampling": SamplingParams(top_p=2)}, "top_p", r"a finite number in \(0, 1\]"),
    ],
)
def test_a_request_that_cannot_be_is_refused_by_name(changes, field, problem):
    with pytest.raises(InvalidArgument, match=problem) as caught:
        GenerationRequest(**changes).validate()
    assert caught.value.field == field


def test_valid_things_cannot_be_changed_afterwards():
    request = GenerationRequest(text_input="a").validate()
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.max_tokens = -1


def test_finish_reasons_are_their_wire_form():
    assert [reason.value for reason in FinishReason] == ["stop", "length", "cancelled", "error"]
    assert FinishReason("stop") is FinishReason.STOP


def test_a_changed_copy_is_what_replace_makes():
    request = GenerationRequest(text_input="a", max_tokens=7, stop=("x",))
    fields = {"timeout_s": 2.0, "request_id": "b"}
    assert changed(request, **fields) == dataclasses.replace(request, **fields) != request
    assert changed(request) == request and request.timeout_s is None
