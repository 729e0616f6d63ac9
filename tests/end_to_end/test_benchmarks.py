"""The benchmarks that start servers of their own, in their smallest form: that they run, and that their sums add up."""

import json
import subprocess
import sys

import pytest

from benchmarks import efficiency, start
from tests.end_to_end.conftest import ROOT


@pytest.fixture
def benchmark(engine_dir, tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "benchmarks", *arguments, "--out", str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout, json.loads((tmp_path / f"{arguments[0]}.json").read_text())

    return run


def test_efficiency_measures_every_path_on_equal_work(engine_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(efficiency, "output_and_goal", lambda engine: (16, 0.70))  # 128 tokens would show no more
    assert efficiency.run(["demo"], rounds=1, concurrencies=[1], out=tmp_path) == 0
    output, kept = capsys.readouterr().out, json.loads((tmp_path / "efficiency.json").read_text())
    batches = {batch["path"]: batch for batch in kept["batches"]["demo"]}
    assert set(batches) == {"raw engine", "engine, gRPC", "ensemble", "packed ensemble", "ensemble, 1 token/msg"}
    assert {batch["tokens"] for batch in batches.values()} == {4 * 16}
    assert all(batch["engine_cpu_s"] > 0 and len(batch["ttfts_s"]) == 4 for batch in batches.values())
    assert set(batches["ensemble"]["serving_cpu_s"]) >= {"tritonserver", "engine stub", "detokenizer", "tokenizer"}
    assert "TTFT added at 1" in output and "other processes" in output


def test_hops_find_where_the_first_token_goes(benchmark):
    _, kept = benchmark("hops", "--rounds", "1", "--concurrency", "1", "--tokens", "8")
    parts = {name: seconds for name, seconds, _ in kept["1"]["first_token"]}
    whole_s = parts.pop("time to first token")
    assert sum(parts.values()) == pytest.approx(whole_s) and parts["prefill"] > 0
    assert all(batch["messages"] > 0 for batches in kept["1"]["batches"].values() for batch in batches)


def test_a_cancel_gives_its_place_to_the_next_in_line(benchmark):
    output, kept = benchmark("cancel", "--engine", "demo", "--samples", "2")
    figures = kept["figures"]
    assert figures["count"] == 2 and figures["streams"] > 0
    assert 0 < figures["p50"] <= figures["max"] and "next request" in output


def test_a_textbook_ensemble_is_measured_beside_ours(benchmark):
    _, kept = benchmark("textbook", "--rounds", "1", "--concurrency", "2", "--tokens", "8", "--step-ms", "2")
    batches = {batch["path"]: batch for batch in kept["batches"]}
    ours = {"ensemble, 1 token/msg", "packed, 1 token/msg", "ensemble", "packed"}
    assert set(batches) == {"textbook"} | ours and len(kept["compared"]) == 2 * len(ours) + len(batches)
    assert {batch["tokens"] for batch in batches.values()} == {2 * 8}
    assert all(batch["serving_cpu_s"].keys() >= {"tritonserver", "engine stub"} for batch in batches.values())


def test_a_replica_is_started_loaded_and_its_engine_killed(benchmark):
    output, kept = benchmark("start", "--engine", "demo", "--streams", "2", "--rounds", "1")
    found = {name: one["values"][0] for name, one in kept["compared"].items()}
    assert set(found) == {start.START, start.RESTART, start.IDLE, start.STREAM} and "a stream" in output
    assert found[start.START] > 0 and found[start.RESTART] > 0 and 50 < found[start.IDLE] < 5000
