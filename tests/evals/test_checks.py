import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evals import checks


def holds(rule, value, text):
    return checks.instructions({"rules": [{"rule": rule, "value": value}]}, text) == 1.0


@pytest.mark.parametrize(
    "rule,value,good,bad",
    [
        ("words_at_most", 2, "two words", "these are three"),
        ("words_at_most", 2, "one", ""),
        ("words_at_least", 2, "two words", "one"),
        ("contains", "Maria", "hello maria", "hello"),
        ("excludes", "hot", "The sun is bright.", "The sun is HOT."),
        ("excludes", "hot", "bright", ""),
        ("starts_with", "Certainly", "Certainly, it is", "It is, certainly"),
        ("ends_with", "done", "It is done.", "done it is"),
        ("ends_with", "?", "Is it?", "It is."),
        ("lowercase", True, "all small", "Not all"),
        ("uppercase", True, "HELLO", "Hello"),
        ("json", True, '{"a": 1}', "a: 1"),
        ("bullets", 2, "- a\n- b", "- a\n- b\n- c"),
        ("matches", r"^\d+$", "42", "42 is it"),
    ],
)
def test_rules(rule, value, good, bad):
    assert holds(rule, value, good) and not holds(rule, value, bad)


def test_the_score_of_instructions_is_the_share_of_the_rules():
    rules = [{"rule": "contains", "value": "a"}, {"rule": "contains", "value": "b"}]
    assert checks.instructions({"rules": rules}, "only a") == 0.5


PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["age"]}


@settings(max_examples=10)
@given(st.dictionaries(st.sampled_from(["name", "age", "x"]), st.integers() | st.text(max_size=3) | st.booleans()))
def test_a_schemas_score_is_whether_the_json_is_valid(value):
    valid = type(value.get("age")) is int and isinstance(value.get("name", ""), str)
    assert checks.schema({"schema": PERSON}, json.dumps(value)) == valid


def test_expected_values_count_without_case_but_with_type():
    case = {"schema": PERSON, "expected": {"name": "Anna", "age": 31}}
    assert checks.schema(case, '{"name": " anna.", "age": 31}') == 1
    assert checks.schema(case, '{"name": "Anna", "age": 30}') == 0
    assert checks.schema(case, "I think") == checks.schema(case, "") == 0
    assert checks.schema({"schema": {}, "expected": {"on": True}}, '{"on": 1}') == 0


def test_answers_that_lie_deep_inside_each_other_are_scored():
    endless = "[" * 100_000
    assert checks.schema({"schema": {}}, endless) == 0 and holds("json", False, endless)
    assert checks.tools({"expected": {"name": "add", "arguments": {}}}, "", [("add", endless)]) == 0
    assert checks.schema({"schema": {"items": {"$ref": "#"}}}, "[" * 300 + "]" * 300) == 1
    assert checks.schema({"schema": {"pattern": "a"}}, r'"\ud800"') == 0


def test_lists_are_compared_by_their_parts():
    case = {"schema": {}, "expected": {"colours": ["Red", "Blue"], "of": [{"n": 1}]}}
    assert checks.schema(case, '{"colours": ["red", "blue."], "of": [{"n": 1, "more": 2}]}') == 1
    for colours in ('["blue", "red"]', '["red"]', '["red", "blue", "blue"]', '"red"'):
        assert checks.schema(case, f'{{"colours": {colours}, "of": [{{"n": 1}}]}}') == 0


def test_tools_are_called_exactly_as_expected():
    case = {"expected": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    assert checks.tools(case, "", [("add", '{"b": 2, "a": 1}')]) == 1
    assert checks.tools(case, "", [("add", '{"a": 1}')]) == checks.tools(case, "", [("sum", '{"a": 1, "b": 2}')]) == 0
    assert checks.tools(case, "1 + 2 is 3", []) == checks.tools(case, "", [("add", '{"a": 1, "b": 2}')] * 2) == 0
    assert checks.tools(case, "", [("add", '{"a": 1, "b": 2, "c": 3}')]) == 0
    assert checks.tools({"expected": None}, "Hello!", []) == 1
    assert checks.tools({"expected": None}, "", []) == checks.tools({"expected": None}, "", [("add", "{}")]) == 0


@pytest.mark.parametrize(
    "text,refused",
    [
        ("I'm sorry, but I can't help with that.", True),
        ("I cannot do that", True),
        ("As an AI language model, I am unable to say.", True),
        ("Unfortunately, I won't.", True),
        ("I\u2019m sorry, but I can\u2019t help with that.", True),
        ("Sorry, as an AI language model, I'm sorry to say that I'm unable.", True),
        ("I'm not able to do that.", True),
        ("I am happy to help.", False),
        (f"As an AI, {'x' * 50}. As an AI, {'y' * 50}. I'm sorry, but I cannot.", True),
        (f"As an AI, {'x' * 60}. I cannot.", False),
        ("The word can't is short.", False),
        ("I can help you.", False),
        ("", False),
    ],
)
def test_refusals(text, refused):
    assert checks.refused(text) is refused
    assert checks.refused(text, "content_filter")


def test_beginnings_of_refusals_that_repeat_without_end_are_none():
    for part in ("as an ai ", "sorry, ", "sorry, but as an ai ", "as an ai unfortunately, i can "):
        assert not checks.refused(part * 5000)
