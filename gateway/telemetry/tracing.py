"""Request spans, exported over OTLP. They hold no prompt and no generated text but those of ``content``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from opentelemetry.propagate import extract, inject
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from contract.generation import GenerationRequest, Timings, Usage

TOLERANCE_NS = 1_000_000  # by which two readings of clocks of one machine may differ
PROVIDER = "trident"  # the conventions list companies, and allow other names


class Tracing:
    """Creates the spans of requests and exports them over OTLP.

    Without an endpoint no spans are created; the caller's trace context still reaches the engine unchanged.
    """

    def __init__(self, endpoint: str = "", exporter: SpanExporter | None = None) -> None:
        self._provider: TracerProvider | None = None
        if endpoint and exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(endpoint=endpoint)
        if exporter is not None:
            self._provider = TracerProvider(resource=Resource.create({"service.name": "trident-gateway"}))
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
            self._tracer = self._provider.get_tracer("gateway")

    @property
    def on(self) -> bool:
        return self._provider is not None

    def start(self, name: str, carrier: Mapping[str, str], attributes: Mapping[str, Any]) -> Span | None:
        """Start the span of a request, as a child of the carrier's ``traceparent`` if there is one."""
        if self._provider is None:
            return None
        context = extract(dict(carrier))
        return self._tracer.start_span(name, context=context, kind=SpanKind.SERVER, attributes=dict(attributes))

    def child(self, parent: Span | None, name: str, kind: SpanKind = SpanKind.INTERNAL) -> Span | None:
        """Start a child span; None if ``parent`` is None."""
        if parent is None:
            return None
        return self._tracer.start_span(name, context=set_span_in_context(parent), kind=kind)

    def past(
        self, parent: Span, name: str, start_ns: int, end_ns: int, attributes: Mapping[str, Any] | None = None
    ) -> Span:
        """Record a span that has already ended. start_ns, end_ns: wall clock."""
        context = set_span_in_context(parent)
        span = self._tracer.start_span(name, context=context, start_time=start_ns, attributes=attributes)
        span.end(end_ns)
        return span

    def close(self) -> None:
        """Export the remaining spans."""
        if self._provider is not None:
            self._provider.shutdown()


def traceparent(span: Span | None, carrier: Mapping[str, str]) -> str:
    """Return the ``traceparent`` to send: of the span, else the caller's if it is valid, else ""."""
    if span is None and "traceparent" not in carrier:
        return ""
    headers: dict[str, str] = {}
    inject(headers, context=set_span_in_context(span) if span else extract(dict(carrier)))
    return headers.get("traceparent", "")


def end_span(
    span: Span | None, error: BaseException | None = None, *, end_ns: int | None = None, **attributes: Any
) -> None:
    """End a span. end_ns: wall clock; None for now."""
    if span is None:
        return
    for key, value in attributes.items():
        span.set_attribute(key, value)
    if error is not None:
        span.set_attribute("error.type", type(error).__name__)
        span.set_status(Status(StatusCode.ERROR))
    span.end(end_ns)


def end_request(span: Span | None, trace: Any, error: BaseException | None, attributes: Mapping[str, Any]) -> None:
    """End the span of a request. trace: the content.ResponseTrace that ends it; None where none reads the response."""
    if trace is None:
        end_span(span, error, **attributes)
    else:
        trace.ended(span, error, attributes)


def request_attributes(
    requests: Sequence[GenerationRequest], model: str, session: str, whole: bool = True
) -> dict[str, Any]:
    """Return the attributes of a request's span by OpenTelemetry's GenAI conventions.

    session: "" for none. whole: the requests have all that the caller sent; over gRPC only prompt and max_tokens.
    """
    request, sampling = requests[0], requests[0].sampling
    output = "json" if request.guide is not None and request.guide.kind.startswith("json") else "text"
    found = {
        "gen_ai.operation.name": "text_completion" if request.messages is None else "chat",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.conversation.id": session,
        "gen_ai.output.type": output,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.stream": request.stream if whole else None,
        "gen_ai.request.choice.count": len(requests),
        "gen_ai.request.seed": None if sampling.seed is None else min(sampling.seed, 2**63 - 1),
        "gen_ai.request.stop_sequences": request.stop,
    }
    for name in ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty"):
        found[f"gen_ai.request.{name}"] = getattr(sampling, name) if whole else None
    return {name: value for name, value in found.items() if value not in (None, "", ())}


def generation_attributes(
    usage: Usage | None, finish_reasons: Sequence[str], first_s: float | None = None
) -> dict[str, Any]:
    """Return the attributes of the end, by the same conventions. first_s: until the first token; None for none."""
    found: dict[str, Any] = {"gen_ai.response.finish_reasons": list(finish_reasons)} if finish_reasons else {}
    if first_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = first_s
    if usage is not None:
        found["gen_ai.usage.input_tokens"] = usage.input_tokens
        found["gen_ai.usage.output_tokens"] = usage.output_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    return found


def record_replica(tracing: Tracing, call: Span, timings: Timings | None, now_ns: int) -> None:
    """Record the parts of a replica's call that has been answered, in order and without gaps, by its own instants.

    Of a replica that does not say when it tokenized there are only ``engine``, ``engine.prefill`` and
    ``engine.decode``. The queues of tokenizer and detokenizer, and ``response``, have the network's time in them.
    now_ns: when the last response came, wall clock.
    """
    began_ns = getattr(call, "start_time", None)
    if timings is None or not began_ns:
        return
    whole = timings.tokenized_ns > 0 and timings.detokenized_ns > 0
    last_ns = timings.detokenized_ns if whole else timings.last_token_ns
    own_ns = time.time_ns() - time.monotonic_ns()
    shift_ns = clock_shift_ns(began_ns, now_ns, timings.arrival_ns, last_ns, own_ns)

    scheduled_ns = timings.first_scheduled_ns
    found = [timings.arrival_ns, timings.tokenized_ns or scheduled_ns, scheduled_ns, timings.first_token_ns]
    found += [timings.last_token_ns, timings.received_ns, timings.detokenized_ns]
    # No span ends before it starts, also if a clock was set.
    instants = accumulate((min(now_ns, instant + shift_ns) for instant in found), max, initial=began_ns)
    _, arrival, tokenized, scheduled, first, last, received, detokenized = instants
    if whole:
        tracing.past(call, "tokenizer.queue", began_ns, arrival)
        tracing.past(call, "tokenizer", arrival, tokenized)
    engine = tracing.past(call, "engine", tokenized, last)
    if whole:
        tracing.past(engine, "engine.queue", tokenized, scheduled)
    tracing.past(engine, "engine.prefill", scheduled, first)
    tracing.past(engine, "engine.decode", first, last)
    if whole:
        tracing.past(call, "detokenizer.queue", last, received)
        tracing.past(call, "detokenizer", received, detokenized)
        tracing.past(call, "response", detokenized, now_ns)


def clock_shift_ns(began_ns: int, now_ns: int, first_ns: int, last_ns: int, own_ns: int) -> int:
    """Return what to add to a replica's instants to get the gateway's wall clock.

    began_ns, now_ns: of the call, wall clock. first_ns, last_ns: the replica's within it. own_ns: this machine's shift.
    A shift is possible if it puts the replica's instants inside the call. If our own is, the replica is on this machine
    and all instants are exact. Another machine's clock began at another time, by far more than a call takes; then the
    last instant is put where the answer came, and what is not known, the way there and back, lies before the first.
    """
    possible = began_ns - first_ns - TOLERANCE_NS <= own_ns <= now_ns - last_ns + TOLERANCE_NS
    return own_ns if possible else now_ns - last_ns
