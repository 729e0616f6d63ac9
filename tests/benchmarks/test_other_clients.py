"""The tools of others: their inputs and results, and what becomes of one that measures, fails, or never ends."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import other_clients
from benchmarks.environments import Environment
from benchmarks.other_clients import Tool
from benchmarks.prompts import Prompts
from contract import tensors
from contract.errors import EngineFailed


def tool(code, read=lambda folder: {"requests/s": 2.5}):
    command = lambda load, requests, seed, folder: [sys.executable, "-c", code, *load, str(requests)]  # noqa: E731
    return Tool("it", "--at", "--rate", (), command, read, {})


@pytest.mark.slow
def test_a_tools_figures_are_read_and_its_failure_is_told(tmp_path, capsys):
    assert tool("print('x')").measure(["--at", "3"], 6, 0, tmp_path / "good") == {"requests/s": 2.5}
    assert "--at 3 6" in capsys.readouterr().err and (tmp_path / "good" / "output.txt").read_text() == "x\n"
    with pytest.raises(EngineFailed, match="no answer"):
        tool("import sys; sys.exit('no answer')").measure([], 1, 0, tmp_path)


@pytest.mark.slow
def test_a_tool_that_never_ends_is_ended(tmp_path):
    with pytest.raises(EngineFailed, match="it took more than 0.1 s"):
        tool("import time; time.sleep(60)").measure([], 1, 0, tmp_path, 0.1)


@pytest.mark.parametrize("stream", [True, False])
def test_inputs_ask_for_answers_of_fixed_length_with_the_ensemble_s_own_tensors(stream):
    rows = other_clients.inputs(["a", "b"], 64, stream)["data"]
    known = {tensor.name for tensor in tensors.ENSEMBLE_INPUTS}
    assert [row["text_input"] for row in rows] == [["a"], ["b"]]
    for row in rows:
        assert row.keys() <= known and row["ignore_eos"] == [True] and row["stream"] == [stream]
        assert row["max_tokens"] == [64]


def test_libraries_are_linked_by_the_names_it_asks_for(tmp_path: Path):
    folder = Path(other_clients.link_libraries(tmp_path / "lib"))
    assert {link.name for link in folder.iterdir()} == set(other_clients.LIBRARIES)
    assert all(link.resolve().is_file() for link in folder.iterdir())


def test_a_table_of_its_is_read_in_milliseconds(tmp_path: Path):
    header = "Concurrency,Inferences/Second,Response Throughput,p50 latency,p90 latency,p95 latency,p99 latency"
    (tmp_path / other_clients.TABLE).write_text(f"{header}\n8,20.66,907.31,278100,300000,395300,396400\n")
    times = [
        {"timestamp": 10**9, "response_timestamps": [10**9 + 40_000_000, 2 * 10**9]},
        {"timestamp": 2 * 10**9, "response_timestamps": [2 * 10**9 + 40_000_000, 6 * 10**9]},
        {"timestamp": 6 * 10**9, "response_timestamps": []},  # not answered
    ]
    (tmp_path / other_clients.PROFILE).write_text(json.dumps({"experiments": [{"requests": times}]}))
    found = other_clients.read_csv(tmp_path)
    assert found["TTFT p50, ms"] == 40.0 and found["requests/s"] == 0.4
    profile = (tmp_path / other_clients.PROFILE).read_text()
    for cut_off in ("", profile[:-9]):
        (tmp_path / other_clients.PROFILE).write_text(cut_off)
        found = other_clients.read_csv(tmp_path)
        assert "TTFT p50, ms" not in found and found["requests/s"] == 20.66
    assert found["responses/s"] == 907.31 and found["latency p95, ms"] == 395.3


def test_a_load_has_a_prompt_for_each_request_and_other_ones_by_its_seed(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(other_clients, "libraries", dict)
    made = other_clients.perf_analyzer("h:1", Prompts(), stream=False)
    seen = []
    (tmp_path / other_clients.PROFILE).write_text("of the load before, which perf_analyzer would refuse to replace")
    for seed in (0, 0, 1):
        argv = made.command(["--concurrency-range", "8"], 40, seed, tmp_path)
        file = Path(argv[argv.index("--input-data") + 1])
        seen.append([row["text_input"][0] for row in json.loads(file.read_text())["data"]])
    assert argv[argv.index("--request-count") + 1] == "40" and "--streaming" in argv
    assert not (tmp_path / other_clients.PROFILE).exists()
    assert seen[0] == seen[1] != seen[2] and len(set(seen[0])) == 40


RESULT = {
    "request_throughput": {"unit": "requests/sec", "avg": 18.25},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 1171.0},
    "time_to_first_token": {"unit": "ms", "avg": 50.0, "p50": 47.04, "p95": 81.1},
    "request_latency": {"unit": "ms", "p50": 486.1, "p95": 525.3},
    "error_request_count": {"avg": 2.0},
}


def test_aiperfs_result_is_read_and_what_it_did_not_measure_is_left_out(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / other_clients.AIPERF_RESULT).write_text(json.dumps(RESULT))
    found = other_clients.read_json(tmp_path)
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
    monkeypatch.setattr(other_clients, "AIPERF", environment)

    def write(script):
        (folder / "bin" / "aiperf").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "bin" / "aiperf").chmod(0o755)

    return write


@pytest.mark.slow
def test_it_is_told_the_load_and_its_result_is_read_or_missed(pretender, tmp_path, capsys):
    find = "while [ $# -gt 0 ]; do case $1 in --artifact-dir) out=$2;; esac; shift; done"
    pretender(f"{find}; echo '{json.dumps(RESULT)}' > \"$out/{other_clients.AIPERF_RESULT}\"")
    made = other_clients.aiperf("http://127.0.0.1:9", "demo", tmp_path)
    found = made.measure([made.rate, "4", *made.evenly], 60, 3, tmp_path / "out")
    assert found["latency p50, ms"] == 486.1
    shown = capsys.readouterr().err
    assert "--request-rate 4 --arrival-pattern constant --request-count 60" in shown and "--random-seed 3" in shown
    assert "ignore_eos" in shown and f"--tokenizer {tmp_path}" in shown
    pretender("exit 0")
    with pytest.raises(EngineFailed, match="AIPerf wrote no result"):
        made.measure([], 1, 0, tmp_path / "none")
