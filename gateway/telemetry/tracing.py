"""Request spans, exported over OTLP. They hold no prompt and no generated text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.propagate import extract, inject
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from contract.generation import Usage


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

    def past(self, parent: Span, name: str, start_ns: int, end_ns: int) -> Span:
        """Record a span that has already ended. start_ns, end_ns: wall clock."""
        span = self._tracer.start_span(name, context=set_span_in_context(parent), start_time=start_ns)
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


def generation_attributes(usage: Usage | None, finish_reasons: Sequence[str]) -> dict[str, Any]:
    """Return span attributes by OpenTelemetry's GenAI conventions."""
    found: dict[str, Any] = {"gen_ai.response.finish_reasons": list(finish_reasons)} if finish_reasons else {}
    if usage is not None:
        found["gen_ai.usage.input_tokens"] = usage.input_tokens
        found["gen_ai.usage.output_tokens"] = usage.output_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    return found
