"""Bodies become one request for each choice, and what is wrong is named by its field."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import InvalidArgument
from contract.generation import GenerationRequest, Guide
from gateway.api import schemas
from gateway.api.schemas import CalledFunction, ChatRequest, CompletionRequest, Function, Tool, ToolCall, plain_tools
from gateway.config.settings import Settings
from gateway.tools.chat_format import HERMES, TAGGED, ChatFormat
from gateway.tools.cutter import CutterRules

SETTINGS = Settings()
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
FORMAT = {"type": "json_object"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chat(**more: Any) -> ChatRequest:
    return schemas.parse(ChatRequest, json.dumps({"model": "demo", "messages": MESSAGES, **more}).encode(), SETTINGS)


def held(body: ChatRequest, form: ChatFormat | None = None) -> tuple[GenerationRequest, CutterRules | None]:
    [request], rules = body.held(body.generations(SETTINGS, 5.0), form or ChatFormat(), SETTINGS)
    return request, rules


def completion(**more: Any) -> CompletionRequest:
    body = {"model": "demo", "prompt": "hi", **more}
    return schemas.parse(CompletionRequest, json.dumps(body).encode(), SETTINGS)


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def test_tools_and_template_variables_of_too_many_levels_are_refused_by_field() -> None:
    def tools(levels: int) -> list[dict[str, Any]]:
        return [TOOL, {"type": "function", "function": {"name": "g", "parameters": nested(levels)}}]

    for form in (ChatFormat(HERMES), ChatFormat(HERMES, reasoning=TAGGED)):
        request, _ = held(chat(tools=tools(200), chat_template_kwargs=nested(200), response_format=FORMAT), form)
        assert request.tools is not None and request.guide is not None
    for fields, name in (
        ({"tools": tools(201)}, "tools.1.function.parameters"),
        ({"chat_template_kwargs": nested(201)}, "chat_template_kwargs"),
        ({"prompt": {"id": "p", "variables": nested(201)}}, "prompt.variables"),
    ):
        with pytest.raises(InvalidArgument, match=f"^{name}: must have at most 200 levels"):
            chat(**fields)


def test_each_choice_of_each_prompt_is_a_request_and_their_seeds_differ() -> None:
    requests = completion(prompt=["a", "b"], n=2, seed=2**64 - 1).generations(SETTINGS, 5.0)
    assert [(request.text_input, request.sampling.seed) for request in requests] == [
        ("a", 2**64 - 1),
        ("a", 0),
        ("b", 2**64 - 1),
        ("b", 0),
    ]
    assert {request.timeout_s for request in requests} == {5.0}


def test_prompts_of_token_ids_are_one_or_several_and_their_choices_share_one() -> None:
    [request] = completion(prompt=[1, 2.0, 3], truncate_prompt_tokens=-1).generations(SETTINGS, 5.0)
    assert (request.text_input, request.input_ids, request.truncate_prompt_tokens) == (None, (1, 2, 3), -1)
    several = completion(prompt=[[1, 2], [3]], n=2).generations(SETTINGS, 5.0)
    assert [request.input_ids for request in several] == [(1, 2), (1, 2), (3,), (3,)]
    assert several[0].input_ids is several[1].input_ids  # counted once


@pytest.mark.parametrize("prompt", [[], [[]], [[1], []], [1, -1], [2**31], ["a", 1], [1, [2]], [True], [1.5], [""], ""])
def test_a_prompt_that_is_none_is_named(prompt: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        completion(prompt=prompt).generations(SETTINGS, 5.0)
    assert refused.value.field.split(".")[0] == "prompt"


def test_an_echo_may_have_log_probabilities_and_no_output() -> None:
    [request] = completion(echo=True, logprobs=0, max_tokens=0).generations(SETTINGS, 5.0)
    assert (request.max_tokens, request.echo) == (0, True)
    assert (request.sampling.log_probs, request.sampling.prompt_log_probs) == (True, True)
    assert not completion(echo=True).generations(SETTINGS, 5.0)[0].sampling.prompt_log_probs
    assert not completion(logprobs=1).generations(SETTINGS, 5.0)[0].sampling.prompt_log_probs
    with pytest.raises(InvalidArgument, match="max_tokens: must be an integer from 1 to"):
        completion(max_tokens=0).generations(SETTINGS, 5.0)
    with pytest.raises(InvalidArgument, match="max_tokens"):
        chat(max_tokens=0)


def test_bad_words_go_to_the_engine_and_a_bias_goes_nowhere() -> None:
    assert completion(bad_words=["x", "y"]).generations(SETTINGS, 5.0)[0].bad_words == ("x", "y")
    with pytest.raises(InvalidArgument, match="logit_bias: must be empty or left out: no engine here can bias"):
        completion(logit_bias={"5": 1}).generations(SETTINGS, 5.0)


def test_a_continued_stream_is_one_choice() -> None:
    for made in (completion(continue_ids=[4, 5]), chat(continue_ids=[4, 5])):
        assert made.generations(SETTINGS, 5.0)[0].continue_ids == (4, 5)
    for wrong in (completion(continue_ids=[4], n=2), completion(continue_ids=[4], prompt=["a", "b"])):
        with pytest.raises(InvalidArgument, match="continue_ids: must be left out with several prompts or n above 1"):
            wrong.generations(SETTINGS, 5.0)


def test_a_chat_takes_the_default_limit_and_either_name_of_its_own() -> None:
    assert chat().generations(SETTINGS, 5.0)[0].max_tokens == SETTINGS.default_max_tokens
    for name in ("max_tokens", "max_completion_tokens"):
        assert chat(**{name: 3}).generations(SETTINGS, 5.0)[0].max_tokens == 3


def test_what_is_not_supported_is_accepted_as_what_changes_nothing() -> None:
    """Clients in some languages send every field that they know."""
    nothing = dict.fromkeys(("audio", "prediction", "web_search_options", "functions"))
    assert chat(**nothing, verbosity="medium").generations(SETTINGS, 5.0) == chat().generations(SETTINGS, 5.0)
    for name, value in (("prediction", {"type": "content"}), ("verbosity", "low"), ("web_search_options", {})):
        with pytest.raises(InvalidArgument, match=f"^{name}: "):
            chat(**{name: value})


def test_parts_of_text_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    [request] = chat(messages=[{"role": "developer", "content": parts}]).generations(SETTINGS, 5.0)
    assert request.messages == ({"role": "system", "content": "ab"},)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"n": 0}, "n"),
        ({"n": SETTINGS.max_choices + 1}, "n"),
        ({"temperature": 3}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role"),
        ({"tools": [{}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"stop": [""]}, "stop.0"),
    ],
)
def test_what_is_malformed_is_named(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        chat(**body)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": [TOOL, TOOL]}, "tools.1.function.name"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "tool", "tool_call_id": "x", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "messages"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"stream_options": {}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
        ({"store": True}, "store"),
    ],
)
def test_what_cannot_be_done_is_named(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        chat(**body).generations(SETTINGS, 5.0)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"stream_options": 1}, "stream_options: input should be an object"),
        ({"metadata": []}, "metadata: input should be an object"),
        ({"messages": ["hi"]}, "messages.0: input should be an object"),
        ({"metadata": {str(n): "x" for n in range(10_001)}}, "metadata: must have at most 10000 entries, got 10001"),
        ({"tool_choice": 1}, "tool_choice: input should be 'none', 'auto' or 'required' or input should be an object"),
    ],
)
def test_an_object_is_called_as_json_calls_it(body: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        chat(**body)
    assert str(caught.value) == problem


@pytest.mark.parametrize("name", ["regex", "grammar"])
def test_an_empty_guide_is_called_empty(name: str) -> None:
    bodies: list[dict[str, Any]] = [{"structured_outputs": {name: ""}}, {f"guided_{name}": ""}]
    for body in bodies:
        with pytest.raises(InvalidArgument, match=f"{name}: must have at least one character"):
            completion(**body).guide()


@given(st.binary(max_size=200) | st.recursive(st.none() | st.text(), st.lists).map(lambda x: json.dumps(x).encode()))
def test_no_body_raises_anything_but_invalid_argument(data: bytes) -> None:
    for kind in (ChatRequest, CompletionRequest):
        with pytest.raises(InvalidArgument):
            schemas.parse(kind, data, SETTINGS)


def test_a_body_in_another_encoding_is_named() -> None:
    with pytest.raises(InvalidArgument, match="JSON in UTF-8: 'utf-8' codec"):
        schemas.fields_of('{"a": "é"}'.encode("latin-1"))


def test_a_strange_name_is_shortened() -> None:
    with pytest.raises(InvalidArgument) as caught:
        chat(**{"x\n" * 1000: 1})
    assert len(caught.value.field) <= schemas.MAX_NAME_SHOWN + 1 and caught.value.field.isprintable()


def test_a_participant_may_have_a_name_which_templates_may_show() -> None:
    for role in ("user", "system", "assistant"):
        [request] = chat(messages=[{"role": role, "content": "x", "name": "Ada"}]).generations(SETTINGS, 5.0)
        assert request.messages == ({"role": role, "content": "x", "name": "Ada"},)


THINKS = {"chat_template_kwargs": {"enable_thinking": True}}  # goes before what is short for it


@pytest.mark.parametrize(
    ("body", "variables", "form"),
    [
        ({"reasoning_effort": "none"}, '{"enable_thinking":false}', "tagged"),
        ({"reasoning_effort": "medium"}, None, "open"),
        ({"reasoning_effort": None}, None, "open"),
        (THINKS | {"reasoning_effort": "none"}, '{"enable_thinking":true}', "open"),
    ],
)
def test_no_effort_switches_reasoning_off(body: dict[str, Any], variables: str | None, form: str) -> None:
    request = chat(**body)
    held = request.generations(SETTINGS, 5.0)
    assert held[0].chat_template_kwargs == variables
    _, rules = request.held(held, ChatFormat(reasoning="open"), SETTINGS)
    assert rules is not None and rules.format.reasoning == form


def test_tools_go_to_the_chat_template_unless_they_must_not_be_used() -> None:
    [request] = chat(tools=[TOOL], chat_template_kwargs={"enable_thinking": False}).generations(SETTINGS, 5.0)
    shown = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert json.loads(request.tools or "") == [shown]
    assert request.chat_template_kwargs == '{"enable_thinking":false}'
    request, rules = held(chat(tools=[TOOL], tool_choice="none"))
    assert request.tools is None and request.guide is None and rules is None
    _, rules = held(chat(tools=[TOOL], parallel_tool_calls=False))
    assert rules is not None and rules.names == {"f"} and not rules.parallel and not rules.reasoning


def test_calls_and_their_results_are_part_of_the_chat() -> None:
    asked = {"role": "assistant", "content": None, "tool_calls": [{**CALL, "index": 0}], "reasoning_content": "why"}
    told = {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "7"}], "name": "f"}
    [request] = chat(messages=[*MESSAGES, asked, told]).generations(SETTINGS, 5.0)
    assert request.messages is not None and list(request.messages[1:]) == [
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "why"},
        {"role": "tool", "content": "7", "tool_call_id": "a", "name": "f"},
    ]


def test_an_answer_that_was_cut_inside_its_reasoning_can_be_sent_back() -> None:
    cut = {"role": "assistant", "content": None, "reasoning_content": "hm", "refusal": None}
    [request] = chat(messages=[*MESSAGES, cut, *MESSAGES]).generations(SETTINGS, 5.0)
    assert request.messages is not None
    assert request.messages[1] == {"role": "assistant", "content": "", "reasoning_content": "hm"}
    for role, message in (("assistant", {"reasoning_content": ""}), ("user", {"reasoning_content": "hm"})):
        with pytest.raises(InvalidArgument, match=r"^messages\.0"):
            chat(messages=[{"role": role, "content": None, **message}]).generations(SETTINGS, 5.0)


def test_a_model_whose_form_of_calls_is_unknown_has_no_tools() -> None:
    with pytest.raises(InvalidArgument, match="tools: are not supported"):
        held(chat(tools=[TOOL]), ChatFormat("none"))
    _, rules = held(chat(), ChatFormat("none", "open"))
    assert rules is not None and rules.reasoning and not rules.names
    _, rules = held(chat(continue_ids=[5, 6]), ChatFormat("none", "open"))
    assert rules is not None and rules.begun == (5, 6)


def test_a_marker_that_is_special_comes_as_text_unless_the_caller_wants_all_of_them() -> None:
    special = ChatFormat("mistral", special=True)
    request, rules = held(chat(tools=[TOOL]), special)
    assert not request.skip_special_tokens and rules is not None and rules.drops_special and not rules.guided
    request, rules = held(chat(tools=[TOOL], skip_special_tokens=False), special)
    assert not request.skip_special_tokens and rules is not None and not rules.drops_special
    assert held(chat(), special)[0].skip_special_tokens


def test_a_choice_of_tools_is_one_that_there_is() -> None:
    named = {"type": "function", "function": {"name": "f"}}
    request, rules = held(chat(tools=[TOOL], tool_choice=named))
    assert request.tool_choice == named and request.guide is not None and request.guide.kind == "structural_tag"
    assert rules is not None and rules.guided
    with pytest.raises(InvalidArgument, match="tool_choice.function.name: must be one of the tools, got g"):
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}).generations(SETTINGS, 5.0)
    with pytest.raises(InvalidArgument, match="tool_choice: must be none or auto without tools"):
        chat(tool_choice="required").generations(SETTINGS, 5.0)


def test_a_template_that_does_not_think_begins_no_reasoning() -> None:
    for variables, expected in (({"enable_thinking": False}, "tagged"), ({"enable_thinking": True}, "open")):
        _, rules = held(chat(chat_template_kwargs=variables), ChatFormat("hermes", "open"))
        assert rules is not None and rules.format.reasoning == expected


def test_a_guide_of_the_answer_holds_after_the_reasoning_and_beside_the_calls() -> None:
    guide, settings = Guide("regex", "[a-z]"), SETTINGS
    for body, form, kind in (
        (chat(), ChatFormat(), "regex"),
        (chat(), ChatFormat("hermes", "tagged"), "structural_tag"),
        (chat(tools=[TOOL]), ChatFormat(), "structural_tag"),
    ):
        requests = [dataclasses.replace(one, guide=guide) for one in body.generations(settings, 5.0)]
        [request], _ = body.held(requests, form, settings)
        assert request.guide is not None and request.guide.kind == kind and "[a-z]" in request.guide.text
    requests = [dataclasses.replace(one, guide=guide) for one in chat(tools=[TOOL]).generations(settings, 5.0)]
    with pytest.raises(InvalidArgument, match="tools: must be left out: the engines are not held"):
        chat(tools=[TOOL]).held(requests, ChatFormat(), Settings(tool_guides=False))


def test_an_output_with_tools_cannot_be_continued_and_may_have_a_format_beside_calls() -> None:
    with pytest.raises(InvalidArgument, match="continue_ids: must be left out with tools"):
        held(chat(tools=[TOOL], continue_ids=[1]))
    request, _ = held(chat(tools=[TOOL], response_format={"type": "json_object"}))
    assert request.guide is not None
    assert [one["type"] for one in json.loads(request.guide.text)["format"]["elements"]] == ["tag", "json_schema"]


def tool(name: str, **more: object) -> Tool:
    return Tool(type="function", function=Function(name=name, **more))


def test_what_the_caller_left_out_is_left_out() -> None:
    parameters = {"type": "object", "properties": {"x": {"default": None}}}
    assert plain_tools([tool("f"), tool("g", strict=True, description="d", parameters=parameters)]) == [
        {"type": "function", "function": {"name": "f"}},
        {"type": "function", "function": {"name": "g", "description": "d", "parameters": parameters}},
    ]


def test_names_differ() -> None:
    with pytest.raises(InvalidArgument, match=r"tools.1.function.name: must differ from the others, got f twice"):
        plain_tools([tool("f"), tool("f")])


@pytest.mark.parametrize("arguments", ["", "[1]", "{", "1"])
def test_arguments_of_a_call_are_an_object(arguments: str) -> None:
    call = ToolCall(id="a", function=CalledFunction(name="f", arguments=arguments))
    with pytest.raises(InvalidArgument, match=r"m.tool_calls.0.function.arguments: must be a JSON object"):
        call.plain("m.tool_calls.0")
