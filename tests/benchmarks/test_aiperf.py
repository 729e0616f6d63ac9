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


def test_its_result_is_read_and_what_it_did_not_measure_is_left_out(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / aiperf.RESULT).write_text(json.dumps(RESULT))
    found = aiperf.read(tmp_path)
    assert found["requests/s"] == 18.25 and found["tokens/s"] == 1171.0 and found["TTFT p95, ms"] == 81.1
    assert "ITL p50, ms" not in found and found["failed"] == 2


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


@pytest.mark.slow
def test_it_is_told_the_load_and_its_result_is_read_or_missed(pretender, tmp_path, capsys):
    find = "while [ $# -gt 0 ]; do case $1 in --artifact-dir) out=$2;; esac; shift; done"
    pretender(f"{find}; echo '{json.dumps(RESULT)}' > \"$out/{aiperf.RESULT}\"")
    tool = aiperf.tool("http://127.0.0.1:9", "demo", tmp_path)
    found = tool.measure([tool.rate, "4", *tool.evenly], 60, 3, tmp_path / "out")
    assert found["latency p50, ms"] == 486.1
    shown = capsys.readouterr().err
    assert "--request-rate 4 --arrival-pattern constant --request-count 60" in shown and "--random-seed 3" in shown
    assert "ignore_eos" in shown and f"--tokenizer {tmp_path}" in shown
    pretender("exit 0")
    with pytest.raises(EngineFailed, match="AIPerf wrote no result"):
        tool.measure([], 1, 0, tmp_path / "none")
