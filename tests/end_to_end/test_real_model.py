"""The model of `make demo`: from a GGUF file in a wheel of the package index to an answer on a real server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients import Client
from server.replica import Replica, running

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    command = [sys.executable, "-m", "build.engine", "--engine", "smollm2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    if done.returncode == 3 and "cannot be had from the package index" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    with running("smollm2", canary_interval_s=3600, stall_s=3600) as server:
        yield server


def test_it_answers_a_question_streamed_or_whole(replica: Replica) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    with Client(replica.grpc_url) as client:
        parts = [delta.text for delta in client.generate(messages=chat, max_tokens=48, temperature=0.0)]
        whole = client.complete(messages=chat, max_tokens=48, temperature=0.0)
    assert len(parts) > 3 and "".join(parts) == whole.text
    assert "Paris" in whole.text and whole.finish_reason == "stop"
