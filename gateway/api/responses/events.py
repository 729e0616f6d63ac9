"""Fold the deltas of an output into a response, and tell each step as OpenAI's events do.

The response is the same for every division of the output into deltas: that of a stream and the whole one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from contract.errors import EngineFailed, InvalidArgument, Overloaded, TridentError
from contract.generation import FinishReason, TokenDelta, ToolCallDelta, Usage
from gateway.api.responses.items import PREFIXES
from gateway.api.schemas import is_whole
from gateway.api.sse import encode_event
from gateway.cache.reuse import ResponseDeltas

Event = dict[str, Any]
# By the kind of Sections.parts: an item's type, the type of its part, and its fields beside the part.
_KINDS: dict[str, tuple[str, str, Event]] = {
    "text": ("message", "output_text", {"role": "assistant", "content": []}),
    "reasoning": ("reasoning", "reasoning_text", {"summary": [], "content": []}),
}


class ResponseFold:
    """One response as it grows, until ``done``. log_probs: returns those of a delta's tokens, if requested."""

    def __init__(
        self, head: Mapping[str, Any], log_probs: Callable[[TokenDelta], Iterable[Any]] = lambda delta: ()
    ) -> None:
        more: Event = {"status": "in_progress", "error": None, "incomplete_details": None, "output": [], "usage": None}
        self.response: Event = {**head, **more}
        self.done = False
        self._log_probs = log_probs
        self._waiting: list[Any] = []  # of tokens whose text has not come
        self._listed: list[Any] = []  # of the item that is being written
        self._item: Event = {}  # that is being written; empty: none is
        self._call = -1  # index of the call that is being written
        self._part: Event = {}  # its part, without text
        self._texts: list[str] = []
        self._events: list[Event] = []
        self._number = 0

    def feed(self, delta: TokenDelta) -> list[Event]:
        """Return the events of one delta."""
        if not self._number:
            self._add("response.created", response=dict(self.response))
            self._add("response.in_progress", response=dict(self.response))
        self._waiting += self._log_probs(delta)
        for kind, part in delta.parts:
            if isinstance(part, ToolCallDelta):
                self._write_call(part)
            elif part:
                self._write(kind, part)
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
        item, part, fields = _KINDS[kind]
        if self._item.get("type") != item:
            self._begin(item, **fields)
            self._part = {"type": part, "text": ""} | ({"annotations": [], "logprobs": []} if kind == "text" else {})
            self._add_here("response.content_part.added", content_index=0, part=self._part)
        self._texts.append(text)
        more: Event = {"logprobs": self._waiting} if kind == "text" else {}
        self._listed += self._waiting
        self._waiting = []
        self._add_here(f"response.{part}.delta", content_index=0, delta=text, **more)

    def _begin(self, kind: str, **fields: Any) -> None:
        self._end("completed")
        index, suffix = len(self.response["output"]), self.response["id"].partition("_")[2]
        item_id = f"{PREFIXES[kind]}_{suffix}o{index:04x}"
        self._item = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        self._texts, self._listed = [], []
        self._add("response.output_item.added", output_index=index, item=self._item)

    def _end(self, status: str) -> None:
        """End the item that is being written, if there is one."""
        if not self._item:
            return
        text, item = "".join(self._texts), {**self._item, "status": status}
        if item["type"] == "function_call":
            item["arguments"] = text
            if not is_whole(text):
                item["status"] = "incomplete"
            self._add_here("response.function_call_arguments.done", name=item["name"], arguments=text)
        else:
            more = {"logprobs": self._listed} if item["type"] == "message" else {}
            part = {**self._part, "text": text, **more}
            self._add_here(f"response.{part['type']}.done", content_index=0, text=text, **more)
            self._add_here("response.content_part.done", content_index=0, part=part)
            item["content"] = [part]
        output = self.response["output"]
        self._add("response.output_item.done", output_index=len(output), item=item)
        self.response = {**self.response, "output": [*output, item]}
        self._item = {}

    def _finish(self, cut: bool, usage: Usage) -> None:
        """cut: whether max_output_tokens ended the output."""
        if self._waiting or not (self._item or self.response["output"]):
            self._write("text", "")
        status = "incomplete" if cut else "completed"
        self._end(status)
        details = {"reason": "max_output_tokens"} if cut else None
        ended = {"status": status, "incomplete_details": details, "usage": _usage(usage)}
        self.response, self.done = {**self.response, **ended}, True
        self._add(f"response.{status}", response=self.response)


class ResponseEvents:
    """A response's events, and their encoder. on_end: called in a thread with the whole response, before the last."""

    def __init__(self, stream: ResponseDeltas, fold: ResponseFold, on_end: Callable[[Event], None] | None) -> None:
        self._deltas, self._fold, self._on_end = stream.deltas, fold, on_end
        for item in stream.replayed:
            fold.feed(item.delta)
        self._number = stream.first_event

    def __aiter__(self) -> ResponseEvents:
        return self

    async def __anext__(self) -> list[Event]:
        events = self._fold.feed((await anext(self._deltas)).delta)
        if self._fold.done and self._on_end is not None:
            await asyncio.to_thread(self._on_end, self._fold.response)
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


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


def _code(error: TridentError) -> str:
    if isinstance(error, Overloaded):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, InvalidArgument) else "server_error"


def _encode(event: Event) -> bytes:
    return b"event: %b\n%b" % (event["type"].encode(), encode_event(event))
