"""Spans as an OTLP receiver gets them, and metrics, against the registry of OpenTelemetry's GenAI conventions."""

from __future__ import annotations

import enum
import http.server
import json
import re
import threading
from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as registry
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from opentelemetry.semconv.attributes import error_attributes

from contract.errors import EngineFailed
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.tracing import PROVIDER
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.config.test_configuration import ALICE, BOB, keys
from tests.gateway.running import gateway

NAMES = {value for name, value in vars(registry).items() if name.startswith("GEN_AI_")}
ENUMS = {
    registry.GEN_AI_OPERATION_NAME: registry.GenAiOperationNameValues,
    registry.GEN_AI_PROVIDER_NAME: enum.Enum("Provider", {"own": PROVIDER}),  # the conventions allow own values
    registry.GEN_AI_OUTPUT_TYPE: registry.GenAiOutputTypeValues,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


class Receiver(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def receiver() -> Iterator[http.server.HTTPServer]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        server.bodies = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def received(server: http.server.HTTPServer) -> list[tuple]:
    """(span, its attributes) of all that came."""
    found = []
    for body in server.bodies:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                found += [(span, attributes(span)) for span in scope.spans]
    return found


def attributes(one) -> dict:
    found = {}
    for pair in one.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [inner.string_value for inner in value.values] if kind == "array_value" else value
    return found


def test_the_metrics_are_the_conventions_own():
    ours = {family.name for family in Metrics().registry.collect() if family.name.startswith("gen_ai_")}
    servers = [value for name, value in vars(gen_ai_metrics).items() if name.startswith("GEN_AI_SERVER_")]
    assert ours == {f"{name.replace('.', '_')}_seconds" for name in servers}


@pytest.mark.slow
async def test_what_is_exported_is_in_the_registry(receiver: http.server.HTTPServer):
    def script(seen) -> Script:
        if "fail" in str(seen.inputs):
            return Script(("a",), refuse=EngineFailed("broken"))
        return Script(("<tool_call>", '{"name": "f", "arguments": {"a": 1}}', "</tool_call>"))

    config = keys(ALICE, BOB) + '[tracing]\ncontent = ["o0"]\n'
    endpoint = f"http://127.0.0.1:{receiver.server_port}/v1/traces"
    options = {"otlp_endpoint": endpoint, "tool_format": "hermes", "tool_guides": False}
    async with FakeReplica(script) as replica, gateway(replica, config=config, **options) as running:
        chat = {"model": "demo", "messages": [{"role": "user", "content": "secret"}], "tools": [TOOL]}
        more = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7, "stop": ["x"], "max_tokens": 9, "n": 2}
        for key in (ALICE, BOB):
            asked = {"authorization": f"Bearer {key}", "x_session_id": "conversation-1"}
            status, _, answer = await running.post("/v1/chat/completions", {**chat, **more}, **asked)
            assert status == 200 and answer["choices"][0]["finish_reason"] == "tool_calls"
            await running.post("/v1/completions", {"model": "demo", "prompt": "secret", "temperature": 0}, **asked)
            await running.post("/v1/completions", {"model": "demo", "prompt": "secret", "temperature": 0}, **asked)
            await running.post("/v1/completions", {"model": "demo", "prompt": "fail"}, **asked)
            await running.post("/v1/responses", {"model": "demo", "input": "secret"}, **asked)
    found = received(receiver)
    for span, pairs in found:
        for name, value in [*pairs.items(), *(pair for event in span.events for pair in attributes(event).items())]:
            if name.startswith("gen_ai."):
                assert name in NAMES, f"{name} of {span.name}"
                if name in ENUMS:
                    assert value in [member.value for member in ENUMS[name]], f"{name}={value}"
    requests = [(span, pairs) for span, pairs in found if registry.GEN_AI_OPERATION_NAME in pairs]
    assert len(requests) == 10
    for span, pairs in requests:
        assert span.kind == span.SPAN_KIND_SERVER
        assert span.name == f"{pairs[registry.GEN_AI_OPERATION_NAME]} {pairs[registry.GEN_AI_REQUEST_MODEL]}"
        assert pairs[registry.GEN_AI_CONVERSATION_ID] == "conversation-1"
        texts = [pair for event in span.events for pair in attributes(event)]
        assert (pairs["trident.tenant"] == "o0/t") == (registry.GEN_AI_INPUT_MESSAGES in texts)
        assert pairs["trident.tenant"] == "o0/t" or "secret" not in str(span)
    [failed, *_] = [pairs for _, pairs in requests if error_attributes.ERROR_TYPE in pairs]
    assert failed[error_attributes.ERROR_TYPE] == "EngineFailed"
    span, pairs = next((span, pairs) for span, pairs in requests if pairs["trident.operation"] == "chat")
    assert pairs[registry.GEN_AI_REQUEST_TEMPERATURE] == 0.5 and pairs[registry.GEN_AI_REQUEST_TOP_K] == 5
    assert pairs[registry.GEN_AI_REQUEST_STOP_SEQUENCES] == ["x"] and pairs[registry.GEN_AI_REQUEST_CHOICE_COUNT] == 2
    assert pairs[registry.GEN_AI_RESPONSE_FINISH_REASONS] == ["stop", "stop"]
    assert pairs[registry.GEN_AI_USAGE_OUTPUT_TOKENS] == 6 and pairs[registry.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] > 0
    [event] = span.events
    [asked] = json.loads(attributes(event)[registry.GEN_AI_INPUT_MESSAGES])
    assert asked == {"role": "user", "parts": [{"type": "text", "content": "secret"}]}
    assert len(json.loads(attributes(event)[registry.GEN_AI_OUTPUT_MESSAGES])) == 2
    calls = [(span, pairs) for span, pairs in found if span.name == "tool_call f"]
    assert len(calls) == 4 and all(re.match("call_", pairs[registry.GEN_AI_TOOL_CALL_ID]) for _, pairs in calls)
