"""Items become messages, and a wrong one is named by its place in the input."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from contract.errors import InvalidArgument
from gateway.api.responses.items import Items, messages_of, plain_items
from tests.gateway.api.responses.contract import check_list

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'}
ANSWER = {"type": "function_call_output", "call_id": "c", "output": "5"}
THOUGHT: dict[str, Any] = {"type": "reasoning", "id": "rs_1", "summary": []}
THOUGHT["content"] = [{"type": "reasoning_text", "text": "why"}]
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def plain(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return plain_items(TypeAdapter(Items).validate_python(list(items)), "z")


def messages(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return messages_of(plain(*items), len(items))


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def test_a_text_is_a_message_of_the_user() -> None:
    items = plain_items("hi", "z")
    content = [{"type": "input_text", "text": "hi"}]
    assert items == [{"id": "msg_zi0000", "status": "completed", "type": "message", "role": "user", "content": content}]
    assert messages_of(items, 1) == [said("user", "hi")]


def test_stored_items_are_those_that_openai_lists() -> None:
    given = ({"role": "assistant", "content": "a"}, said("developer", "b"), CALL, {**ANSWER, "id": "mine"}, THOUGHT)
    items = plain(*given)
    assert [item["id"] for item in items] == ["msg_zi0000", "msg_zi0001", "fc_zi0002", "mine", "rs_1"]
    check_list({"object": "list", "data": items, "first_id": "a", "last_id": "b", "has_more": False})


def test_what_the_assistant_wrote_in_one_turn_is_one_message() -> None:
    text = {"role": "assistant", "content": [{"type": "output_text", "text": "Wait.", "annotations": []}]}
    found = messages(said("user", "q"), THOUGHT, text, CALL, ANSWER, said("user", "r"))
    assert found == [
        said("user", "q"),
        {**said("assistant", "Wait."), "reasoning_content": "why", "tool_calls": [CALLED]},
        {"role": "tool", "content": "5", "tool_call_id": "c"},
        said("user", "r"),
    ]
    after = messages(CALL, said("assistant", "Then."), {**ANSWER, "output": [{"type": "input_text", "text": "5"}]})
    assert after[0] == {**said("assistant", "Then."), "tool_calls": [CALLED]} and after[1]["content"] == "5"
    assert messages(said("assistant", "a"), said("assistant", "b")) == [said("assistant", "a"), said("assistant", "b")]


def test_nulls_and_what_an_empty_answer_left_are_left_out() -> None:
    empty = {"role": "assistant", "content": [{"type": "output_text", "text": "", "logprobs": None}], "phase": None}
    assert messages(said("user", "q"), empty, said("user", "r")) == [said("user", "q"), said("user", "r")]


@pytest.mark.parametrize(
    ("items", "field", "problem"),
    [
        ((ANSWER,), "input", "entry 0 must have as call_id the id of a call"),
        ((CALL, said("user", "x")), "input", "entry 1 must be the function_call_output that answers the call 'c'"),
        ((said("user", "x"), CALL), "input", "entry 2 is missing: a function_call_output"),
        ((CALL, CALL), "input", "entry 0 must have calls with different ids"),
        ((said("user", "x"), {**CALL, "arguments": "["}), "input.1.arguments", "must be a JSON object"),
    ],
)
def test_tool_turns_are_checked(items: Any, field: str, problem: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        messages(*items)
    assert caught.value.field == field and problem in caught.value.problem


def test_earlier_items_are_not_taken_for_entries_of_the_input() -> None:
    items = plain(said("user", "q"), CALL, said("user", "r"))
    with pytest.raises(InvalidArgument, match="input: entry 0 must be the function_call_output"):
        messages_of(items, 1)
    cut = plain(said("user", "q"), {**CALL, "arguments": '{"x'}, said("user", "r"))
    with pytest.raises(InvalidArgument, match="previous_response_id: must be a response with complete calls; c was"):
        messages_of(cut, 1)


def test_annotations_of_any_depth_are_left_out_of_what_is_stored() -> None:
    deep = json.loads("[" * 300 + "]" * 300)
    part = {"text": "5", "annotations": deep, "logprobs": deep}
    output, thought = plain(
        {**ANSWER, "output": [{"type": "input_text", **part}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", **part}]},
    )
    assert output["output"] == [{"type": "input_text", "text": "5"}]
    assert thought["summary"] == [{"type": "summary_text", "text": "5"}]
