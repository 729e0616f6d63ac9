from python_backends.tokenizer.tool_prompt import with_tools

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
