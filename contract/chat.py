"""The tool turns of a chat: which calls the assistant made, and which message answers each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from contract.errors import InvalidArgument


def check_tool_turns(messages: Sequence[Mapping[str, Any]]) -> None:
    """Check that each call of an assistant's message is answered by one tool message before the next turn.

    messages: well-formed; a call has an ``id``.
    Raises InvalidArgument: a call has no answer, or a tool message answers no call; names the message.
    """
    waiting: list[str] = []  # ids of calls without an answer yet
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            call = message.get("tool_call_id")
            if call not in waiting:
                allowed = f"one of {', '.join(waiting)}" if waiting else "the id of a call in the message before"
                raise _wrong(index, f"must have as tool_call_id {allowed:.200}, got {call!r:.100}")
            waiting.remove(call)
            continue
        if waiting:
            raise _wrong(index, f"must be the tool message that answers the call {waiting[0]!r:.100}")
        calls = [call["id"] for call in message.get("tool_calls") or ()]
        if len(set(calls)) < len(calls):
            raise _wrong(index, "must have tool_calls with different ids")
        waiting = calls
    if waiting:
        raise _wrong(len(messages), f"is missing: a tool message that answers the call {waiting[0]!r:.100}")


def _wrong(index: int, problem: str) -> InvalidArgument:
    return InvalidArgument("messages", f"entry {index} {problem}")
