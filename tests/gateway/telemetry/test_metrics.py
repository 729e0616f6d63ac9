"""Metrics, spans and log lines of real requests."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path

import aiohttp
import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

from contract.errors import EngineFailed
from gateway.config.tenant import Tenant
from gateway.telemetry import metrics
from gateway.telemetry.logs import JsonLines
from gateway.telemetry.metrics import MAX_TENANTS, Metrics
from gateway.telemetry.tracing import Tracing
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.running import gateway, until

REQUEST = {"model": "demo", "prompt": "my secret prompt", "max_tokens": 3}
BOUNDS = (0.5, 1.0, 2.0)
AMOUNTS = st.lists(st.one_of(st.sampled_from(BOUNDS), st.floats(0, 10)), max_size=20)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_a_request_shows_in_every_metric_it_should():
    async with FakeReplica() as replica, gateway(replica) as running:
        await running.post("/v1/completions", REQUEST)
        await running.post("/v1/completions", {"model": "demo"})
        found = await running.metrics()
        where = 'model="demo",operation="text_completion",pool="",source="engine"'
        assert found[f"gen_ai_server_time_to_first_token_seconds_count{{{where}}}"] == 1
        per_token = f"gen_ai_server_time_per_output_token_seconds_count{{{where}}}"
        assert per_token not in found  # in one piece: nothing is known of the time between its tokens
        assert found['gen_ai_server_request_duration_seconds_count{error_type="",' + where + "}"] == 1
        assert found['trident_gateway_tokens_total{direction="input",source="engine",tenant="anonymous"}'] == 3
        assert found['trident_gateway_tokens_total{direction="output",source="engine",tenant="anonymous"}'] == 3
        assert found['trident_gateway_requests_total{code="200",operation="text_completion",protocol="http"}'] == 1
        assert found['trident_gateway_requests_total{code="400",operation="text_completion",protocol="http"}'] == 1
        assert found['trident_gateway_generations_total{end="length",pool="",source="engine"}'] == 1
        assert found["trident_gateway_in_flight"] == 0
        async with aiohttp.ClientSession() as session:
            async with session.post(running.base_url + "/v1/completions", json=REQUEST | {"stream": True}) as answer:
                await answer.text()
        assert (await running.metrics())[per_token] == 1


async def test_refusals_and_failures_are_counted_by_reason():
    script = Script((), fail_after=0, error=EngineFailed("broken"))
    async with FakeReplica(lambda seen: script) as replica:
        config = "[degradation]\nshorter_at = 0.5\noverflow_at = 0.5\nrefuse_at = 0.5"
        async with gateway(replica, max_in_flight=2, config=config) as running:
            await running.post("/v1/completions", REQUEST)
            replica.script = lambda seen: Script((" a",), stall_after=0)
            stalled = asyncio.ensure_future(running.post("/v1/completions", REQUEST))
            await until(lambda: replica.counts.running == 1)
            await running.post("/v1/completions", REQUEST)
            stalled.cancel()
            found = await running.metrics()
            assert found['trident_gateway_rejections_total{reason="pressure"}'] == 1
            assert found['trident_gateway_generations_total{end="EngineFailed",pool="",source="engine"}'] == 1
            await until(lambda: not running.service.live)
            found = await running.metrics()
            assert found["trident_gateway_in_flight"] == 0


def test_tenants_beyond_the_bound_share_one_label():
    metrics = Metrics()
    labels = {metrics.tenant(f"tenant-{n}") for n in range(MAX_TENANTS * 3)}
    assert len(labels) == MAX_TENANTS + 1 and "other" in labels
    assert metrics.tenant("tenant-0") == "tenant-0"


async def test_log_lines_are_json_with_ids_and_without_prompts(caplog: pytest.LogCaptureFixture):
    class Keys:
        def tenant(self, api_key):
            return Tenant("acme")

    caplog.set_level(logging.DEBUG)
    script = Script((" my", " answer"))
    async with FakeReplica(lambda seen: script) as replica, gateway(replica, keys=Keys()) as running:
        await running.post("/v1/completions", REQUEST, x_request_id="quote-me", authorization="Bearer hidden-key")
    lines = [JsonLines().format(record) for record in caplog.records]
    assert "secret" not in "".join(lines) and "answer" not in "".join(lines) and "hidden-key" not in "".join(lines)
    line = next(json.loads(line) for line in lines if '"gateway.request"' in line)
    assert line["request_id"] == "quote-me" and line["tenant"] == "acme" and line["replica"] == replica.url
    assert (line["output_tokens"], line["finish_reason"], line["error_type"]) == (2, "stop", "")


async def test_spans_join_the_callers_trace_and_the_engine_joins_theirs():
    exporter = InMemorySpanExporter()
    async with FakeReplica() as replica, gateway(replica, tracing=Tracing(exporter=exporter)) as running:
        await running.post("/v1/completions", REQUEST, traceparent=TRACE)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    in_order = ("tokenizer.queue", "tokenizer", "engine", "detokenizer.queue", "detokenizer", "response")
    in_engine = ("engine.queue", "engine.prefill", "engine.decode")
    assert set(spans) == {"text_completion demo", "queue", "route", "replica", *in_order, *in_engine}
    for outer, names in (("replica", in_order), ("engine", in_engine)):
        at_ns = spans[outer].start_time
        for name in names:
            assert spans[name].start_time == at_ns and spans[name].parent.span_id == spans[outer].context.span_id
            at_ns = spans[name].end_time
        assert at_ns == spans[outer].end_time
    assert all(f"{span.context.trace_id:032x}" == TRACE.split("-")[1] for span in spans.values())
    root = spans["text_completion demo"]
    assert f"{root.parent.span_id:016x}" == TRACE.split("-")[2]
    assert root.attributes["gen_ai.usage.output_tokens"] == 3
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length",)
    route = spans["route"].attributes
    assert route["trident.route.policy"] == "scored" and route["server.address"] == replica.url
    assert route["trident.route.loads"] == (f"{replica.url}: 0/10000 requests, 0 tokens, KV 0.00",)
    handed = replica.seen[-1].metadata["traceparent"].split("-")
    assert handed[1] == TRACE.split("-")[1] and handed[2] == f"{spans['replica'].context.span_id:016x}"


async def test_an_answer_of_the_cache_has_a_span_and_a_log_line_too(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    exporter, request_body = InMemorySpanExporter(), {**REQUEST, "temperature": 0}
    async with FakeReplica(engine="e") as replica, gateway(replica, tracing=Tracing(exporter=exporter)) as running:
        for _ in range(2):
            await running.post("/v1/completions", request_body, traceparent=TRACE)
    roots = [span for span in exporter.get_finished_spans() if span.name == "text_completion demo"]
    assert [span.attributes.get("trident.cache") for span in roots] == [None, "hit"]
    assert f"{roots[1].parent.span_id:016x}" == TRACE.split("-")[2]
    assert [record.fields["reuse"] for record in caplog.records if "reuse" in getattr(record, "fields", {})] == ["hit"]


async def test_without_tracing_the_callers_context_still_reaches_the_engine():
    async with FakeReplica() as replica, gateway(replica) as running:
        await running.post("/v1/completions", REQUEST, traceparent=TRACE)
        assert replica.seen[-1].metadata["traceparent"] == TRACE
        await running.post("/v1/completions", REQUEST, traceparent="nonsense")
        assert replica.seen[-1].metadata["traceparent"].endswith("-00")


async def test_the_documents_metrics_are_those_on_the_page():
    pages = {page.name: page.read_text("utf-8") for page in (Path(__file__).resolve().parents[3] / "docs").glob("*.md")}
    documented = set(re.findall(r"^\| `((?:trident|gen_ai)_\w+)` \|", pages["gateway.md"], re.MULTILINE))
    elsewhere = set(re.findall(r"^\| `(trident_gateway_\w+)` \|", "\n".join(pages.values()), re.MULTILINE))
    semantic = {"semantic_model": "m", "semantic_url": "http://127.0.0.1:1/v1"}
    async with FakeReplica() as replica, gateway(replica, config="[prices]\nreplica_hour = 1.0", **semantic) as running:
        page = await running.metrics_page()
    named = {line.split()[2] for line in page.splitlines() if line.startswith("# HELP") and "_created" not in line}
    assert documented <= named <= documented | elsewhere


@given(amounts=AMOUNTS)
def test_a_scrape_shows_what_the_librarys_own_metrics_would(amounts: list[float]) -> None:
    pages = []
    for kinds in (metrics, prometheus_client):
        registry = CollectorRegistry()
        counter = kinds.Counter("counted", "text", ("kind",), registry=registry).labels("a")
        gauge = kinds.Gauge("level", "text", registry=registry)
        histogram = kinds.Histogram("taken", "text", ("kind",), registry=registry, buckets=BOUNDS).labels("a")
        for amount in amounts:
            counter.inc(amount)
            counter.inc()
            gauge.inc(amount)
            gauge.dec()
            histogram.observe(amount)
        lines = generate_latest(registry).decode().splitlines()
        pages.append([line for line in lines if "_created" not in line])
    assert pages[0] == pages[1]
