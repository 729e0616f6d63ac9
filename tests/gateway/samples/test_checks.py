"""What is wrong with an answer, and how far answers have drifted, on texts of several kinds."""

from __future__ import annotations

import json
import random
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.generation import Guide
from gateway.config.samples import REFUSALS, CheckRules
from gateway.samples.checks import FEATURES, MAX_SERIES, Drift, finding, language, loops, psi

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The cat is on the mat and it is happy there.", "en"),
        ("Der Hund ist nicht auf der Matte, und das ist gut.", "de"),
        ("Le chat est dans la maison et les enfants sont là.", "fr"),
        ("El perro y los gatos están en la casa para una cena.", "es"),
        ("привет, как дела", "cyrillic"),
        ("今日はいい天気ですね", "kana"),
        ("今天天气很好", "han"),
        ("مرحبا", "arabic"),
        ("42 + 1 = 43", "none"),
        ("", "none"),
    ],
)
def test_the_language_is_told_by_words_and_scripts(text, expected):
    assert language(text) == expected


def test_an_answer_that_ends_in_circles_is_a_loop():
    for text in ("Well. " + "the same again and " * 8, "ha" * 40, "x" * 60, "One line.\n" * 9 + "One li"):
        assert loops(text), text
    for text in (
        "",
        "a b a b",
        "-" * 200,
        "An answer of several words that go on and on, and end.",
        "1, 2, 3, 4, 5, 6, 7",
    ):
        assert not loops(text), text


@pytest.mark.parametrize(
    ("text", "guide", "expected"),
    [
        ('{"a": 1}', Guide("json_schema", json.dumps(SCHEMA)), "ok"),
        ('{"a": "1"}', Guide("json_schema", json.dumps(SCHEMA)), "schema"),
        ('{"a": 1', Guide("json_schema", json.dumps(SCHEMA)), "schema"),
        ("[1]", Guide("json"), "schema"),
        ("{}", Guide("json"), "ok"),
        ("[" * 100_000, Guide("json"), "schema"),
        ("yes", Guide("choice", '["yes", "no"]'), "ok"),
        ("maybe", Guide("choice", '["yes", "no"]'), "schema"),
        ("anything", Guide("regex", "[0-9]"), "ok"),  # is not checked
        ('{"a": 1}', Guide("json_schema", '{"$ref": "http://127.0.0.1:1/none"}'), "ok"),  # is never loaded
        ('{"a": 1}', Guide("json_schema", '{"type": "no such type"}'), "ok"),
        (" \n", None, "empty"),
        ("I'm sorry, but I can't help with that.", None, "refusal"),
        ("As an AI language model, I am unable to say.", None, "refusal"),
        ("I can help you: I'm sorry to hear that.", None, "ok"),
    ],
)
def test_findings(text, guide, expected):
    assert finding(text, guide, REFUSALS) == expected


def test_hostile_answers_take_no_time():
    began_s = time.process_time()
    schema = Guide("json_schema", '{"type": "string", "pattern": "^(a+)+$"}')
    finding(json.dumps("a" * 30_000 + "!"), schema, REFUSALS)
    for text in ("I'm sorry " * 3000, "ab" * 30_000, "a" * 60_000 + "b"):
        finding(text, None, REFUSALS)
        language(text)
    assert time.process_time() - began_s < 2


@given(st.lists(st.integers(1, 400), min_size=2, max_size=6), st.integers(0, 1000))
def test_equal_distributions_have_no_drift_and_different_ones_have(weights, seed):
    rng = random.Random(seed)
    draws = [Counter(rng.choices(range(len(weights)), weights, k=2000)) for _ in range(2)]
    assert psi(*draws) < 0.05
    moved = Counter({kind + len(weights): count for kind, count in draws[0].items()})
    assert psi(moved, draws[1]) > 1
    assert psi(*draws) == pytest.approx(psi(*reversed(draws)))


def fill(drift, clock, tokens, said="en", windows=1, count=50):
    for _ in range(windows):
        for number in range(count):
            drift.add("m", "p", tokens + number % 3, said, "ok")
        clock.advance(61)


def scores(drift) -> dict:
    return {feature: score for _, _, feature, score in drift.scores()}


def test_a_window_is_compared_with_those_before_it(clock):
    drift = Drift(CheckRules(window_s=60.0, windows=4, min_answers=40), clock)
    fill(drift, clock, 100)
    assert scores(drift) == {}
    fill(drift, clock, 100, windows=3)
    assert set(scores(drift)) == set(FEATURES) and max(scores(drift).values()) < 0.05
    fill(drift, clock, 100, count=10)  # too few: the latest whole window counts
    assert max(scores(drift).values()) < 0.05
    for number in range(50):
        drift.add("m", "p", 7 + number % 3, "fr", "ok")
    now = scores(drift)
    assert now["length"] > 0.2 and now["language"] > 0.2 and now["finding"] < 0.05
    fill(drift, clock, 7, "fr", windows=8)
    assert max(scores(drift).values()) < 0.05  # the shift has become the baseline


def test_a_model_without_answers_is_forgotten(clock):
    drift = Drift(CheckRules(window_s=60.0, windows=4, min_answers=40), clock)
    fill(drift, clock, 100, windows=3)
    clock.advance(239)
    assert set(scores(drift)) == set(FEATURES)  # the latest window is one of the last five
    clock.advance(1.5)
    assert scores(drift) == {} and not drift._windows


def test_models_are_bounded(clock):
    drift = Drift(CheckRules(), clock)
    for number in range(MAX_SERIES + 50):
        drift.add(f"m{number}", "p", 1, "en", "ok")
    assert len(drift._windows) == MAX_SERIES
