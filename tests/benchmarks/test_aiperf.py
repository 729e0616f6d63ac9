import json

import pytest

from benchmarks import aiperf
from benchmarks.environments import Environment
from contract.errors import EngineFailed

RESULT = {
    "request_throughput": {"unit": "requests/sec", "avg": 18.25},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 1171.0},
    "time_to_first_token": {"unit": "ms", "avg": 50.0, "p50": 47.04, "p95": 81.1},
    "request_latency": {"unit": "ms", "p50": 486.1, "p95": 525.3},
    "error_request_count": {"avg": 2.0},
}


def test_its_result_becomes_a_row_and_what_it_did_not_measure_a_dash(tmp_path):
    (tmp_path / "r.json").write_text(json.dumps(RESULT))
    row = dict(zip([*aiperf.header(), "failed"], aiperf.read(tmp_path / "r.json"), strict=True))
    assert row["requests/s"] == "18.2" and row["tok/s"] == "1,171.0" and row["TTFT ms p95"] == "81.1"
    assert row["ITL ms p50"] == "-" and row["failed"] == "2"


@pytest.fixture
def pretender(tmp_path, monkeypatch):
    """A program in aiperf's place that notes its arguments and writes a result, or fails."""
    folder = tmp_path / "env"
    (folder / "bin").mkdir(parents=True)
    monkeypatch.setattr("benchmarks.environments.FOLDER", tmp_path)
    environment = Environment("env", ())
    (folder / ".installed").write_text(environment.specification)
    monkeypatch.setattr(aiperf, "ENVIRONMENT", environment)

    def write(script):
        (folder / "bin" / "aiperf").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "bin" / "aiperf").chmod(0o755)

    return write


def test_every_load_is_run_and_tabled_and_a_failed_one_is_told(pretender, tmp_path, capsys):
    keeps = f"echo '{json.dumps(RESULT)}' > \"$out/{aiperf.RESULT}\""
    pretender(
        "while [ $# -gt 0 ]; do case $1 in --artifact-dir) out=$2;;"
        f' --request-rate) echo "no rates today"; exit 3;; esac; shift; done; {keeps}'
    )
    out = tmp_path / "out"
    assert aiperf.run("http://127.0.0.1:9", "demo", tmp_path, [1, 30], [4.0], 10, out) == 0
    shown = capsys.readouterr()
    assert "concurrency 30" in shown.out and "failed: rate 4: no rates today" in shown.out
    assert "--concurrency 30 --request-count 60" in shown.err and "--request-rate 4" in shown.err
    assert "ignore_eos" in shown.err and f"--tokenizer {tmp_path}" in shown.err


def test_nothing_measured_is_an_error(pretender, tmp_path):
    pretender("echo 'cannot reach it' >&2; exit 1")
    with pytest.raises(EngineFailed, match="AIPerf measured nothing: concurrency 1: cannot reach it"):
        aiperf.run("http://127.0.0.1:9", "demo", tmp_path, [1], [], 10, tmp_path / "out")
