"""JSON in prompts with few tokens."""

from __future__ import annotations

import json

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.prompts.json_text import compact, plain_schema, plain_tools, table

VALUES = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5), st.lists, max_leaves=6)
NAMES = st.sampled_from(("title", "a", "$comment", "examples"))


@given(VALUES)
def test_compact_json_is_the_same_value(value):
    assert json.loads(compact(value)) == value


def test_a_table_has_the_keys_once():
    assert table([{"a": 1, "b": "x y"}, {"a": [True], "b": "t\tn\n"}]) == 'a\tb\n1\tx y\n[true]\t"t\\tn\\n"'
    for wrong in ([], [1], [{"a": 1}, {"b": 1}]):
        with pytest.raises(ValueError, match="same keys"):
            table(wrong)


@st.composite
def schemas(draw, depth=2):
    kind = draw(st.sampled_from(("object", "array", "string", "enum") if depth else ("string", "enum")))
    more = {name: "x" for name in draw(st.sets(st.sampled_from(("title", "$comment"))))} | {"description": "d"}
    if kind == "object":
        inner = {name: draw(schemas(depth - 1)) for name in draw(st.sets(NAMES))}
        needs = {name: sorted(inner)[:1] for name in draw(st.sets(NAMES))}
        return {
            "type": "object",
            "properties": inner,
            "required": sorted(inner)[:1],
            "dependentRequired": needs,
            **more,
        }
    if kind == "array":
        return {"type": "array", "items": draw(schemas(depth - 1)), **more}
    return {"type": "string", **more} if kind == "string" else {"enum": ["x", {"title": "y"}], **more}


@given(
    schemas(),
    st.recursive(st.sampled_from(("x", {"title": "y"}, {})), lambda v: st.dictionaries(NAMES, v) | st.lists(v)),
)
def test_a_plain_schema_allows_the_same_values(schema, value):
    plain = plain_schema(schema)
    assert jsonschema.Draft202012Validator(plain).is_valid(value) == jsonschema.Draft202012Validator(schema).is_valid(
        value
    )
    assert plain_schema(plain) == plain and plain["description"] == "d"


def test_names_of_properties_that_need_others_stay():
    schema = {"dependentRequired": {"title": ["a"]}}
    assert plain_schema(schema) == schema


def test_tools_lose_titles_and_keep_what_is_named_so():
    parameters = {"title": "T", "type": "object", "properties": {"title": {"title": "Title", "type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}}
    [found] = json.loads(plain_tools(json.dumps([tool])))
    assert found["function"]["parameters"] == {"type": "object", "properties": {"title": {"type": "string"}}}
    assert json.loads(plain_tools('[{"type":"function","function":{"name":"f"}}]'))[0]["function"] == {"name": "f"}
