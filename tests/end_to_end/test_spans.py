"""The spans of a replica say what its own metrics say: real times, in order, that add up to the call."""

from __future__ import annotations

import asyncio
import urllib.request
from collections import defaultdict

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

for needed in ("starlette", "uvicorn", "orjson", "opentelemetry.sdk", "httptools"):
    pytest.importorskip(needed)

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.telemetry.tracing import Tracing
from server.replica import Replica
from tests.gateway.running import gateway, until

pytestmark = pytest.mark.end_to_end
PHASES = {"tokenizer": "tokenize", "engine.queue": "queue", "engine.prefill": "prefill"}
AT_ONCE = 24
IN_ORDER = ("tokenizer.queue", "tokenizer", "engine", "detokenizer.queue", "detokenizer", "response")


def phases(replica: Replica) -> dict[str, tuple[float, float]]:
    """(sum in seconds, count) of the server's own histogram, by phase."""
    with urllib.request.urlopen(replica.metrics_url, timeout=60) as page:
        families = text_string_to_metric_families(page.read().decode())
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for family in families:
        for sample in family.samples:
            if sample.name.startswith("trident_time_to_first_token_phase_seconds_"):
                found[sample.labels["phase"]][sample.name.rpartition("_")[2]] = sample.value
    return {phase: (values["sum"], values["count"]) for phase, values in found.items()}


@pytest.mark.parametrize("streaming", [False, True])
async def test_spans_are_true(replica: Replica, streaming: bool):
    exporter = InMemorySpanExporter()
    urls = {replica.grpc_url: replica.metrics_url}
    async with gateway(
        replicas=replica.grpc_url, metrics_urls=urls, tracing=Tracing(exporter=exporter), max_body_bytes=10**6
    ) as running:
        before = phases(replica)
        bodies = [
            {"model": "demo", "prompt": f"{n} " + "the cat sat " * 40, "max_tokens": 8, "stream": streaming}
            for n in range(AT_ONCE)
        ]
        answers = await asyncio.gather(*(post_status(running.base_url, body) for body in bodies))
        assert answers == [200] * AT_ONCE
        for phase in PHASES.values():  # metrics are shown every 100 ms
            await until(lambda p=phase: phases(replica)[p][1] - before.get(p, (0, 0))[1] >= AT_ONCE)
        after = phases(replica)
    spans = exporter.get_finished_spans()
    by_parent = defaultdict(list)
    for span in spans:
        if span.parent is not None:
            by_parent[span.parent.span_id].append(span)
    calls = [span for span in spans if span.name == "replica"]
    assert len(calls) == AT_ONCE
    for call in calls:
        parts = sorted(by_parent[call.context.span_id], key=lambda span: IN_ORDER.index(span.name))
        assert tuple(span.name for span in parts) == IN_ORDER
        edges = [edge for span in parts for edge in (span.start_time, span.end_time)]
        assert edges == sorted(edges) and edges[0] >= call.start_time and edges[-1] <= call.end_time
        assert sum(span.end_time - span.start_time for span in parts) == call.end_time - call.start_time
    for name, phase in PHASES.items():
        ours_s = sum(span.end_time - span.start_time for span in spans if span.name == name) / 1e9
        theirs_s = after[phase][0] - before.get(phase, (0.0, 0.0))[0]
        count = after[phase][1] - before.get(phase, (0.0, 0.0))[1]
        assert ours_s > 0
        if count == AT_ONCE:  # no other request came meanwhile, such as a liveness probe
            assert ours_s == pytest.approx(theirs_s, rel=1e-3, abs=1e-5), name
        else:
            assert ours_s <= theirs_s * 1.001 + 1e-5, name


async def post_status(base_url: str, body: dict) -> int:
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{base_url}/v1/completions", json=body) as answer:
            await answer.read()
            return answer.status
