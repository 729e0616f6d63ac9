"""Every client reads every message, and the table names them all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import client_cost

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_compares_a_client_with_its_rival():
    costs = {name: [(10.0, 20.0), (12.0, 22.0)] for name in client_cost.READERS}
    lines = client_cost.table(costs | {"clients.Client": [(5.0, 9.0)]}).splitlines()
    assert len(lines) == 2 + len(client_cost.READERS)
    assert any("clients.Client" in line and "0.50 of tritonclient.grpc" in line for line in lines)


def test_an_empty_message_makes_the_comparison_fail():
    with pytest.raises(AssertionError, match="the message is empty"):
        client_cost._require_content("", [], None)


@pytest.mark.slow
def test_every_client_is_measured_on_the_same_messages() -> None:
    command = [sys.executable, "-m", "benchmarks.client_cost", "--messages", "400", "--rounds", "1"]
    done = subprocess.run([*command, "--concurrency", "1,2"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert all(done.stdout.count(name) >= 2 for name in client_cost.READERS)
    assert "concurrency 2, 800 messages a round" in done.stdout
