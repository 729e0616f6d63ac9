"""Every client reads every message, and the table names them all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_client_is_measured_on_the_same_messages(tmp_path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.client_cost", "--messages", "60", "--tokens", "30", "--rounds", "1"]
    command += ["--concurrency", "1,2"]
    done = subprocess.run([*command, "--json", str(figures)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    measured = json.loads(figures.read_text())["per_message"]
    assert measured.keys() == {"1", "2"}
    for costs in measured.values():
        assert set(costs) >= {"clients.AsyncClient", "clients.Client", "tritonclient.grpc", "tritonclient.grpc.aio"}
        for name, turns in costs.items():
            assert name in done.stdout
            assert len(turns) == 1 and turns[0]["cpu_us"] > 0
    assert "concurrency 2" in done.stdout and "60 messages a round" in done.stdout
    assert "of tritonclient.grpc.aio" in done.stdout
