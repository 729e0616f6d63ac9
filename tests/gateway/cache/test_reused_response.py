"""Answers that no engine made: in metrics, spans and log lines, with where they came from."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import aiohttp
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.telemetry.tracing import Tracing
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.running import Running, gateway, until

COMPLETIONS = "/v1/completions"
GREEDY = {"model": "demo", "prompt": "one two", "max_tokens": 3, "temperature": 0}
TEXT = (" a", " b", " c")


def by_source(page: dict[str, float], name: str, **labels: str) -> dict[str, float]:
    """Values of a family by its label ``source``, added up over the other labels."""
    found: Counter = Counter()
    for sample, value in page.items():
        if sample.startswith(name + "{") and all(f'{key}="{condition}"' in sample for key, condition in labels.items()):
            found[sample.partition('source="')[2].partition('"')[0]] += value
    return {source: value for source, value in found.items() if value}


async def fourteen(running: Running, replica: FakeReplica, gate: asyncio.Event) -> None:
    """3 made, 5 from the cache, 4 coalesced, 2 replayed."""
    alike = [asyncio.ensure_future(running.post(COMPLETIONS, GREEDY)) for _ in range(5)]
    # One generation and four who read it with the first.
    await until(lambda: replica.counts.running == 1 and running.service.metrics.in_flight._value.get() == 5)
    gate.set()
    await asyncio.gather(*alike)
    for _ in range(5):
        await running.post(COMPLETIONS, GREEDY)
    await running.post(COMPLETIONS, {**GREEDY, "temperature": 1})
    for _ in range(3):
        await running.post(COMPLETIONS, {**GREEDY, "prompt": "another"}, idempotency_key="again")


async def test_fourteen_answers_are_fourteen_in_every_metric_by_source():
    gate = asyncio.Event()
    script = Script(TEXT, gate=gate, gate_at=1)
    expected = {"engine": 3, "cache": 5, "coalesced": 4, "replayed": 2}
    async with FakeReplica(lambda seen: script, engine="e" * 64) as replica, gateway(replica) as running:
        await fourteen(running, replica, gate)
        page = await running.metrics()
        for name in (
            "gen_ai_server_request_duration_seconds_count",
            "gen_ai_server_time_to_first_token_seconds_count",
            "trident_gateway_generations_total",
        ):
            assert by_source(page, name) == expected, name
        tokens = {source: 3 * count for source, count in expected.items()}
        assert by_source(page, "trident_gateway_tokens_total", direction="output") == tokens
        inputs = by_source(page, "trident_gateway_tokens_total", direction="input")
        assert inputs.keys() == expected.keys() and all(inputs.values())
        assert page["trident_gateway_in_flight"] == 0
        assert not by_source(page, "gen_ai_server_time_per_output_token_seconds_count")  # each came in one piece


async def streamed(running: Running) -> None:
    async with aiohttp.ClientSession() as session:
        body = {**GREEDY, "temperature": 1, "stream": True}
        await (await session.post(running.base_url + COMPLETIONS, json=body)).read()


async def test_a_canary_stands_beside_the_stable_pool():
    async with FakeReplica() as stable, FakeReplica() as canary:
        where = f"stable={stable.url};canary={canary.url}"
        async with gateway(stable, canary, replicas=where, config="[pools]\nstable = 1\ncanary = 0\n") as running:
            await streamed(running)
            running.service.configuration.path.write_text("[pools]\nstable = 0\ncanary = 1\n")
            await running.service.configuration.reload()
            await streamed(running)
            page = await running.metrics()
    for pool in ("stable", "canary"):
        for name in ("request_duration", "time_to_first_token", "time_per_output_token"):
            assert by_source(page, f"gen_ai_server_{name}_seconds_count", pool=pool) == {"engine": 1}


async def test_spans_and_log_lines_say_the_source_and_the_tokens(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    exporter = InMemorySpanExporter()
    script = Script(TEXT)
    async with FakeReplica(lambda seen: script, engine="e" * 64) as replica:
        async with gateway(replica, tracing=Tracing(exporter=exporter)) as running:
            for _ in range(2):
                await running.post(COMPLETIONS, GREEDY)
    made, reused = [span.attributes for span in exporter.get_finished_spans() if span.parent is None]
    assert (made["trident.source"], reused["trident.source"]) == ("engine", "cache")
    for name in ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens", "gen_ai.response.finish_reasons"):
        assert made[name] == reused[name], name
    lines = [record.fields for record in caplog.records if "finish_reason" in getattr(record, "fields", {})]
    assert [line["output_tokens"] for line in lines] == [3, 3] and lines[1]["ttft_s"] is not None


async def test_a_reader_that_leaves_counts_what_it_had_and_leaves_nothing_behind():
    gate = asyncio.Event()
    script = Script((" a",) * 10, gate=gate, gate_at=4)
    async with FakeReplica(lambda seen: script, engine="e" * 64) as replica, gateway(replica) as running:
        body = {**GREEDY, "max_tokens": 10, "stream": True}
        async with aiohttp.ClientSession() as session:
            first = await session.post(running.base_url + COMPLETIONS, json=body)
            second = await session.post(running.base_url + COMPLETIONS, json=body)
            assert second.headers["x-trident-cache"] == "coalesced"
            text = b""
            while text.count(b'"text":" a"') < 4:
                text += await second.content.readany()
            second.close()
            await until(lambda: running.service.metrics.in_flight._value.get() == 1)
            gate.set()
            assert (await first.text()).count('"text":" a"') == 10
        page = await running.metrics()
    assert by_source(page, "trident_gateway_generations_total", end="Cancelled") == {"coalesced": 1}
    assert by_source(page, "trident_gateway_tokens_total", direction="output") == {"engine": 10, "coalesced": 4}
    assert page["trident_gateway_in_flight"] == 0
