"""Where a replica's instants are put on the gateway's clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from contract.generation import Timings
from gateway.telemetry import replica_spans
from gateway.telemetry.tracing import Tracing

INSTANT = st.integers(1, 10**18)
BEGAN_NS, NOW_NS = 1_700_000_000_000_000_000, 1_700_000_001_000_000_000


def recorded(timings: Timings) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter=exporter)
    call = tracing._tracer.start_span("replica", start_time=BEGAN_NS)
    replica_spans.record(tracing, call, timings, NOW_NS)
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
    shift = replica_spans.clock_shift_ns
    # Instants 100 and 400 of a clock that is 1000 behind, within a call from 1050 to 1500.
    assert shift(1_050_000_000, 1_500_000_000, 100_000_000, 400_000_000, 1_000_000_000) == 1_000_000_000
    assert shift(1_050_000_000, 1_500_000_000, 100_000_000, 400_000_000, 7_000_000_000) == 1_100_000_000
    assert shift(1_050_000_000, 1_500_000_000, 100_000_000, 400_000_000, -7_000_000_000) == 1_100_000_000
