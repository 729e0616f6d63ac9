"""Which stage when, and what it does to a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.generation import GenerationRequest, SamplingParams
from gateway.admission.degradation import Stage, degraded, shortened, stage_at
from gateway.config.policy import DegradationRules

REQUEST = GenerationRequest("Hello", max_tokens=1000)


@pytest.mark.parametrize(
    ("pressure", "overflow", "stage"),
    [
        (0.0, "", Stage.NONE),
        (0.69, "small", Stage.NONE),
        (0.7, "small", Stage.SHORTER),
        (0.85, "small", Stage.OVERFLOW),
        (0.85, "", Stage.SHORTER),
        (1.0, "small", Stage.REFUSE),
    ],
)
def test_stages_begin_where_they_are_set(pressure: float, overflow: str, stage: Stage) -> None:
    assert stage_at(pressure, DegradationRules(overflow=overflow)) is stage


@given(st.floats(0, 2), st.floats(0, 2))
def test_more_pressure_never_gives_up_less(one: float, other: float) -> None:
    order = list(Stage)
    degradation = DegradationRules(overflow="small")
    assert order.index(stage_at(min(one, other), degradation)) <= order.index(stage_at(max(one, other), degradation))


def test_answers_are_shortened_and_it_is_said() -> None:
    assert degraded(REQUEST, DegradationRules(max_tokens=64)).max_tokens == 64
    assert REQUEST.max_tokens == 1000


def test_what_asks_for_less_is_left_alone() -> None:
    original = GenerationRequest("Hello", max_tokens=10)
    assert degraded(original, DegradationRules()) is original


def test_a_continued_stream_keeps_the_limit_that_it_began_with() -> None:
    original = GenerationRequest("Hello", max_tokens=1000, continue_ids=(1,))
    assert degraded(original, DegradationRules()) is original


def test_a_promised_minimum_is_kept() -> None:
    original = GenerationRequest("Hello", max_tokens=1000, sampling=SamplingParams(min_tokens=300))
    assert degraded(original, DegradationRules(max_tokens=64)).max_tokens == 300


def test_a_cap_counts_what_is_continued() -> None:
    original = GenerationRequest("Hello", max_tokens=1000, continue_ids=(1, 2, 3))
    assert [shortened(original, most).max_tokens for most in (2, 5)] == [3, 5]
