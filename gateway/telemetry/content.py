"""What a request's span gets of the response as the caller got it: tool calls, and texts where a tenant wants that.

Names and forms are those of OpenTelemetry's GenAI conventions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from opentelemetry.trace import Span

from contract.generation import GenerationRequest, TokenDelta, ToolCallDelta
from gateway.telemetry.tracing import Tracing, end_span

EVENT = "gen_ai.client.inference.operation.details"
MAX_CHARS = 100_000  # of an attribute; a longer one is left out
_Part = dict[str, Any]


class ResponseTrace:
    """Reads one response while it is sent; ``with`` it until that has ended. The request's span ends no earlier.

    content: whether the span gets prompts and outputs.
    """

    def __init__(self, tracing: Tracing, content: bool) -> None:
        self._tracing, self._content = tracing, content
        self._span: Span | None = None
        self._end: Callable[[], None] | None = None
        self._sent = False
        self._requests: Sequence[GenerationRequest] = ()
        self._parts: dict[int, dict[tuple[str, int], _Part]] = {}  # by choice, then by kind and index of a tool call
        self._reasons: dict[int, str] = {}
        self._reasoning_tokens = 0

    def __enter__(self) -> ResponseTrace:
        return self

    def __exit__(self, *error: object) -> None:
        self._sent = True
        if self._span is not None and self._span.is_recording():
            self._record(self._span)
        if self._end is not None:
            self._end()

    def requested(self, requests: Sequence[GenerationRequest]) -> None:
        """Take the requests as the model gets them."""
        self._requests = requests

    def began(self, span: Span | None) -> None:
        self._span = span

    def ended(self, span: Span | None, error: BaseException | None, attributes: Mapping[str, Any]) -> None:
        """End the request's span, at the latest when the response has been sent."""
        self._end = partial(end_span, span, error, end_ns=time.time_ns(), **attributes)
        if self._sent:
            self._end()

    def read(self, choice: int, delta: TokenDelta) -> None:
        """Read a delta as the caller gets it."""
        if delta.finish_reason:
            self._reasons[choice] = delta.finish_reason.value
            self._reasoning_tokens += delta.usage.reasoning_tokens if delta.usage is not None else 0
        parts, now_ns = self._parts.setdefault(choice, {}), time.time_ns()
        for kind, part in delta.parts:
            if isinstance(part, ToolCallDelta):
                new: _Part = {"type": "tool_call", "id": part.id, "name": part.name, "arguments": ""}
                call = parts.setdefault((kind, part.index), new | {"began_ns": now_ns})
                call["arguments"] += part.arguments
                call["ended_ns"] = now_ns
            elif part and self._content:
                parts.setdefault((kind, 0), {"type": kind, "content": ""})["content"] += part

    def _record(self, span: Span) -> None:
        answers = []
        for choice, parts in sorted(self._parts.items()):
            calls = [part for part in parts.values() if part["type"] == "tool_call"]
            for call in calls:
                began_ns, ended_ns = call.pop("began_ns"), call.pop("ended_ns")
                shown = ("name", "call.id", "call.arguments") if self._content else ("name", "call.id")
                found = {f"gen_ai.tool.{name}": call[name.removeprefix("call.")][:MAX_CHARS] for name in shown}
                found["gen_ai.tool.type"] = "function"
                self._tracing.past(span, f"tool_call {call['name']}", began_ns, ended_ns, found)
            reason = "tool_call" if calls else self._reasons.get(choice, "error")
            answers.append({"role": "assistant", "parts": list(parts.values()), "finish_reason": reason})
        if self._reasoning_tokens:
            span.set_attribute("gen_ai.usage.reasoning.output_tokens", self._reasoning_tokens)
        if not self._content:
            return
        prompts = {id(one.messages or one.text_input): one for one in self._requests}.values()
        turns = [turn for one in prompts for turn in one.messages or ({"role": "user", "content": one.text_input},)]
        texts = {"gen_ai.input.messages": _json([_message(turn) for turn in turns])}
        texts["gen_ai.output.messages"] = _json(answers)
        if self._requests and self._requests[0].tools is not None:
            texts["gen_ai.tool.definitions"] = self._requests[0].tools
        span.add_event(EVENT, {name: text for name, text in texts.items() if len(text) <= MAX_CHARS})


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    content = turn.get("content")
    if turn.get("role") == "tool":
        parts = [{"type": "tool_call_response", "id": turn.get("tool_call_id"), "response": content}]
        return {"role": "tool", "parts": parts}
    pieces = [content] if isinstance(content, str) else content if isinstance(content, list) else []
    texts = [piece.get("text", "") if isinstance(piece, dict) else piece for piece in pieces]
    parts = [{"type": "text", "content": text} for text in texts if text]
    for call in turn.get("tool_calls") or ():
        parts.append({"type": "tool_call", "id": call.get("id"), **call.get("function", {})})
    return {"role": turn.get("role"), "parts": parts}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
