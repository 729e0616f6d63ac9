"""The command line whole, against a scripted replica."""

import csv
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import command_line
from contract.errors import Overloaded, TridentError
from contract.generation import FinishReason
from tests.fakes.replica import Script

pytestmark = pytest.mark.slow

SMALL = ("--input", "6", "--output", "4", "--warmup", "0")


def test_a_run_prints_and_writes_its_figures(replica, tmp_path: Path, capsys):
    server = replica(lambda seen: Script(tuple("abcd"), FinishReason.LENGTH, first_token_s=0.05))
    arguments = ["run", "--url", server.url, "--concurrency", "2", "--requests", "10", *SMALL]
    code = command_line.main([*arguments, "--metrics-url", server.metrics_url, "--out", str(tmp_path)])
    output = capsys.readouterr().out
    assert code == 3 and "10 answered, 0 failed" in output
    # The replica says that its first token took 2 µs, which contradicts its 50 ms.
    assert "NOT OK  TTFT, request by request" in output
    saved = json.loads((tmp_path / "run.json").read_text())[0]
    assert saved["figures"]["ok"] == 10 and saved["figures"]["ttft_s"]["p50"] >= 0.05
    assert sum(len(record["messages"]) for record in saved["records"]) == 40
    rows = list(csv.DictReader((tmp_path / "run-requests.csv").read_text().splitlines()))
    assert len(rows) == 10 and all(float(row["ttft_s"]) >= 0.05 and row["output_tokens"] == "4" for row in rows)
    assert next(csv.DictReader((tmp_path / "run.csv").read_text().splitlines()))["ok"] == "10"


def test_a_closed_output_loses_no_result(replica, tmp_path: Path):
    command = [sys.executable, "-m", "benchmarks", "run", "--url", replica().url, "--requests", "3", *SMALL]
    reading, writing = os.pipe()
    os.close(reading)
    with subprocess.Popen([*command, "--out", str(tmp_path)], stdout=writing, stderr=subprocess.PIPE) as process:
        os.close(writing)
        assert b"Traceback" not in process.stderr.read()
    assert process.returncode == 141
    assert json.loads((tmp_path / "run.json").read_text())[0]["figures"]["ok"] == 3


def test_a_sweep_has_a_row_for_every_load(replica, tmp_path: Path, capsys):
    server = replica(lambda seen: Script(tuple("abcd"), FinishReason.LENGTH, first_token_s=0.1))
    arguments = ["sweep", "--url", server.url, "--concurrency", "1,3", "--requests", "6", *SMALL]
    command_line.main([*arguments, "--out", str(tmp_path)])
    saved = json.loads((tmp_path / "sweep.json").read_text())
    assert [run["name"] for run in saved] == ["1", "3"] and server.counts.most_running == 3
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[3:5]] == ["1", "3"]


def test_an_open_sweep_sends_at_the_given_rates(replica, tmp_path: Path):
    server = replica()
    arguments = ["sweep", "--url", server.url, "--rates", "50,200", "--duration", "0.3", *SMALL]
    command_line.main([*arguments, "--out", str(tmp_path)])
    slow, fast = json.loads((tmp_path / "sweep.json").read_text())
    assert 0 < slow["figures"]["requests"] < fast["figures"]["requests"]
    assert "Poisson" in slow["workload"]["loop"]


def test_a_sweep_is_plotted(replica, tmp_path: Path, capsys):
    pytest.importorskip("matplotlib")
    server = replica()
    arguments = ["sweep", "--url", server.url, "--concurrency", "1,2", "--requests", "6", *SMALL]
    command_line.main([*arguments, "--out", str(tmp_path)])
    assert command_line.main(["plot", str(tmp_path / "sweep.json")]) == 0
    pictures = sorted(tmp_path.glob("*.png"))
    assert [path.stem for path in pictures] == ["sweep-distributions", "sweep-throughput-latency", "sweep-timeline"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="plots need requirements/bench.txt")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["run", "--input", "x"], "input: must be N, "),
        (["run", "--concurrency", "99999999"], "concurrency: must be a whole number from 1 to 10000, got 99999999"),
        (["peers", "--precision", "fp3"], "precision: must be bf16, int8 or int8_sq, got 'fp3'"),
        (["peers", "--also", "8001"], "also: must be of http://HOST:PORT"),
        (["textbook", "--engine", "nosuch"], "there is no engine at"),
        (["clients", "--engine", "nosuch"], "there is no engine at"),
        (["efficiency", "--engines", "demo,nosuch"], "there is no engine at"),
        (["efficiency", "--engines", "demo,"], "engines: must be names of engines, separated by commas, got 'demo,'"),
        (["run", "--url", "127.0.0.1:99999"], "url: must be HOST:PORT"),
        (["run", "--url", "127.0.0.1:9", "--engine", "demo"], "url: must be left out beside --engine"),
        (["run", "--metrics-url", "ftp://x", "--engine", "demo"], "metrics_url: must be left out beside --engine"),
        (["cancel", "--tokenizer", "/nope", "--engine", "demo"], "tokenizer: must be left out beside --engine"),
        (["calibrate", "--machine", "AMD", "--engine", "demo"], "machine: must be left out beside --engine"),
        (["run", "--arrivals", "poisson:x"], "arrivals: must be poisson:RATE"),
        (["run", "--cancel-fraction", "2"], "cancel_fraction: must be between 0 and 1, got 2"),
        (["run", "--url", "http://127.0.0.1:8001"], "url: must be HOST:PORT of the server's gRPC endpoint"),
        (["run", "--tokenizer", "/nowhere"], "tokenizer: must be a folder with tokenizer.json, got /nowhere"),
        pytest.param(
            ["plot", "/nowhere.json"], "result: must be a readable file, got /nowhere.json", marks=needs_matplotlib
        ),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, problem, capsys):
    assert command_line.main(arguments) == (1 if problem.startswith("there is no") else 2)
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["peers", "--also", "8001"], "also: must be of http://HOST:PORT"),
        (["peers", "--output", "x"], "output: must be N, "),
    ],
)
def test_a_wrong_option_is_refused_before_a_model_is_fetched_or_built(arguments, problem, monkeypatch, capsys):
    for module, name in ((command_line.checkpoint, "of"), (command_line.peer_servers, "subject")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("it is too late to refuse the option"))
    assert command_line.main(arguments) == 2 and problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (["all", "--only", "nosuch"], "peers-8bit, peers-bf16, "),
        (["peers", "--only", "trident,nosuch"], "trident, trident-openai, vllm, "),
        (["clients", "--only", ""], "perf_analyzer, AIPerf"),
        (["peers", "--prompts", "x"], "words, text"),
    ],
)
def test_a_name_that_is_not_known_is_refused_with_those_that_are(arguments, allowed, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and f"argument {arguments[1]}: must be of {allowed}" in error
    assert f"separated by commas, got {arguments[2]}" in error


@pytest.mark.parametrize(
    "arguments",
    [
        ["--requests", "0"],
        ["--rates", "4,-1"],
        ["--rates", "4,x"],
        ["--concurrency", "1,,2"],
        ["--generators", "65"],
        ["--generators", "-1"],
        ["--duration", "0"],
        ["--slo-ttft-ms", "nan"],
        ["--slo-latency-s", "-1"],
        ["--out", __file__],
    ],
)
def test_numbers_that_measure_nothing_are_refused_before_anything_runs(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main(["sweep", *arguments])
    assert ended.value.code == 2 and f"argument {arguments[0]}: must be " in capsys.readouterr().err


def test_a_server_that_is_not_there_is_told_before_any_load_is_made(monkeypatch, capsys):
    monkeypatch.setattr(command_line.measurement, "measure", lambda *_: pytest.fail("there is nothing to measure"))
    assert command_line.main(["run", "--url", "127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.startswith("error: cannot reach 127.0.0.1:9: ")


def test_a_server_that_refuses_every_request_is_a_failure(replica, tmp_path: Path, capsys):
    server = replica(lambda seen: Script(refuse=Overloaded("full")))
    code = command_line.main(["run", "--url", server.url, "--requests", "2", *SMALL, "--out", str(tmp_path)])
    output = capsys.readouterr().out
    assert "0 answered, 2 failed, 0 cancelled\n    2 × Overloaded, the first with: full" in output
    assert code == 1 and "NOT OK  answers: 2 of 2 requests failed" in output


def test_lengths_that_the_engine_never_takes_are_refused_before_it_is_started(monkeypatch, capsys):
    monkeypatch.setattr(command_line.manifests, "load", lambda folder: SimpleNamespace(max_seq_len=512))
    monkeypatch.setattr(command_line, "running_server", lambda *_: pytest.fail("it is too late to refuse them"))
    assert command_line.main(["sweep", "--engine", "x", "--input", "512"]) == 2
    assert "input: must be at most 511 tokens, as prompt" in capsys.readouterr().err


def test_an_answer_that_is_cut_short_is_a_failure(replica, tmp_path: Path, capsys):
    server = replica(lambda seen: Script(("a", "b"), FinishReason.CANCELLED))
    command_line.main(["run", "--url", server.url, "--requests", "3", *SMALL, "--out", str(tmp_path)])
    assert (
        "0 answered, 3 failed, 0 cancelled\n    3 × Unfinished, the first with: the answer ended"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_sigterm_within_a_task_ends_the_command_without_a_word(loop):
    program = f"""
import asyncio, signal, sys, {loop}
from benchmarks import command_line

async def task():
    signal.raise_signal(signal.SIGTERM)
    await asyncio.sleep(60)

async def load():
    child = asyncio.create_task(task())
    try:
        await asyncio.sleep(60)
    finally:
        print("stopped")

command_line.run = lambda arguments: {loop}.run(load())
sys.exit(command_line.main(["run"]))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, "stopped\n", "")


def test_a_known_error_is_one_line(monkeypatch, capsys):
    def fail(arguments):
        raise TridentError("it broke")

    monkeypatch.setattr(command_line, "run", fail)
    assert command_line.main(["run"]) == 1 and capsys.readouterr().err == "error: it broke\n"


def test_a_trace_is_replayed_whole_and_from_its_first_request(replica, tmp_path: Path, capsys):
    server = replica()
    trace = tmp_path / "trace.csv"
    trace.write_text("at_s,input_tokens,output_tokens\n0.0,3,2\n0.1,4,3\n0.4,,5\n")
    arguments = ["--url", server.url, "--out", str(tmp_path)]
    command_line.main(["run", "--arrivals", f"trace:{trace}", *arguments])
    (saved,) = json.loads((tmp_path / "run.json").read_text())
    assert [record["usage_tokens"] for record in saved["records"]] == [2, 3, 5]
    assert saved["figures"]["requests"] == saved["figures"]["ok"] == 3
    assert saved["figures"]["output_tokens_per_s"] == pytest.approx(10 / saved["figures"]["window_s"])
    assert "; lengths of the trace, where it has none in 128" in capsys.readouterr().out
    command_line.main(["run", "--arrivals", f"trace:{trace},2", "--warmup", "0.3", *arguments])
    assert "warmup: must end before the load does, all 3 requests" in capsys.readouterr().out
    command_line.main(["run", "--arrivals", f"trace:{trace}", "--duration", "0.2", *arguments])
    assert len(json.loads((tmp_path / "run.json").read_text())[0]["records"]) == 2
