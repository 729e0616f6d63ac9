"""What spans get of responses: tool calls always, texts only where the tenant wants that, in the conventions' forms."""

from __future__ import annotations

import json

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from contract.errors import EngineFailed
from contract.generation import FinishReason, GenerationRequest, Sections, TokenDelta, ToolCallDelta, Usage
from gateway.telemetry.content import EVENT, MAX_CHARS, ResponseTrace
from gateway.telemetry.tracing import Tracing

CALLS = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
MESSAGES = (
    {"role": "user", "content": [{"type": "text", "text": "one"}]},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c1", "content": "42"},
)
DELTAS = (
    TokenDelta(sections=Sections("why ", (), (("reasoning", "why "),))),
    TokenDelta("so"),
    TokenDelta(sections=Sections("", (ToolCallDelta(0, "c2", "g", '{"a":'),))),
    TokenDelta(sections=Sections("", (ToolCallDelta(0, arguments="1}"),))),
    TokenDelta(finish_reason=FinishReason.STOP, usage=Usage(3, 9, reasoning_tokens=4)),
)


def spans(content: bool, *, late: bool = False, text: str = "x") -> dict:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter=exporter)
    span = tracing.start("chat demo", {}, {})
    with ResponseTrace(tracing, content) as trace:
        trace.requested([GenerationRequest(messages=MESSAGES, tools="[]"), GenerationRequest(messages=MESSAGES)])
        trace.began(span)
        if not late:
            trace.ended(span, EngineFailed(text), {"key": 1})
        for delta in DELTAS:
            trace.read(0, delta)
    if late:
        trace.ended(span, None, {"key": 1})
    tracing.close()
    return {one.name: one for one in exporter.get_finished_spans()}


def test_without_the_tenants_wish_there_is_no_text():
    found = spans(False)
    assert not found["chat demo"].events and found["chat demo"].attributes["key"] == 1
    assert found["chat demo"].attributes["gen_ai.usage.reasoning.output_tokens"] == 4
    call = found["tool_call g"]
    assert dict(call.attributes) == {
        "gen_ai.tool.name": "g",
        "gen_ai.tool.call.id": "c2",
        "gen_ai.tool.type": "function",
    }
    assert call.start_time <= call.end_time and call.parent.span_id == found["chat demo"].context.span_id


def test_with_it_an_event_has_them_in_the_conventions_form():
    for late in (False, True):
        found = spans(True, late=late)
        [event] = found["chat demo"].events
        assert event.name == EVENT and event.attributes["gen_ai.tool.definitions"] == "[]"
        assert json.loads(event.attributes["gen_ai.input.messages"]) == [
            {"role": "user", "parts": [{"type": "text", "content": "one"}]},
            {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "f", "arguments": "{}"}]},
            {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "42"}]},
        ]
        [answer] = json.loads(event.attributes["gen_ai.output.messages"])
        assert answer["finish_reason"] == "tool_call" and answer["parts"] == [
            {"type": "reasoning", "content": "why "},
            {"type": "text", "content": "so"},
            {"type": "tool_call", "id": "c2", "name": "g", "arguments": '{"a":1}'},
        ]
        assert found["tool_call g"].attributes["gen_ai.tool.call.arguments"] == '{"a":1}'


def test_a_long_text_is_left_out():
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter=exporter)
    with ResponseTrace(tracing, True) as trace:
        trace.requested([GenerationRequest(text_input="x" * MAX_CHARS)])
        trace.began(span := tracing.start("text_completion demo", {}, {}))
        trace.read(0, DELTAS[1])
    trace.ended(span, None, {})
    tracing.close()
    [event] = exporter.get_finished_spans()[0].events
    assert event.attributes.keys() == {"gen_ai.output.messages"}
    assert json.loads(event.attributes["gen_ai.output.messages"])[0]["finish_reason"] == "error"
