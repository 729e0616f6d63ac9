"""Answers through a real gateway, whole and in part: a branch that is late, a replica that dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path

import openai
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from examples.rag.index import Index
from examples.rag.orchestrator import Orchestrator
from examples.rag.tools import Tables
from gateway.telemetry.tracing import Tracing
from tests.fakes.encoder_replica import EncoderReplica
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.running import gateway, until

ROOT = Path(__file__).resolve().parents[3]
CONFIG = """
[pools]
first = { replicas = "FIRST" }
second = { replicas = "SECOND" }
encoder = { kind = "encoder", replicas = "ENCODER" }
[models.first]
pools = ["first"]
[models.second]
pools = ["second"]
"""
GOOD = Script(("A", " permit", " is", " the", " right", " to", " generate", " [1]."))

pytestmark = pytest.mark.slow


@contextlib.asynccontextmanager
async def asking(tmp_path: Path, first: Script, second: Script, delays_s: dict[str, float], **more):
    (tmp_path / "a.md").write_text("# Permits\nA permit is the right to generate that admission gives.\n")
    async with EncoderReplica() as encoder, FakeReplica(lambda _: first) as one, FakeReplica(lambda _: second) as two:
        config = CONFIG.replace("FIRST", one.url).replace("SECOND", two.url).replace("ENCODER", encoder.url)
        prompts = ROOT / "examples" / "rag" / "prompts"
        async with gateway(config=config, prompts=prompts, **more) as running:
            await until(lambda: len(running.service.replicas.ready()) == 3)
            async with openai.AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key="none") as client:
                index = await Index.build(client, "encoder", tmp_path, tmp_path / "index.npz")
                made = Orchestrator(client, index, Tables(ROOT / "docs"), ("first", "second"), delays_s)
                yield one, two, made


def outcomes(answer) -> dict[str, str]:
    return {branch.name: branch.outcome for branch in answer.branches}


async def test_two_models_answer_under_one_trace_and_one_budget(tmp_path: Path):
    exporter = InMemorySpanExporter()
    async with asking(tmp_path, GOOD, Script((" bananas",)), {}, tracing=Tracing(exporter=exporter)) as (one, two, ask):
        answer = await ask.answer("What is a permit?", seconds=20, tokens=900)
        assert not answer.partial and answer.model == "first" and answer.checked.text.endswith("[1]")
        assert set(outcomes(answer)) == {"retrieval", "tools", "model first", "model second"}
        assert [source.page for source in answer.sources][:1] == ["glossary.md"]  # what a tool knows comes first
        for replica in (one, two):
            seen = replica.seen[-1]
            size = len(json.loads(seen.value("messages"))[-1]["content"])
            assert seen.value("max_tokens") + size // 4 <= 450
    spans = [span for span in exporter.get_finished_spans() if span.parent is not None and span.parent.is_remote]
    assert len(spans) >= 2 and {f"{span.context.trace_id:032x}" for span in spans} == {answer.trace_id}


async def test_a_branch_that_is_late_is_left_out_and_the_answer_is_in_time(tmp_path: Path):
    async with asking(tmp_path, GOOD, GOOD, {"retrieval": 60.0, "model second": 60.0}) as (_, _, ask):
        began_s = time.monotonic()
        answer = await ask.answer("What is a permit?", seconds=6.0)
        assert time.monotonic() - began_s < 30.0
        assert answer.partial and outcomes(answer)["retrieval"] == outcomes(answer)["model second"] == "late"
        assert answer.model == "first" and answer.checked.cited == (1,)


async def test_a_replica_that_dies_leaves_the_other_models_answer(tmp_path: Path):
    gate = asyncio.Event()  # never opened
    async with asking(tmp_path, GOOD, Script(("A", " permit") * 20, gate=gate, gate_at=2), {}) as (_, two, ask):
        asked = asyncio.create_task(ask.answer("What is a permit?", seconds=60.0))
        await until(lambda: two.counts.running == 1)
        await two.stop()
        answer = await asked
        assert answer.partial and answer.model == "first" and answer.checked.cited == (1,)
        assert outcomes(answer)["model first"] == "done" and outcomes(answer)["model second"] != "done"
        assert answer.seconds < 60.0


async def test_without_any_model_the_sources_answer(tmp_path: Path):
    late = Script((" late",), first_token_s=60.0)
    async with asking(tmp_path, late, late, {}) as (_, _, ask):
        answer = await ask.answer("What is a permit?", seconds=5.0)
        assert answer.model == "" and answer.checked.cited and "right to generate" in answer.checked.text
