import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import InvalidArgument
from python_backends.tokenizer.chat import parse_messages, parse_tools, parse_variables, with_tools


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ("Hello", "got no JSON"),
        ("", "got no JSON"),
        ("[" * 100_000, "got no JSON"),
        ("{}", "must be a JSON list"),
        ("[]", "must be a JSON list"),
        ('["Hello"]', 'entry 0 must have a "role"'),
        ('[{"content": "Hello"}]', 'entry 0 must have a "role"'),
        ('[{"role": 1, "content": "Hello"}]', 'entry 0 must have a "role"'),
        ('[{"role": "user", "content": "a"}, {"role": "user"}]', 'entry 1 must have text in "content"'),
        ('[{"role": "user", "content": ["a"]}]', 'entry 0 must have text in "content"'),
        ('[{"role": "user", "content": null}]', 'entry 0 must have text in "content"'),
    ],
)
def test_what_is_no_chat_is_refused_with_an_example_of_one(messages, problem):
    with pytest.raises(InvalidArgument, match=problem) as caught:
        parse_messages(messages)
    assert caught.value.field == "messages" and '[{"role": "user", "content": "Hello"}]' in str(caught.value)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_any_json_is_a_chat_or_is_refused_by_name(value):
    try:
        messages = parse_messages(json.dumps(value))
    except InvalidArgument as refusal:
        assert refusal.field == "messages"
    else:
        assert messages == value


def test_arguments_of_calls_are_objects_and_content_is_text():
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    answer = {"role": "tool", "tool_call_id": "a", "content": "1"}
    asked, _, done = parse_messages(
        json.dumps(
            [{"role": "assistant", "tool_calls": [call]}, answer, {"role": "user", "content": "", "tool_calls": []}]
        )
    )
    assert asked["content"] == "" and asked["tool_calls"][0]["function"]["arguments"] == {"x": [1]}
    assert "tool_calls" not in done


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (1, r"tool_calls such as"),
        ({"id": "a"}, r"tool_calls such as"),
        ({"function": {"name": "f", "arguments": "{}"}}, r"tool_calls such as"),
        ({"id": "a", "function": {"name": "f", "arguments": "[1]"}}, r"tool_calls\[0\] an id and as arguments"),
        ({"id": "a", "function": {"name": "f", "arguments": "{"}}, r"tool_calls\[0\] an id and as arguments"),
    ],
)
def test_calls_that_are_none_are_refused(call, problem):
    with pytest.raises(InvalidArgument, match=f"messages: entry 0 must have .*{problem}"):
        parse_messages(json.dumps([{"role": "assistant", "tool_calls": [call]}]))


@pytest.mark.parametrize(
    "tools",
    ["", "{}", "[]", '["f"]', '[{"type": "function"}]', '[{"type": "web", "function": {"name": "f"}}]']
    + ['[{"type": "function", "function": {"name": ""}}]', json.dumps([{}] * 129)]
    + [json.dumps([{"type": "function", "function": {"name": "f"}}] * 2)],
)
def test_tools_that_are_none_are_refused(tools):
    with pytest.raises(InvalidArgument, match="tools: .*must"):
        parse_tools(tools)


@pytest.mark.parametrize("variables", ["", "[]", "{", "1"])
def test_variables_are_an_object(variables):
    with pytest.raises(InvalidArgument, match="chat_template_kwargs: must be a JSON object"):
        parse_variables(variables)


# ---- templates that know no tools ------------------------------------------------------------------------------------


TOOL = {"type": "function", "function": {"name": "f"}}


def call(name):
    return {"id": name, "function": {"name": name, "arguments": {}}}


def test_results_of_one_turn_are_one_message_and_text_stands_before_its_calls():
    chat = with_tools(
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "Wait.", "tool_calls": [call("f"), call("g")]},
            {"role": "tool", "tool_call_id": "f", "content": "1"},
            {"role": "tool", "tool_call_id": "g", "content": "2"},
            {"role": "assistant", "content": "3"},
        ],
        [],
    )
    assert [one["role"] for one in chat] == ["user", "assistant", "user", "assistant"]
    assert chat[1]["content"].startswith(
        'Wait.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>'
    )
    responses = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert chat[2] == {"role": "user", "content": responses}


def test_the_messages_of_the_caller_stay_as_they_are():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert with_tools(messages, [TOOL])[0]["content"].startswith("s\n\n# Tools")
    assert messages[0]["content"] == "s"
