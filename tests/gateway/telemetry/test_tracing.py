"""Spans: children of the caller's trace, ended with errors, none without an exporter; and a replica's instants."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from contract.errors import EngineFailed
from contract.generation import GenerationRequest, Guide, Timings, Usage
from gateway.telemetry.tracing import (
    Tracing,
    clock_shift_ns,
    end_span,
    generation_attributes,
    record_replica,
    request_attributes,
    traceparent,
)

INSTANT = st.integers(1, 10**18)
BEGAN_NS, NOW_NS = 1_700_000_000_000_000_000, 1_700_000_001_000_000_000
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


def recorded(timings: Timings) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter=exporter)
    call = tracing._tracer.start_span("replica", start_time=BEGAN_NS)
    record_replica(tracing, call, timings, NOW_NS)
    call.end(NOW_NS)
    tracing.close()
    return list(exporter.get_finished_spans())


@given(st.lists(INSTANT, min_size=7, max_size=7), st.booleans(), st.booleans())
def test_children_are_inside_their_parent_in_order_whatever_a_replica_says(
    instants: list[int], ordered: bool, whole: bool
):
    arrival, tokenized, scheduled, first, last, received, done = sorted(instants) if ordered else instants
    stages = (tokenized, received, done) if whole else ()
    spans = {span.name: span for span in recorded(Timings(arrival, scheduled, first, last, *stages))}
    by_id = {span.context.span_id: span for span in spans.values()}
    for span in spans.values():
        assert span.start_time <= span.end_time
        if span.parent is not None:
            parent = by_id[span.parent.span_id]
            assert parent.start_time <= span.start_time and span.end_time <= parent.end_time
    children = sorted((s for s in spans.values() if s.parent), key=lambda s: (s.start_time, s.end_time))
    assert whole == ("tokenizer" in spans) == ("detokenizer" in spans) == ("engine.queue" in spans)
    direct = [span for span in children if span.parent.span_id == spans["replica"].context.span_id]
    assert all(one.end_time <= two.start_time for one, two in zip(direct, direct[1:], strict=False))
    if whole:
        assert sum(span.end_time - span.start_time for span in direct) == NOW_NS - BEGAN_NS


def test_a_replica_on_this_machine_is_exact_and_another_one_ends_where_its_answer_came():
    shift = clock_shift_ns
    # Instants 100 and 400 of a clock that is 1000 behind, within a call from 1050 to 1500.
    assert shift(1_050_000_000, 1_500_000_000, 100_000_000, 400_000_000, 1_000_000_000) == 1_000_000_000
    assert shift(1_050_000_000, 1_500_000_000, 100_000_000, 400_000_000, 7_000_000_000) == 1_100_000_000
    assert shift(1_050_000_000, 1_500_000_000, 100_000_000, 400_000_000, -7_000_000_000) == 1_100_000_000
