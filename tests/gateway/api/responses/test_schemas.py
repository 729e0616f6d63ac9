"""A body becomes the chat that it asks for, and errors name its own fields."""

from __future__ import annotations

import json
from typing import Any

import pytest

from contract.errors import InvalidArgument, PromptTooLong
from gateway.api.responses.items import plain_items
from gateway.api.responses.schemas import ResponsesChat, parse, renamed
from gateway.config.settings import Settings
from gateway.tools.chat_format import HERMES, TAGGED, ChatFormat
from tests.gateway.api.responses.contract import check_response

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
_PART = {"role": "user", "content": [{"type": "reasoning_text", "text": "x"}]}
FORMAT = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}


def chat(**fields: Any) -> ResponsesChat:
    body = parse(json.dumps({"model": "demo", "input": "hi", **fields}).encode())
    items = plain_items(body.input, "z")
    return body.chat(items, len(items))


def test_the_instructions_come_first() -> None:
    [first, second] = chat(instructions="be").messages
    assert (first.role, first.content, second.role) == ("system", "be", "user")


def test_a_chat_has_the_same_fields_by_their_own_names() -> None:
    found = chat(
        max_output_tokens=7,
        temperature=0,
        top_p=0.5,
        stream=True,
        tools=[TOOL],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
    )
    assert (found.max_completion_tokens, found.temperature, found.top_p, found.stream) == (7, 0, 0.5, True)
    assert found.tools[0].function.name == "f" and found.tool_choice.function.name == "f"
    [request] = found.generations(Settings(), 1.0)
    assert request.max_tokens == 7 and request.tools and request.parallel_tool_calls is False


def test_a_format_is_the_chats() -> None:
    [request] = chat(text={"format": FORMAT}).generations(Settings(), 1.0)
    assert request.guide is not None and json.loads(request.guide.text) == SCHEMA
    [request] = chat(text={"format": {"type": "json_object"}}).generations(Settings(), 1.0)
    assert request.guide is not None and request.guide.kind == "json"
    assert chat(text={"format": {"type": "text"}}).generations(Settings(), 1.0)[0].guide is None


def test_a_format_of_too_many_levels_is_refused() -> None:
    deep = json.loads('{"a":' * 201 + "1" + "}" * 201)
    with pytest.raises(InvalidArgument, match="must have at most 200 levels") as caught:
        chat(text={"format": FORMAT | {"schema": deep}}).generations(Settings(), 1.0)
    assert renamed(caught.value).field == "text.format.schema"
    for fields, name in (
        ({"tools": [TOOL | {"parameters": deep}]}, "tools.0.parameters"),
        ({"chat_template_kwargs": deep}, "chat_template_kwargs"),
    ):
        with pytest.raises(InvalidArgument, match=f"^{name}: must have at most 200 levels"):
            chat(**fields)


def test_no_effort_switches_reasoning_off() -> None:
    assert chat(reasoning={"effort": "none"}).chat_template_kwargs == {"enable_thinking": False}
    assert not chat(reasoning={"effort": "medium"}).chat_template_kwargs


def test_log_probs_need_an_output_that_is_not_separated() -> None:
    found = chat(include=["message.output_text.logprobs"], top_logprobs=2)
    assert found.logprobs and found.top_logprobs == 2
    requests = found.generations(Settings(), 1.0)
    found.held(requests, ChatFormat(HERMES), Settings())
    with pytest.raises(InvalidArgument, match="include: must be left out where"):
        found.held(requests, ChatFormat(HERMES, TAGGED), Settings())


def test_a_response_repeats_its_request() -> None:
    asked = {"tools": [TOOL], "text": {"format": FORMAT}, "metadata": {"a": "b"}, "user": "u", "store": None}
    returned = chat(**asked).original.returned()
    assert returned["store"] is True and returned["truncation"] == "disabled" and returned["temperature"] == 1.0
    assert returned["tools"] == [{**TOOL, "description": None}] and returned["text"]["format"] == FORMAT
    head = {"id": "r", "object": "response", "created_at": 1, "model": "m", "output": [], "status": "completed"}
    check_response({**returned, **head})


@pytest.mark.parametrize(
    ("fields", "field", "problem"),
    [
        ({"background": True}, "background", "input should be False"),
        ({"conversation": "c"}, "conversation", "use previous_response_id"),
        ({"max_tool_calls": 1}, "max_tool_calls", "is not supported; leave it out"),
        ({"seed": 1}, "seed", "is not supported; leave it out"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "must be of type function, got 'web_search'"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "must be of type function, got 'file_search'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name", "is missing"),
        ({"include": ["reasoning.encrypted_content"]}, "include.0", "'message.output_text.logprobs'"),
        ({"top_logprobs": 2}, "top_logprobs", "must be left out without"),
        ({"truncation": "auto"}, "truncation", "input should be 'disabled'"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "'none' or 'medium'"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "input should be None"),
        ({"stream_options": {}}, "stream_options", "must be left out without stream=true"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage", "not supported"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "is missing"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "is missing"),
        ({"text": {"format": {"type": "text", "name": "n"}}}, "text.format", "must be left out without"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a", "at most 512 characters"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"input": []}, "input", "is missing"),
        ({"input": [7]}, "input.0", "should be an object"),
        (
            {"input": [{"type": "image"}]},
            "input.0.type",
            "should be 'message', 'function_call', 'function_call_output'",
        ),
        ({"input": [{"role": "user", "content": "x", "output": "y"}]}, "input.0.output", "of an item of type message"),
        ({"input": [{"type": "reasoning", "content": "x"}]}, "input.0.content", "must be a list of parts"),
        ({"input": [{"role": "user"}]}, "input.0.content", "is missing"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type", "'input_text'"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input.0.encrypted_content", "not supported"),
        ({"input": [_PART]}, "input.0.content.0.type", "must be input_text or output_text"),
        ({"input": [{"role": "assistant", "content": ""}]}, "input", "at least 1 item"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        chat(**fields).generations(Settings(), 1.0)
    error = renamed(caught.value)
    assert (error.field, problem in error.problem) == (field, True), error


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("messages", "input"),
        ("messages.1.content", "input"),
        ("max_tokens", "max_output_tokens"),
        ("logprobs", "include"),
        ("tools.3.function.parameters", "tools.3.parameters"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("response_format.json_schema.schema.properties.a", "text.format.schema.properties.a"),
        ("model", "model"),
    ],
)
def test_errors_about_the_chat_name_the_responses_field(name: str, own: str) -> None:
    error = PromptTooLong(name, "is wrong")
    error.internal = True
    found = renamed(error)
    assert (found.field, found.problem, found.internal, type(found)) == (own, "is wrong", True, PromptTooLong)
    assert str(found) == f"{own}: is wrong"
