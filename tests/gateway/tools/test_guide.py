"""A guide has one tag for each tool that may be called, in the family's form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from contract.errors import InvalidArgument
from contract.generation import Guide
from gateway.api.guides import PLACE_IN_TAG
from gateway.tools.chat_format import HERMES, LLAMA3, MISTRAL, NONE, OPEN, TAGGED, ChatFormat
from gateway.tools.guide import answer_guide, tool_at, tool_guide
from python_backends.grammar.translation import translate

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]


def found(choice: str = "auto", parallel: bool = True, form: ChatFormat | None = None, **more: Any) -> dict[str, Any]:
    guide = tool_guide(TOOLS, choice, parallel, form or ChatFormat(HERMES), **more)
    assert guide.kind == "structural_tag"
    tag = json.loads(guide.text)
    assert tag["type"] == "structural_tag"
    return tag["format"]


def begins(tags: list[dict[str, Any]]) -> list[str]:
    return [tag["begin"] for tag in tags]


def test_text_may_go_on_until_a_call_begins() -> None:
    auto = found()
    assert (auto["type"], auto["triggers"], auto["stop_after_first"]) == ("triggered_tags", ["<tool_call>"], False)
    tag = auto["tags"][0]
    assert tag["begin"] == '<tool_call>\n{"name": "f", "arguments": ' and tag["end"] == "}\n</tool_call>"
    assert tag["content"] == {"type": "json_schema", "json_schema": SCHEMA}
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    assert auto["tags"][1]["content"]["json_schema"] == nothing
    assert found(parallel=False)["stop_after_first"] is True


def test_a_required_call_begins_the_output_and_a_named_one_is_the_only_one() -> None:
    required = found("required")
    assert (required["type"], required["separator"], required["at_least_one"]) == ("tags_with_separator", "\n", True)
    assert len(required["tags"]) == 2
    assert [one["type"] for one in found("required", False)["elements"]] == ["tag", "tag"]
    assert found("g", False)["begin"] == '<tool_call>\n{"name": "g", "arguments": '
    assert found("f")["begin"] == '<tool_call>\n{"name": "f", "arguments": '  # once


def test_llama_writes_bare_objects_and_mistral_a_list() -> None:
    auto = found(form=ChatFormat(LLAMA3, special=True))
    assert auto["triggers"] == ['{"name": "', "<|python_tag|>"]
    assert begins(auto["tags"])[::2] == [
        '{"name": "f", "parameters": ',
        '<|python_tag|>{"name": "f", "parameters": ',
    ]
    assert found("required", form=ChatFormat(LLAMA3))["separator"] == "; "
    listed = found("required", form=ChatFormat(MISTRAL, special=True))
    assert (listed["begin"], listed["end"], listed["content"]["separator"]) == ("[TOOL_CALLS][", "]", ", ")
    assert found(form=ChatFormat(MISTRAL))["tags"][0]["begin"] == "[TOOL_CALLS]["


def test_reasoning_may_come_before_a_call_that_is_required() -> None:
    tagged = found("f", False, ChatFormat(HERMES, TAGGED))
    reasoned, call = tagged["elements"]
    assert begins(reasoned["elements"][:1]) == ["<think>"] and reasoned["elements"][2] == call
    opened = found("f", False, ChatFormat(HERMES, OPEN))
    assert (opened["type"], opened["elements"][0]["begin"]) == ("sequence", "")


def test_an_answer_may_have_a_form_of_its_own_beside_the_calls() -> None:
    both = found(answer=Guide("json_schema", json.dumps(SCHEMA)))
    assert [one["type"] for one in both["elements"]] == ["tag", "tag", "json_schema"]
    assert found("required", answer=Guide("json"))["type"] == "tags_with_separator"


@pytest.mark.parametrize(
    ("guide", "content"),
    [
        (Guide("json"), {"type": "json_schema", "json_schema": {"type": "object"}}),
        (Guide("json_schema", '{"const": 1}'), {"type": "json_schema", "json_schema": {"const": 1}}),
        (Guide("regex", "[a-z]"), {"type": "regex", "pattern": "[a-z]"}),
        (Guide("ebnf_grammar", 'root ::= "a"'), {"type": "grammar", "grammar": 'root ::= "a"'}),
        (Guide("choice", '["a"]'), {"type": "const_string", "value": "a"}),
        (Guide("structural_tag", '{"type": "structural_tag", "format": {"type": "any_text"}}'), {"type": "any_text"}),
    ],
)
def test_every_guide_can_follow_a_reasoning_section(guide: Guide, content: dict[str, Any]) -> None:
    assert answer_guide(guide, ChatFormat(HERMES, NONE)) is guide
    after = json.loads(answer_guide(guide, ChatFormat(HERMES, OPEN)).text)
    assert after["format"]["elements"][-1] == content


@pytest.mark.parametrize("text", ["no json", "[]", "{}", '{"format": 3}'])
def test_a_structural_tag_after_a_reasoning_section_has_a_format(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"structured_outputs.structural_tag: must be \{"):
        answer_guide(Guide("structural_tag", text), ChatFormat(HERMES, OPEN))


def test_what_cannot_be_a_tools_schema_is_named() -> None:
    listed = [TOOLS[0], {"type": "function", "function": {"name": "h", "parameters": {"type": "array"}}}]
    with pytest.raises(InvalidArgument, match=r"tools.1.function.parameters: must be a schema of type object"):
        tool_guide(listed, "auto", True, ChatFormat())
    large = [{"type": "function", "function": {"name": "h", "parameters": {"description": "x" * 140_000}}}]
    with pytest.raises(InvalidArgument, match=r"tools: must have at most \d+ bytes as a grammar"):
        tool_guide(large, "auto", True, ChatFormat())


@pytest.mark.parametrize("tools", [HERMES, LLAMA3, MISTRAL])
@pytest.mark.parametrize("reasoning", [NONE, TAGGED, OPEN])
def test_the_engine_understands_every_guide(tools: str, reasoning: str) -> None:
    form = ChatFormat(tools, reasoning, special=tools == MISTRAL)
    for choice in ("auto", "required", "g"):
        for answer in (None, Guide("json_schema", json.dumps(SCHEMA)), Guide("choice", '["a", "b"]')):
            translate(tool_guide(TOOLS, choice, True, form, answer), ("[TOOL_CALLS]",))


def test_a_keyword_that_no_grammar_can_express_is_refused_with_its_place() -> None:
    parameters = {"properties": {"x": {"type": "array", "uniqueItems": True}}}
    listed = [{"type": "function", "function": {"name": "h", "parameters": parameters}}]
    with pytest.raises(InvalidArgument, match=r"#/properties/x/uniqueItems is supported .*#/format/tags/0/content"):
        translate(tool_guide(listed, "auto", True, ChatFormat()))


@pytest.mark.parametrize("tools", [HERMES, LLAMA3, MISTRAL])
@pytest.mark.parametrize("reasoning", [NONE, TAGGED, OPEN])
@pytest.mark.parametrize("bad", ["f", "g", ""])
def test_the_place_in_a_refused_guide_tells_whose_schema_it_is(tools: str, reasoning: str, bad: str) -> None:
    """The tool's, or the answer's."""
    cannot = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    listed = [
        {"type": "function", "function": {"name": name, "parameters": cannot if name == bad else SCHEMA}}
        for name in ("f", "g")
    ]
    answer = Guide("json_schema", json.dumps(SCHEMA if bad else cannot))
    form = ChatFormat(tools, reasoning, special=tools == MISTRAL)
    for choice, parallel in (("auto", True), ("required", True), ("required", False), ("g", True)):
        guide = tool_guide(listed, choice, parallel, form, answer if choice == "auto" else None)
        if bad not in ({"auto": ("f", "g", ""), "required": ("f", "g")}.get(choice, ("g",))):
            continue
        with pytest.raises(InvalidArgument) as caught:
            translate(guide, ("[TOOL_CALLS]",))
        place = PLACE_IN_TAG.search(caught.value.problem)
        assert place is not None and tool_at(guide, place[1]) == bad
