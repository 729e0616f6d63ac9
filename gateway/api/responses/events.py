"""Fold the deltas of an output into a response, and tell each step as OpenAI's events do.

The response is the same for every division of the output into deltas: that of a stream and the whole one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from contract.errors import EngineFailed, InvalidArgument, Overloaded, TridentError
from contract.generation import FinishReason, TokenDelta, ToolCallDelta, Usage
from gateway.api.responses.items import PREFIXES
from gateway.api.sse import encode_event, usage_fields
from gateway.cache.reuse import ResponseDeltas

Event = dict[str, Any]
_KINDS = {"text": "message", "reasoning": "reasoning", "call": "function_call"}  # by kind of Sections.parts
_EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}

_EMPTY: dict[str, dict[str, Any]] = {"message": {"role": "assistant"}, "reasoning": {"summary": []}}


class ResponseFold:
    """One response as it grows.

    head: its fields that are known from the beginning, ``id`` among them.
    log_probs: returns those of a delta's tokens, none if they are not requested.
    response: the response so far. done: whether it has ended.
    """

    def __init__(
        self, head: Mapping[str, Any], log_probs: Callable[[TokenDelta], Iterable[Any]] = lambda delta: ()
    ) -> None:
        more: Event = {"status": "in_progress", "error": None, "incomplete_details": None, "output": [], "usage": None}
        self.response: dict[str, Any] = {**head, **more}
        self.done = False
        self._log_probs = log_probs
        self._waiting: list[Any] = []  # of tokens whose text has not come
        self._listed: list[Any] = []  # of the item that is being written
        self._item: dict[str, Any] = {}  # that is being written; empty: none is
        self._call = -1  # index of the call that is being written
        self._texts: list[str] = []
        self._events: list[Event] = []
        self._number = 0

    def feed(self, delta: TokenDelta) -> list[Event]:
        """Return the events of one delta."""
        if not self._number:
            self._add("response.created", response=dict(self.response))
            self._add("response.in_progress", response=dict(self.response))
        self._waiting += self._log_probs(delta)
        for kind, part in _parts(delta):
            if isinstance(part, ToolCallDelta):
                self._write_call(part)
            elif part:
                self._write(_KINDS[kind], part)
        if delta.finish_reason:
            self._finish(delta.finish_reason is FinishReason.LENGTH, delta.usage or Usage(0, 0))
        return self._take()

    def failed(self, error: TridentError) -> list[Event]:
        """Return the events of an error, in the middle of the response or before it began."""
        if not self._number:
            field = error.field or None if isinstance(error, InvalidArgument) else None
            self._add("error", code=_code(error), message=error.message, param=field)
        else:
            failure = {"code": _code(error), "message": error.message}
            self.response = {**self.response, "status": "failed", "error": failure}
            self._add("response.failed", response=self.response)
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _add(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1

    def _add_here(self, kind: str, **fields: Any) -> None:
        """Add an event of the item that is being written."""
        self._add(kind, item_id=self._item["id"], output_index=len(self.response["output"]), **fields)

    def _write_call(self, part: ToolCallDelta) -> None:
        if part.id:
            self._begin("function_call", call_id=part.id, name=part.name, arguments="")
            self._call = part.index
        elif self._item.get("type") != "function_call" or part.index != self._call:
            raise EngineFailed("parts of several tool calls were mixed")
        if part.arguments:
            self._texts.append(part.arguments)
            self._add_here("response.function_call_arguments.delta", delta=part.arguments)

    def _write(self, kind: str, text: str) -> None:
        """Write text of a message or of reasoning."""
        if self._item.get("type") != kind:
            self._begin(kind, content=[], **_EMPTY[kind])
            self._add_here("response.content_part.added", content_index=0, part=self._part("", []))
        self._texts.append(text)
        more: dict[str, Any] = {}
        if kind == "message":
            more, self._waiting = {"logprobs": self._waiting}, []
            self._listed += more["logprobs"]
        self._add_here(f"{_EVENTS[kind]}.delta", content_index=0, delta=text, **more)

    def _begin(self, kind: str, **fields: Any) -> None:
        self._end("completed")
        index, suffix = len(self.response["output"]), self.response["id"].partition("_")[2]
        item_id = f"{PREFIXES[kind]}_{suffix}o{index:04x}"
        self._item = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        self._texts, self._listed = [], []
        self._add("response.output_item.added", output_index=index, item=self._item)

    def _part(self, text: str, log_probs: Sequence[Any]) -> dict[str, Any]:
        if self._item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": log_probs}

    def _end(self, status: str) -> None:
        """End the item that is being written, if there is one."""
        if not self._item:
            return
        kind, text = self._item["type"], "".join(self._texts)
        item = {**self._item, "status": status}
        if kind == "function_call":
            item["arguments"] = text
            self._add_here(f"{_EVENTS[kind]}.done", name=item["name"], arguments=text)
        else:
            part = self._part(text, self._listed)
            more = {"logprobs": self._listed} if kind == "message" else {}
            self._add_here(f"{_EVENTS[kind]}.done", content_index=0, text=text, **more)
            self._add_here("response.content_part.done", content_index=0, part=part)
            item["content"] = [part]
        output = self.response["output"]
        self._add("response.output_item.done", output_index=len(output), item=item)
        self.response = {**self.response, "output": [*output, item]}
        self._item = {}

    def _finish(self, cut: bool, usage: Usage) -> None:
        """cut: whether max_output_tokens ended the output."""
        if self._waiting or not (self._item or self.response["output"]):
            self._write("message", "")
        status = "incomplete" if cut else "completed"
        self._end(status)
        details = {"reason": "max_output_tokens"} if cut else None
        ended = {"status": status, "incomplete_details": details, "usage": _usage(usage)}
        self.response, self.done = {**self.response, **ended}, True
        self._add(f"response.{status}", response=self.response)


class ResponseEvents:
    """The events of a response, delta by delta, and their encoder. Closing it closes the deltas.

    on_end: called with the whole response before its last events are returned.
    """

    def __init__(
        self,
        stream: ResponseDeltas,
        fold: ResponseFold,
        on_end: Callable[[Mapping[str, Any]], Awaitable[None]] | None,
    ) -> None:
        self._deltas, self._fold, self._on_end = stream.deltas, fold, on_end
        for item in stream.replayed:
            fold.feed(item.delta)
        self._number = stream.first_event

    def __aiter__(self) -> ResponseEvents:
        return self

    async def __anext__(self) -> list[Event]:
        events = self._fold.feed((await anext(self._deltas)).delta)
        if self._fold.done and self._on_end is not None:
            await self._on_end(self._fold.response)
        return events

    async def aclose(self) -> None:
        await self._deltas.aclose()

    def encode(self, item: list[Event]) -> bytes:
        encoded = [_encode(event) for event in item]
        if self._number is not None:
            if encoded:  # a client that has the last event of a delta has all of it
                encoded[-1] = b"id: %d\n%b" % (self._number, encoded[-1])
            self._number += 1
        return b"".join(encoded)

    def end(self) -> bytes:
        return b""

    def failed(self, error: TridentError) -> bytes:
        return b"".join(map(_encode, self._fold.failed(error)))


def _parts(delta: TokenDelta) -> Sequence[tuple[str, str | ToolCallDelta]]:
    """Return what a delta adds, in order."""
    sections = delta.sections
    if sections is None:
        return (("text", delta.text),)
    if sections.parts:
        return sections.parts
    calls = (("call", call) for call in sections.tool_calls)
    return (("reasoning", sections.reasoning), ("text", delta.text), *calls)


def _usage(usage: Usage) -> dict[str, Any]:
    chat = usage_fields([usage], 1)
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {**chat["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": chat["completion_tokens_details"],
        "total_tokens": chat["total_tokens"],
    }


def _code(error: TridentError) -> str:
    if isinstance(error, Overloaded):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, InvalidArgument) else "server_error"


def _encode(event: Event) -> bytes:
    return b"event: %b\n%b" % (event["type"].encode(), encode_event(event))
