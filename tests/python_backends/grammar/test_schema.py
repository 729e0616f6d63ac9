"""A schema's grammar: every text of it is a value of the schema, and compact values of the schema are in it."""

import gzip
import itertools
import json
import random
from collections import Counter
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import InvalidArgument
from python_backends.grammar.schema import grammar_of
from tests.fakes.grammar_matcher import Matcher

SUITE = json.loads(gzip.decompress((Path(__file__).parent / "json_schema_test_suite.json.gz").read_bytes()))["groups"]
FILES = sorted({group["file"] for group in SUITE})


def compact(value):
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def orders(value):
    """The value with its properties in every order."""
    if isinstance(value, dict):
        members = [[(name, each) for each in orders(item)] for name, item in value.items()]
        for chosen in itertools.product(*members):
            yield from map(dict, itertools.permutations(chosen))
    elif isinstance(value, list):
        yield from map(list, itertools.product(*map(orders, value)))
    else:
        yield value


def verdicts(groups):
    """How the published cases fare: right, narrow (a valid value that is not in the grammar), wrong, refused."""
    for group in groups:
        try:
            matcher = Matcher(grammar_of(json.dumps(group["schema"])))
        except InvalidArgument as exc:
            impossible = "allows no value" in exc.problem
            for case in group["tests"]:
                yield ("refused" if not impossible else "wrong" if case["valid"] else "right"), group, case
            continue
        for case in group["tests"]:
            held = any(matcher.matches(compact(each)) for each in itertools.islice(orders(case["data"]), 500))
            yield ("right" if held == case["valid"] else "wrong" if held else "narrow"), group, case


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_no_published_case_is_wrong(file):
    found = verdicts(group for group in SUITE if group["file"] == file)
    assert not [(group["description"], case) for verdict, group, case in found if verdict == "wrong"]


@pytest.mark.slow
def test_the_share_of_published_cases_that_is_supported_is_the_documented_one():
    counts = Counter(verdict for verdict, _, _ in verdicts(SUITE))
    line = f"{counts['right']} right, {counts['narrow']} narrower, {counts['refused']} refused, {counts['wrong']} wrong"
    assert line in (Path(__file__).parents[3] / "docs/structured-output.md").read_text(), line


NAMES = st.sampled_from(["a", "b", "cd"])
INTEGERS = st.integers(-20, 20)


def pair(low, high):
    return st.tuples(st.integers(0, 3), st.integers(0, 3)).map(lambda p: {low: min(p), high: max(p) + 1})


LEAVES = st.one_of(
    st.sampled_from([{}, True, {"type": "null"}, {"type": "integer"}, {"type": ["string", "boolean"]}]),
    pair("minLength", "maxLength").map(lambda limits: {"type": "string", **limits}),
    st.sampled_from(["^[ab]+$", "c", "^x"]).map(lambda pattern: {"type": "string", "pattern": pattern}),
    st.tuples(INTEGERS, INTEGERS).map(lambda b: {"type": "number", "minimum": min(b), "exclusiveMaximum": max(b) + 1}),
    st.integers(1, 7).map(lambda step: {"type": "integer", "multipleOf": step}),
    st.lists(INTEGERS | st.sampled_from(["p", "q", None, True, [1], {"a": 1}]), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
)


OTHERS = st.sampled_from([None, False, {"type": "integer"}])


def larger(inner):
    members = st.dictionaries(NAMES, inner, max_size=3)
    return st.one_of(
        st.tuples(members, st.lists(NAMES, max_size=2, unique=True), OTHERS).map(
            lambda p: (
                {"type": "object", "properties": p[0], "required": p[1]}
                | ({} if p[2] is None else {"additionalProperties": p[2]})
            )
        ),
        st.tuples(inner, pair("minItems", "maxItems")).map(lambda p: {"type": "array", "items": p[0], **p[1]}),
        inner.map(lambda s: {"type": "array", "contains": s, "items": {"type": ["integer", "string"]}}),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts}),
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"allOf": parts}),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"oneOf": parts}),
        st.tuples(inner, inner).map(lambda p: {"not": p[0], **(p[1] if isinstance(p[1], dict) else {})}),
        st.tuples(inner, inner, inner).map(lambda p: {"if": p[0], "then": p[1], "else": p[2]}),
        st.tuples(NAMES, NAMES, members).map(
            lambda p: {"type": "object", "properties": p[2], "dependentRequired": {p[0]: [p[1]]}, "maxProperties": 3}
        ),
    )


SCHEMAS = st.recursive(LEAVES, larger, max_leaves=5)


@pytest.mark.slow
@settings(max_examples=40)
@given(SCHEMAS, st.integers(0, 2**32))
def test_every_text_of_a_grammar_is_a_value_of_its_schema(schema, seed):
    try:
        grammar = grammar_of(json.dumps(schema))
    except InvalidArgument:
        return
    matcher, rng = Matcher(grammar), random.Random(seed)
    for _ in range(3):
        text = matcher.sample(rng)
        value = json.loads(text)
        errors = list(jsonschema.Draft202012Validator(schema).iter_errors(value))
        assert not errors, (text, errors[0].message)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (
            {"properties": {"a": {"unevaluatedProperties": False}}},
            "#/properties/a/unevaluatedProperties is not supported",
        ),
        ({"items": [{}]}, "#/items must be a schema"),
        ({"minimum": "1"}, "#/minimum must be a number"),
        ({"$ref": "#/nowhere"}, "#/\\$ref points to nothing"),
        ({"$ref": "#"}, "# refers to itself"),
        ({"$ref": "http://example.com"}, "#/\\$ref must point into this schema"),
        ({"type": "strnig"}, "#/type must hold null, boolean"),
        ({"pattern": "(?=a)"}, "#/pattern has look-around"),
        ({"format": "idn-email"}, "#/format must be one of date"),
        ({"minLenght": 3}, "#/minLenght is not supported"),
        ({"minLength": -1}, "#/minLength must be a whole number"),
        ({"enum": 3}, "#/enum must be a list"),
        ({"enum": []}, "# allows no value"),
        (False, "# allows no value"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "# allows no value"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}, "# allows no value that ends"),
        ([], "# must be an object or a boolean"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_keyword_and_place(schema, place):
    with pytest.raises(InvalidArgument, match=place):
        grammar_of(json.dumps(schema))


@pytest.mark.parametrize(
    "text",
    ["", "{", '{"a": NaN}', '{"a": 1e99999999999999999999}', "[" * 5000, '{"items":' * 3000 + "{}" + "}" * 3000],
)
def test_what_is_no_schema_is_refused(text):
    with pytest.raises(InvalidArgument, match="must be a JSON schema"):
        grammar_of(text)


def test_a_number_with_a_large_exponent_is_refused_before_it_is_written():
    for text in ('{"const": 1e2000000000}', '{"properties": {"a": {"enum": [{"b": [1e-2000000000]}]}}}'):
        with pytest.raises(InvalidArgument, match="allows numbers of at most 400 digits"):
            grammar_of(text)
    assert Matcher(grammar_of('{"const": 1e308}')).matches("1" + 308 * "0")


def test_any_object_is_an_object():
    matcher = Matcher(grammar_of('{"type": "object"}'))
    assert matcher.matches('{"a":[1,{"b":null}]}') and not matcher.matches("[]") and not matcher.matches('{"a": 1}')


def test_large_schemas_take_little_time_and_text():
    many = {f"property_{n}": {"type": "string", "maxLength": 1000 + n} for n in range(300)}
    assert len(grammar_of(json.dumps({"type": "object", "properties": many}))) < 200_000
