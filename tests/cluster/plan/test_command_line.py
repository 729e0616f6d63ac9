"""`python -m cluster plan`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.plan import planner
from cluster.plan.command_line import main

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
    assert main([str(scenario)]) == 0
    text = capsys.readouterr().out
    for words in ("pool main", "an ESTIMATE, roofline", "Little's law", "per 1,000 tokens", "-20 %", "check: "):
        assert words in text
    assert main([str(scenario), "--json"]) == 0
    [plan] = json.loads(capsys.readouterr().out)
    assert len(plan["replicas"]) == 24 and plan["forecast"]["ttft_p95_s"] > 0


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_plot_is_drawn(scenario: Path, suffix, capsys):
    pytest.importorskip("matplotlib", reason="plots need requirements/bench.txt")
    assert main([str(scenario), "--plot", str(scenario.with_suffix(f".{suffix}"))]) == 0
    assert scenario.with_suffix(f".{suffix}").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--plot", "a.txt"], "plot: must end in .svg, .png, .pdf, got a.txt"),
        (["--plot", "/no/such/folder/a.svg"], "plot: must be in a folder that exists, got /no/such/folder/a.svg"),
        (["--check", "other"], "check: must be one of main, got 'other'"),
        (["--check", "main"], "pools.main.engine: must be an engine that runs here"),
    ],
)
def test_what_cannot_be_done_is_said(scenario: Path, arguments, problem, monkeypatch, capsys):
    monkeypatch.setattr(planner, "plan", None)  # known before a plan takes its minute
    assert main([str(scenario), *arguments]) == 2
    assert problem in capsys.readouterr().err


def test_a_plan_is_printed_though_its_plot_cannot_be_written(scenario: Path, capsys):
    (scenario.parent / "a.svg").mkdir()
    assert main([str(scenario), "--plot", str(scenario.parent / "a.svg")]) == 2
    assert "pool main" in capsys.readouterr().out


def test_a_reader_that_reads_no_further_ends_the_plan_quietly(scenario: Path):
    program = (
        "from cluster.plan import planner; planner.REQUESTS, planner.ROUNDS, planner.SEARCH = 40, 3, 2; "
        f"from cluster.plan.command_line import main; raise SystemExit(main([{str(scenario)!r}]))"
    )
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run([sys.executable, "-c", program], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")
