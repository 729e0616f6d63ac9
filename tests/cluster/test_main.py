"""``python -m cluster``, as it is typed: plans, and the scaler in front of a real gateway."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import grpc.aio
import pytest

from cluster.__main__ import main
from cluster.keda import externalscaler_pb2 as pb
from cluster.plan import planner
from tests.fakes.replica import FakeReplica
from tests.gateway.running import gateway

FILE = """
[pools.main]
[pools.main.estimate]
card = "l40s"
parameters = 8.0
layers = 32
kv_heads = 8
head_dim = 128
max_batch_size = 16
[pools.main.price]
on_demand = 1.0
[[pools.main.classes]]
name = "chat"
requests_per_s = 10
input = 200
output = 50
"""


@pytest.fixture
def scenario(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(planner, "REQUESTS", 40)
    monkeypatch.setattr(planner, "ROUNDS", 3)
    monkeypatch.setattr(planner, "SEARCH", 2)
    (tmp_path / "a.toml").write_text(FILE)
    return tmp_path / "a.toml"


def test_a_plan_is_printed_for_people_and_as_json(scenario: Path, capsys):
    assert main(["plan", str(scenario)]) == 0
    text = capsys.readouterr().out
    for words in ("pool main", "an ESTIMATE, roofline", "Little's law", "per 1,000 tokens", "-20 %", "check: "):
        assert words in text
    assert main(["plan", str(scenario), "--json"]) == 0
    [plan] = json.loads(capsys.readouterr().out)
    assert len(plan["replicas"]) == 24 and plan["forecast"]["ttft_p95_s"] > 0


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_plot_is_drawn(scenario: Path, suffix, capsys):
    pytest.importorskip("matplotlib", reason="plots need requirements/bench.txt")
    assert main(["plan", str(scenario), "--plot", str(scenario.with_suffix(f".{suffix}"))]) == 0
    assert scenario.with_suffix(f".{suffix}").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--plot", "a.txt"], "plot: must end in .svg, .png, .pdf, got a.txt"),
        (["--plot", "/no/such/folder/a.svg"], "plot: must be in a folder that exists, got /no/such/folder/a.svg"),
        (["--check", "main", "--plot", "a.svg"], "plot: must be left out with --check, which draws nothing; got a.svg"),
        (["--seconds", "9"], "seconds: must be left out without --check, got 9"),
        (["--check", "other"], "check: must be one of main, got 'other'"),
        (["--check", "main"], "pools.main.engine: must be an engine that runs here"),
    ],
)
def test_what_cannot_be_done_is_said(scenario: Path, arguments, problem, monkeypatch, capsys):
    monkeypatch.setattr(planner, "plan", None)  # known before a plan takes its minute
    assert main(["plan", str(scenario), *arguments]) == 2
    assert problem in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_the_plan_is_made(scenario: Path, monkeypatch, capsys):
    monkeypatch.setattr(planner, "plan", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["plan", str(scenario), "--plot", str(scenario.with_suffix(".svg"))]) == 2
    assert "pip install -r requirements/bench.txt" in capsys.readouterr().err


def test_ctrl_c_is_an_exit_status(scenario: Path, monkeypatch, capsys):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(planner, "plan", interrupted)
    assert main(["plan", str(scenario)]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_sigterm_ends_a_check_and_the_bench_that_it_runs(scenario: Path):
    program = (
        "import subprocess; from cluster.plan import check; from cluster.__main__ import main\n"
        "check.run = lambda *given: subprocess.run(['sh', '-c', 'echo runs; exec sleep 600'])\n"
        f"main(['plan', {str(scenario)!r}, '--check', 'main'])"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as checking:
        assert checking.stdout.readline() == "runs\n"
        checking.send_signal(signal.SIGTERM)
        assert checking.communicate(timeout=30)[0] == ""  # at the end of the output: nobody holds it
    assert checking.returncode == 128 + signal.SIGTERM


def test_a_plan_is_printed_though_its_plot_cannot_be_written(scenario: Path, capsys):
    pytest.importorskip("matplotlib", reason="plots need requirements/bench.txt")
    (scenario.parent / "a.svg").mkdir()
    assert main(["plan", str(scenario), "--plot", str(scenario.parent / "a.svg")]) == 2
    assert "pool main" in capsys.readouterr().out


@pytest.mark.slow
def test_a_reader_that_reads_no_further_ends_the_plan_quietly(scenario: Path):
    program = (
        "from cluster.plan import planner; planner.REQUESTS, planner.ROUNDS, planner.SEARCH = 40, 3, 2; "
        f"from cluster.__main__ import main; raise SystemExit(main(['plan', {str(scenario)!r}]))"
    )
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run([sys.executable, "-c", program], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")


async def cluster(*arguments: str) -> asyncio.subprocess.Process:
    environ = {**os.environ, "TRIDENT_SCALER_INTERVAL_S": "0.1"}
    environ |= {"TRIDENT_SCALER_GRPC_PORT": "0", "TRIDENT_SCALER_METRICS_PORT": "0"}
    command = (sys.executable, "-m", "cluster", *arguments)
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=environ)


@pytest.mark.slow
async def test_the_plan_of_a_gateway():
    body = {"model": "demo", "prompt": "one two three", "max_tokens": 30}
    async with FakeReplica(slots=4) as replica, gateway(replica) as running:
        for _ in range(20):
            assert (await running.post("/v1/completions", body))[0] == 200
        process = await cluster("scale", "--gateways", running.monitoring_url)
        output, errors = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 0, errors.decode()
    head, line = output.decode().splitlines()
    assert head.startswith("pool") and line.split()[:3] == ["''", "1", "0"] and "1: " in line


@pytest.mark.slow
async def test_keda_and_prometheus_are_served_until_sigterm():
    async with FakeReplica(slots=4) as replica, gateway(replica) as running:
        process = await cluster("keda", "--gateways", running.monitoring_url)
        said = (await asyncio.wait_for(process.stdout.readline(), 20)).decode().split()
        target, page = said[3].rstrip(","), said[-1]
        ref = pb.ScaledObjectRef(scalerMetadata={"pool": ""})
        async with grpc.aio.insecure_channel(target) as channel, aiohttp.ClientSession() as http:
            call = channel.unary_unary(
                "/externalscaler.ExternalScaler/GetMetrics",
                pb.GetMetricsRequest.SerializeToString,
                pb.GetMetricsResponse.FromString,
            )
            for _ in range(100):
                try:
                    answer = await call(pb.GetMetricsRequest(scaledObjectRef=ref), timeout=60)
                    break
                except grpc.aio.AioRpcError as exc:
                    assert exc.code() is grpc.StatusCode.UNAVAILABLE
                    await asyncio.sleep(0.05)
            assert answer.metricValues[0].metricValue == 1
            text = await (await http.get(f"http://{page}/metrics")).text()
            assert 'trident_scaler_wanted{pool=""} 1.0' in text
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 0 and "Traceback" not in errors.decode()


def test_wrong_arguments_end_it_with_what_is_allowed(capsys: pytest.CaptureFixture[str]):
    assert main(["scale", "--gateways", "nowhere"]) == 2
    assert "must be http://HOST:PORT/metrics or dns:///NAME:PORT, got 'nowhere'" in capsys.readouterr().err
    assert main(["keda", "--config", "/no/such/file"]) == 2
    assert "must be a file that can be read" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["TRIDENT_SCALER_GRPC_PORT", "TRIDENT_SCALER_METRICS_PORT"])
def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in ("TRIDENT_SCALER_GRPC_PORT", "TRIDENT_SCALER_METRICS_PORT"):
            monkeypatch.setenv(port, str(taken.getsockname()[1] if port == name else 0))
        assert main(["keda"]) == 2
    assert f"error: {name}: must be a free port of 127.0.0.1, got" in capsys.readouterr().err


@pytest.mark.slow
def test_a_reader_that_reads_no_further_ends_the_watch_quietly():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "cluster", "scale", "--watch", "--gateways", "http://127.0.0.1:1"]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=20)
    os.close(writing)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr


def test_without_a_gateway_the_plan_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("TRIDENT_SCALER_INTERVAL_S", "0.01")
    assert main(["scale", "--gateways", "http://127.0.0.1:1"]) == 1
    assert "http://127.0.0.1:1/metrics: Cannot connect" in capsys.readouterr().out
