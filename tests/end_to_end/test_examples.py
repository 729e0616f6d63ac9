"""The examples for one server, against a real tritonserver with the demo engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("streaming", "length: 16 tokens"),
        ("chat", "[5 messages]"),
        ("many_streams", "32 streams"),
        ("cancel", "stopped: cancelled"),
        ("balanced", "20 completions from 1 replicas"),
        ("errors_and_retries", "fix the request: temprature"),
        ("triton_client", "\n"),
    ],
)
def test_the_example_runs_against_tritonserver(replica, name: str, part: str):
    command = [sys.executable, "-m", f"examples.{name}", replica.grpc_url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert part in done.stdout
