"""The items of a conversation, as OpenAI's Responses have them: read, stored, and turned into messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, StrictStr, Tag

from contract.chat import check_tool_turns
from contract.errors import InvalidArgument
from gateway.api.schemas import EntryLimit
from gateway.api.strict_model import StrictModel
from gateway.api.tool_schemas import CalledFunction, ToolCall

KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}  # of ids
_Id = Annotated[StrictStr, Field(min_length=1, max_length=256)]
_Status = Literal["in_progress", "completed", "incomplete"]
_First = Field(fail_fast=True)


class _Text(StrictModel):
    """Text of a message or of a function's output. annotations, logprobs: of an earlier response; not used."""

    type: Literal["input_text", "output_text"]
    text: StrictStr
    annotations: Annotated[list[Any], EntryLimit] | None = None
    logprobs: Annotated[list[Any], EntryLimit] | None = None


class _Thought(StrictModel):
    type: Literal["summary_text", "reasoning_text"]
    text: StrictStr


_Content = StrictStr | Annotated[list[_Text], _First, EntryLimit]


class _Item(StrictModel):
    """id, status: of an item that was returned earlier."""

    id: _Id | None = None
    status: _Status | None = None


class _Message(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content


class _FunctionCall(_Item):
    type: Literal["function_call"]
    call_id: _Id
    name: StrictStr
    arguments: StrictStr


class _FunctionCallOutput(_Item):
    type: Literal["function_call_output"]
    call_id: _Id
    output: _Content


class _Reasoning(_Item):
    """Templates decide whether the model sees the content again; the summary is not used."""

    type: Literal["reasoning"]
    summary: Annotated[list[_Thought], _First, EntryLimit] = []
    content: Annotated[list[_Thought], _First, EntryLimit] = []


class _ItemReference(StrictModel):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"]
    id: _Id


def _without_nulls(item: Any) -> Any:
    """Leave out fields that are null, which clients send back with the items of a response."""
    return {key: value for key, value in item.items() if value is not None} if isinstance(item, dict) else item


def _kind(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return f"item-{kind}" if isinstance(kind, str) else None  # no name of a field: errors leave it out of their paths


Item = Annotated[
    Annotated[_Message, Tag("item-message")]
    | Annotated[_FunctionCall, Tag("item-function_call")]
    | Annotated[_FunctionCallOutput, Tag("item-function_call_output")]
    | Annotated[_Reasoning, Tag("item-reasoning")]
    | Annotated[_ItemReference, Tag("item-item_reference")],
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message=f"must be an object whose type is one of {', '.join(KINDS)}",
    ),
    BeforeValidator(_without_nulls),
]
Items = Annotated[list[Item], _First, EntryLimit]


def plain_items(given: str | Sequence[Any], suffix: str) -> list[dict[str, Any]]:
    """Return the items as they are stored and listed: each with an id, a status and its content in parts.

    given: a text of the user, or validated items. suffix: makes new ids unique.
    """
    if isinstance(given, str):
        given = [_Message(role="user", content=given)]
    found = []
    for number, one in enumerate(given):
        item = one.model_dump(exclude_none=True)
        if one.type != "item_reference":
            new_id = f"{PREFIXES[one.type]}_{suffix}i{number:04x}"
            item = {"id": new_id, "status": "completed", **item}
        if one.type == "message":
            item["content"] = _parts(item["content"], "output_text" if one.role == "assistant" else "input_text")
        found.append(item)
    return found


def _parts(content: str | Sequence[Mapping[str, Any]], kind: str) -> list[dict[str, Any]]:
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    more: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
    return [{"type": kind, "text": text, **more} for text in texts]


def messages_of(items: Sequence[Mapping[str, Any]], given: int) -> list[dict[str, Any]]:
    """Return the messages of a chat. What the assistant wrote between two others' items is one message.

    items: plain, without references. given: how many of them, the last ones, are of the request itself.
    Raises: InvalidArgument that names an entry of ``input``.
    """
    messages: list[dict[str, Any]] = []
    origins: list[int] = []  # the item of each message
    before, last = len(items) - given, ""
    for index, item in enumerate(items):
        kind = item["type"]
        own = kind != "function_call_output" and item.get("role", "assistant") == "assistant"
        if not own or last in ("", "other") or last == kind == "message":
            messages.append({"role": "assistant", "content": ""})
            origins.append(index)
        message = messages[-1]
        if kind == "reasoning":
            text = "".join(part["text"] for part in item["content"])
            message["reasoning_content"] = message.get("reasoning_content", "") + text
        elif kind == "function_call":
            called = CalledFunction(name=item["name"], arguments=item["arguments"])
            try:
                call = ToolCall(id=item["call_id"], function=called).plain("")
            except InvalidArgument as exc:
                if index < before:
                    problem = f"must be a response with complete calls; {item['call_id']} was cut off"
                    raise InvalidArgument("previous_response_id", problem) from exc
                raise InvalidArgument(f"input.{index - before}.arguments", exc.problem) from exc
            message.setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            message |= {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])}
        else:
            message |= {"role": item["role"], "content": message["content"] + _text(item["content"])}
        last = kind if own else "other"
    try:
        check_tool_turns(messages)
    except InvalidArgument as exc:
        raise InvalidArgument("input", _renamed(exc.problem, [*origins, len(items)], before)) from exc
    return [message for message in messages if len(message) > 2 or message["content"] or message["role"] != "assistant"]


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _renamed(problem: str, origins: Sequence[int], before: int) -> str:
    """Return an error about tool turns with the item in place of the message. before: items of earlier responses."""
    found = re.match(r"entry (\d+)", problem)
    if found is not None:
        entry = origins[int(found[1])] - before
        problem = (f"entry {entry}" if entry >= 0 else "an earlier item") + problem[found.end() :]
    for old, new in (("tool message", "function_call_output"), ("tool_call_id", "call_id"), ("tool_calls", "calls")):
        problem = problem.replace(old, new)
    return problem
