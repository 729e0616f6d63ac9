"""A chat as the ensemble gets it: messages, tools and template variables as JSON, checked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from contract.chat import check_tool_turns
from contract.errors import InvalidArgument

_HINT = 'a JSON list such as [{"role": "user", "content": "Hello"}]'
_TOOLS_HINT = 'a JSON list such as [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]'
MAX_TOOLS = 128
_SYSTEM = """\
# Tools

You may call one or more functions to help with the user's request. The functions, one JSON object in each line:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and arguments inside <tool_call></tool_call> tags:
<tool_call>
{{"name": <function name>, "arguments": <arguments as a JSON object>}}
</tool_call>"""

Message = dict[str, Any]


def parse_messages(messages_json: str) -> list[Message]:
    """Parse the input ``messages``. The arguments of tool calls become objects, as chat templates expect them. Raises
    InvalidArgument: it is not a chat; names the message and what it must hold."""
    messages = _parsed("messages", messages_json, _HINT)
    if not isinstance(messages, list) or not messages:
        raise InvalidArgument("messages", f"must be {_HINT}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidArgument("messages", f'entry {index} must have a "role", as in {_HINT}')
        calls = message.get("tool_calls")
        if calls:
            message["tool_calls"] = _calls(index, calls)
            message["content"] = "" if message.get("content") is None else message["content"]
        elif "tool_calls" in message:  # templates ask whether the key is there
            del message["tool_calls"]
        if not isinstance(message.get("content"), str):
            raise InvalidArgument("messages", f'entry {index} must have text in "content", as in {_HINT}')
    check_tool_turns(messages)
    return messages


def parse_tools(tools_json: str) -> list[dict[str, Any]]:
    """Parse the input ``tools``. Raises InvalidArgument: it is not a list of functions with different names."""
    tools = _parsed("tools", tools_json, _TOOLS_HINT)
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise InvalidArgument("tools", f"must be {_TOOLS_HINT} with 1 to {MAX_TOOLS} entries")
    names = set()
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise InvalidArgument("tools", f"entry {index} must be a function with a name, as in {_TOOLS_HINT}")
        if name in names:
            raise InvalidArgument("tools", f"must have different names, got {name!r:.100} twice")
        names.add(name)
    return tools


def parse_variables(variables_json: str) -> dict[str, Any]:
    """Parse the input ``chat_template_kwargs``. Raises InvalidArgument: it is not a JSON object."""
    variables = _parsed("chat_template_kwargs", variables_json, 'a JSON object such as {"enable_thinking": false}')
    if not isinstance(variables, dict):
        raise InvalidArgument("chat_template_kwargs", 'must be a JSON object such as {"enable_thinking": false}')
    return variables


def _calls(index: int, calls: Any) -> list[dict[str, Any]]:
    found = []
    for number, call in enumerate(calls if isinstance(calls, list) else [None]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not call.get("id"):
            hint = '{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}'
            raise InvalidArgument("messages", f"entry {index} must have tool_calls such as [{hint}]")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, dict) or not isinstance(call["id"], str):
            problem = f"entry {index} must have in tool_calls[{number}] an id and as arguments a JSON object"
            raise InvalidArgument("messages", problem)
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found


def _parsed(name: str, text: str, hint: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidArgument(name, f"must be {hint}, got no JSON: {exc}") from exc


def with_tools(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """Return the chat for a template that knows no tools: messages of the roles system, user and assistant only, the
    tools described in the system message, in the form of Hermes and Qwen."""
    chat: list[Message] = []
    before = ""  # role of the message before
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if before == "tool":  # roles alternate: one turn has all results
                chat[-1]["content"] += f"\n{text}"
            else:
                chat.append({"role": "user", "content": text})
        elif calls := message.get("tool_calls"):
            texts = [message["content"]] if message["content"] else []
            for call in calls:
                named = {name: call["function"][name] for name in ("name", "arguments")}
                texts.append(f"<tool_call>\n{json.dumps(named, ensure_ascii=False)}\n</tool_call>")
            chat.append({"role": message["role"], "content": "\n".join(texts)})
        else:
            chat.append(message)
        before = message["role"]
    if tools:
        text = _SYSTEM.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if chat[0]["role"] == "system":
            chat[0] = {"role": "system", "content": f"{chat[0]['content']}\n\n{text}"}
        else:
            chat.insert(0, {"role": "system", "content": text})
    return chat
