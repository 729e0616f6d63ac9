"""What is left out of a chat that is too long: whole turns, the oldest first; a tool call goes with its results."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

Message = dict[str, Any]
Chat = Sequence[Message]


def drop_order(messages: Chat, keep_system: bool, own: range) -> list[list[int]]:
    """Return what may be left out, as groups of indices in the order in which they go.

    The last turn's question and its last group stay: what the model is to answer. A group is a message, or an
    assistant's message with the tool messages that answer its calls.

    keep_system: system messages stay, and the first turn goes last, its question after its answer.
    own: the indices of the request's own messages; those around them, of a template, stay.
    """
    turns: list[list[list[int]]] = []
    for index in own:
        role = messages[index]["role"]
        if role == "system" and keep_system:
            continue
        if role == "tool" and turns:
            turns[-1][-1].append(index)
        elif role == "assistant" and turns:
            turns[-1].append([index])
        else:
            turns.append([[index]])
    if not turns:
        return []
    *older, last = turns
    inner = last[1:-1]
    if not keep_system or not older:
        return [*map(_joined, older), *inner]
    first, *middle = older
    answer = [_joined(first[1:])] if len(first) > 1 else []
    return [*map(_joined, middle), *answer, *inner, first[0]]


def shortened(
    messages: Chat, order: Sequence[Sequence[int]], fits: Callable[[Chat], bool]
) -> tuple[list[Message], list[Message]] | None:
    """Return (what stays, what is left out), with as little left out as possible; None if no such chat fits.

    fits: of a chat; one with fewer messages fits if one with more does.
    """

    def without(groups: int) -> tuple[list[Message], list[Message]]:
        gone = {index for group in order[:groups] for index in group}
        stays = [message for index, message in enumerate(messages) if index not in gone]
        return stays, [message for index, message in enumerate(messages) if index in gone]

    gone = bisect.bisect_left(range(len(order) + 1), True, key=lambda groups: fits(without(groups)[0]))
    return without(gone) if gone <= len(order) else None


def with_summary(messages: Chat, summary: str) -> list[Message]:
    """Return a chat with the summary of what was left out in its first system message."""
    text = f"Summary of the earlier conversation:\n{summary.strip()}"
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def summary_prompt(messages: Chat, words: int) -> list[Message]:
    """Return the chat that asks a model for a summary of ``messages``."""
    task = (
        f"Summarise the conversation below in at most {words} words. Keep names, numbers, decisions and open "
        "questions. Write the summary only."
    )
    lines = [f"{message['role']}: {_text(message)}" for message in messages]
    return [{"role": "system", "content": task}, {"role": "user", "content": "\n".join(lines)}]


def _text(message: Message) -> str:
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or ()]
    return " ".join([message["content"], *calls]).strip()


def _joined(groups: Sequence[Sequence[int]]) -> list[int]:
    return [index for group in groups for index in group]
