"""The items of a conversation, as OpenAI's Responses have them: read, stored, and turned into messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictStr

from contract.chat import check_tool_turns
from contract.errors import InvalidArgument
from gateway.api.schemas import CalledFunction, EntryLimit, ToolCall
from gateway.api.strict_model import StrictModel

PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}  # of ids
_TEXTS, _THOUGHTS = ("input_text", "output_text"), ("reasoning_text", "summary_text")
# The fields that an item of each type must have, and may have beside its id and status.
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "message": (("role", "content"), ()),
    "function_call": (("call_id", "name", "arguments"), ()),
    "function_call_output": (("call_id", "output"), ()),
    "reasoning": ((), ("content", "summary")),
    "item_reference": (("id",), ()),
}
_Id = Annotated[StrictStr, Field(min_length=1, max_length=256)]


class Part(StrictModel):
    """A text. annotations, logprobs: of an earlier response; not used."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: StrictStr
    annotations: Annotated[list[Any] | None, EntryLimit, Field(exclude=True)] = None
    logprobs: Annotated[list[Any] | None, EntryLimit, Field(exclude=True)] = None


_Parts = Annotated[list[Part], Field(fail_fast=True), EntryLimit]


class Item(StrictModel):
    """An item of any type. Chat templates decide whether the model sees the content of earlier reasoning."""

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] = "message"
    id: _Id | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: StrictStr | _Parts | None = None
    summary: _Parts | None = None
    call_id: _Id | None = None
    name: StrictStr | None = None
    arguments: StrictStr | None = None
    output: StrictStr | _Parts | None = None

    def plain(self, path: str) -> dict[str, Any]:
        """Return the fields that are set. path: names the item in an error. Raises: InvalidArgument."""
        fields = self.model_dump(exclude_none=True)
        needed, more = _FIELDS[self.type]
        for name in needed:
            if name not in fields:
                raise InvalidArgument(f"{path}.{name}", "is missing")
        for name in fields.keys() - {"type", "id", "status", *needed, *more}:
            raise InvalidArgument(f"{path}.{name}", f"must be left out of an item of type {self.type}")
        if self.type == "reasoning":
            fields = {"summary": [], "content": [], **fields}
            if isinstance(self.content, str):
                raise InvalidArgument(f"{path}.content", "must be a list of parts")
        allowed = _THOUGHTS if self.type == "reasoning" else _TEXTS
        for name in ("content", "summary", "output"):
            for number, part in enumerate(fields.get(name, ())):
                if isinstance(part, dict) and part["type"] not in allowed:
                    raise InvalidArgument(f"{path}.{name}.{number}.type", f"must be {' or '.join(allowed)}")
        return fields


def _without_nulls(item: Any) -> Any:
    """Leave out fields that are null, which clients send back with the items of a response."""
    return {key: value for key, value in item.items() if value is not None} if isinstance(item, dict) else item


Items = Annotated[list[Annotated[Item, BeforeValidator(_without_nulls)]], Field(fail_fast=True), EntryLimit]


def plain_items(given: str | Sequence[Item], suffix: str) -> list[dict[str, Any]]:
    """Return items as they are stored, in parts and with an id of a unique ``suffix``. Raises: InvalidArgument."""
    if isinstance(given, str):
        given = [Item(role="user", content=given)]
    found = []
    for number, one in enumerate(given):
        item = one.plain(f"input.{number}")
        if one.type != "item_reference":
            item = {"id": f"{PREFIXES[one.type]}_{suffix}i{number:04x}", "status": "completed", **item}
        if one.type == "message":
            content = item["content"]
            texts = [content] if isinstance(content, str) else [part["text"] for part in content]
            more: dict[str, Any] = {"type": "input_text"}
            if one.role == "assistant":
                more = {"type": "output_text", "annotations": []}
            item["content"] = [{**more, "text": text} for text in texts]
        found.append(item)
    return found


def messages_of(items: Sequence[Mapping[str, Any]], given: int) -> list[dict[str, Any]]:
    """Return a chat's messages. The last ``given`` items are the request's own. Raises: InvalidArgument (input)."""
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
