"""The fields of a body that become a guide, and an engine's errors in their words."""

import json

import pytest

from contract.errors import InvalidArgument
from contract.generation import Guide
from gateway.api.guides import GuidedBody

SCHEMA = {"type": "object"}
DEEP = '{"a":' * 201 + "1" + "}" * 201
NAMED = {"name": "x", "schema": SCHEMA, "strict": True, "description": "y"}


@pytest.mark.parametrize(
    ("fields", "guide"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Guide("json")),
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, Guide("json_schema", '{"type":"object"}')),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, Guide("json_schema", "{}")),
        ({"guided_json": SCHEMA}, Guide("json_schema", '{"type":"object"}')),
        ({"guided_json": json.dumps(SCHEMA)}, Guide("json_schema", '{"type": "object"}')),
        ({"guided_regex": "a+"}, Guide("regex", "a+")),
        ({"guided_choice": ["a", "é"]}, Guide("choice", '["a","é"]')),
        ({"guided_grammar": 'root ::= "a"'}, Guide("ebnf_grammar", 'root ::= "a"')),
        ({"structured_outputs": {"json": SCHEMA}}, Guide("json_schema", '{"type":"object"}')),
        ({"structured_outputs": {"json_object": True}}, Guide("json")),
        ({"structured_outputs": {"regex": "a"}}, Guide("regex", "a")),
        ({"structured_outputs": {"choice": ["a"]}}, Guide("choice", '["a"]')),
        ({"structured_outputs": {"structural_tag": "{}"}}, Guide("structural_tag", "{}")),
    ],
)
def test_each_field_becomes_a_guide(fields, guide):
    assert GuidedBody.model_validate(fields).guide() == guide


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "json_schema": NAMED}}, "response_format.json_schema"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs.grammar"),
        ({"guided_regex": "a" * 200_000}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_json": json.loads(DEEP)}, "guided_json"),
        ({"guided_json": DEEP}, "guided_json"),
        ({"guided_json": "{'type': 'object'}"}, "guided_json"),
        ({"structured_outputs": {"structural_tag": "<tag>"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"structural_tag": DEEP}}, "structured_outputs.structural_tag"),
    ],
)
def test_what_contradicts_is_refused_by_field(fields, field):
    with pytest.raises(InvalidArgument) as caught:
        GuidedBody.model_validate(fields).guide()
    assert caught.value.field == field


def test_an_engines_error_names_the_field_of_the_body_and_the_place():
    problem = "must be a schema that can be followed exactly: #/properties/a/nope is not supported"
    error = InvalidArgument("guided_decoding_guide", problem)
    body = GuidedBody.model_validate({"response_format": {"type": "json_schema", "json_schema": NAMED}})
    assert body.guide_error(error).field == "response_format.json_schema.schema.properties.a.nope"
    assert (
        GuidedBody.model_validate({"guided_json": SCHEMA}).guide_error(error).field == "guided_json.properties.a.nope"
    )
    plain = InvalidArgument("guided_decoding_guide", "must be a grammar that compiles")
    assert GuidedBody.model_validate({"guided_regex": "a"}).guide_error(plain).field == "guided_regex"


def test_the_place_in_a_structural_tag_is_the_callers_only_if_the_tag_is():
    error = InvalidArgument("guided_decoding_guide", "must be a regular expression; it ends (in #/format/content)")
    tag = GuidedBody.model_validate({"structured_outputs": {"structural_tag": "{}"}}).guide_error(error)
    assert tag.field == "structured_outputs.structural_tag.format.content" and tag.problem == error.problem
    regex = GuidedBody.model_validate({"guided_regex": "("}).guide_error(error)
    assert (regex.field, regex.problem) == ("guided_regex", "must be a regular expression; it ends")
