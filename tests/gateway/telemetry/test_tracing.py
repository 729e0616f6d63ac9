"""Spans: children of the caller's trace, ended with errors; none without an exporter."""

from __future__ import annotations

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from contract.errors import EngineFailed
from contract.generation import GenerationRequest, Guide, Usage
from gateway.telemetry.tracing import Tracing, end_span, generation_attributes, request_attributes, traceparent

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_without_an_exporter_the_callers_context_is_handed_on():
    tracing = Tracing()
    assert not tracing.on and tracing.start("chat demo", {}, {}) is None and tracing.child(None, "queue") is None
    assert traceparent(None, {"traceparent": PARENT}) == PARENT
    assert traceparent(None, {}) == ""
    end_span(None, EngineFailed("ignored"))


def test_spans_join_the_callers_trace_and_carry_errors():
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter=exporter)
    span = tracing.start("chat demo", {"traceparent": PARENT}, {"key": "value"})
    child = tracing.child(span, "queue")
    assert traceparent(child, {}).split("-")[1] == PARENT.split("-")[1]
    end_span(child, EngineFailed("broken"), attempts=2)
    tracing.past(span, "earlier", 1, 2)
    end_span(span)
    tracing.close()
    found = {one.name: one for one in exporter.get_finished_spans()}
    assert found["queue"].status.status_code is StatusCode.ERROR
    assert dict(found["queue"].attributes) == {"attempts": 2, "error.type": "EngineFailed"}
    assert found["queue"].parent.span_id == found["chat demo"].context.span_id
    assert (found["earlier"].start_time, found["earlier"].end_time) == (1, 2)


def test_what_the_gateway_does_not_read_of_a_request_is_not_told():
    asked = [GenerationRequest(text_input="x", max_tokens=9, guide=Guide("json"))]
    told = request_attributes(asked, "demo", "", whole=False)
    assert told["gen_ai.request.max_tokens"] == 9 and told["gen_ai.output.type"] == "json"
    assert not {"gen_ai.request.temperature", "gen_ai.request.stream", "gen_ai.conversation.id"} & told.keys()
    assert request_attributes(asked, "demo", "", whole=True)["gen_ai.request.temperature"] == 1.0


def test_generation_attributes_are_those_of_the_genai_conventions():
    assert generation_attributes(None, []) == {}
    found = generation_attributes(Usage(3, 2, 1), ["stop"])
    assert found["gen_ai.usage.input_tokens"] == 3 and found["gen_ai.usage.cache_read.input_tokens"] == 1
    assert found["gen_ai.response.finish_reasons"] == ["stop"]
