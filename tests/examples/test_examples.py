"""Every example runs as its first lines describe, against scripted replicas and a gateway in front of one."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from contract.generation import FinishReason
from tests.fakes.replica import FakeReplica, Script, SeenRequest, echo, replica_in_thread
from tests.gateway.running import gateway

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))

pytestmark = pytest.mark.slow


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, "-m", f"examples.{name}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def paced(seen: SeenRequest) -> Script:
    return Script(echo(seen).tokens, FinishReason.LENGTH, gap_s=0.01)


def test_streaming():
    with replica_in_thread() as replica:
        shown = run("streaming", replica.url)
    assert shown.count("[length: 16 tokens]") == 2 and shown.count(" fibonacci(n):") == 16


def test_chat():
    with replica_in_thread() as replica:
        shown = run("chat", replica.url)
        assert "[5 messages]" in shown and shown.count("assistant: ") == 2
        assert [len(json.loads(seen.value("messages"))) for seen in replica.seen] == [2, 4]


def test_many_streams():
    with replica_in_thread() as replica:
        assert "32 streams, 512 tokens" in run("many_streams", replica.url)
        assert replica.counts.finished == 32


def test_cancel():
    with replica_in_thread(paced) as replica:
        shown = run("cancel", replica.url)
        assert "left after 3 tokens" in shown and "stopped: cancelled" in shown
        assert "deadline: the deadline of 0.05 s passed" in shown
        assert replica.counts.stopped_ids == ["example-1"]


def test_balanced():
    with replica_in_thread() as one, replica_in_thread() as two:
        shown = run("balanced", f"{one.url},{two.url}")
        assert "20 completions from 2 replicas" in shown and shown.count("healthy, 0 outstanding") == 2
        assert min(one.counts.finished, two.counts.finished) > 0


def test_errors_and_retries():
    with replica_in_thread() as replica:
        shown = run("errors_and_retries", replica.url)
    for part in ("fix the request: max_tokens", "fix the request: temperature", "fix the request: temprature"):
        assert part in shown
    assert "Unavailable: True" in shown


def test_triton_client():
    with replica_in_thread() as replica:
        assert run("triton_client", replica.url).split()[:3] == ["def", "fibonacci(n):", "def"]


async def test_batch(tmp_path: Path):
    async with FakeReplica() as replica, gateway(replica, batch_db=tmp_path / "batches") as running:
        shown = await asyncio.to_thread(run, "batch", f"{running.base_url}/v1")
    assert "completed: 3 of 3" in shown and "line-2: ' import os import os" in shown


def test_every_example_has_a_test():
    assert {f"test_{name}" for name in EXAMPLES} <= globals().keys()
