"""Tools for a model whose chat template knows none: described in the system message, in the form of Hermes and Qwen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from python_backends.tokenizer.chat import Message

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


def with_tools(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """Return the chat as messages of roles that every template knows: system, user, assistant."""
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
            texts += [f"<tool_call>\n{_call(call['function'])}\n</tool_call>" for call in calls]
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


def _call(function: dict[str, Any]) -> str:
    return json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
