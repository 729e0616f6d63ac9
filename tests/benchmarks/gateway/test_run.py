"""The goals of the gateway's benchmark, and one small run of each part."""

import json
import math
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest

from benchmarks.driver import LoadResult
from benchmarks.gateway import run
from benchmarks.gateway.load_test import LoadTest
from benchmarks.gateway.relaying import Relayed, RelayPath
from benchmarks.record import Record


def test_a_goal_is_missed_by_a_figure_above_it():
    direct = Relayed("replica itself", "", 16, True, tokens=100, ttft_ms=[1.0] * 99, transit_ms=[0.1] * 99)
    slow = Relayed("gateway, http", "replica itself", 16, True, 100, 1.0, 0.02, [1.5] * 99, [1.2] * 99, [1.0])
    met = {what: met for what, _, _, met in run.goals([direct, slow], [], [])}
    load = "gateway, http, 16 streams paced"
    assert met[f"{load}: added to the first token, p50, ms, at most"] is True
    assert met[f"{load}: added to a token, p50, ms, at most"] is False
    assert met[f"{load}: failed requests, at most"] is True
    slow.errors = {"EngineFailed": 1}
    met = {what: met for what, _, _, met in run.goals([direct, slow], [], [])}
    assert met[f"{load}: failed requests, at most"] is False


def test_cpu_is_held_to_the_bare_relays_of_the_same_round():
    ours = Relayed("gateway, grpc", "replica itself", 64, False, 100, us_of_rounds=[120.0, 60.0, 200.0])
    bare = Relayed("bare relay, grpc", "replica itself", 64, False, 100, us_of_rounds=[100.0, 40.0, 190.0])
    met = {what: (value, met) for what, value, _, met in run.goals([ours, bare], [], [])}
    assert met["gateway, grpc, 64 streams unpaced: CPU of the bare relay's, at most"] == (1.2, True)
    two = Relayed("gateway, 2 workers, grpc", "", 64, False, 100, us_of_rounds=[150.0, 75.0, 250.0])
    # By all processes 1.6 of one worker's; by the busiest, which cannot use more than one core, less where they differ.
    for busiest, expected in (([75.0, 37.5, 125.0], 1.6), ([80.0, 40.0, 160.0], 1.5)):
        two.busiest_us = busiest
        [(what, scaling, _, met)] = run.goals([], [], [], [ours, two])
        assert what.startswith("gateway, 2 workers, grpc") and scaling == pytest.approx(expected) and not met


def test_a_contender_that_ended_misses_its_goals_and_one_that_it_is_held_to_leaves_none():
    ended, ok = [float("nan")], [100.0]
    ours = Relayed("gateway, grpc", "", 64, False, 100, us_of_rounds=ended, busiest_us=ended)
    bare = Relayed("bare relay, grpc", "", 64, False, 100, us_of_rounds=ok)
    two = Relayed("gateway, 2 workers, grpc", "", 64, False, 100, us_of_rounds=ended, busiest_us=ended)
    missed = [(what, value) for what, value, _, met in run.goals([ours, bare], [], []) if not met]
    assert missed == [("gateway, grpc, 64 streams unpaced: CPU of the bare relay's, at most", float("inf"))]
    assert run.compared([ours, bare], [], [], [])["CPU of the bare relay's: grpc, 64 unpaced"]["values"] == [math.inf]
    [(_, scaling, _, met)] = run.goals([], [], [], [replace(ours, us_of_rounds=ok, busiest_us=ok), two])
    assert scaling == 0.0 and not met
    [(_, scaling, _, met)] = run.goals([], [], [], [ours, replace(two, us_of_rounds=ok, busiest_us=ok)])
    assert math.isnan(scaling) and not met


def test_the_suite_compares_ratios_of_rounds_and_the_first_token():
    direct = Relayed("replica itself", "", 16, True, tokens=100, ttft_ms=[1.0] * 99)
    ours = Relayed("gateway, grpc", "replica itself", 16, True, 100, ttft_ms=[3.5] * 99, us_of_rounds=[120.0, 60.0])
    bare = Relayed("bare relay, grpc", "replica itself", 16, True, 100, ttft_ms=[2.0] * 99, us_of_rounds=[100.0, 40.0])
    found = {name: one["values"] for name, one in run.compared([direct, ours, bare], [], [], []).items()}
    assert found["CPU of the bare relay's: grpc, 16 paced"] == [1.2, 1.5]
    assert found["TTFT p99, ms: gateway, grpc, 16 paced"] == [3.5]
    two = Relayed("gateway, 2 workers, grpc", "", 64, False, 100, us_of_rounds=[150.0])
    one = Relayed("gateway, grpc", "", 64, False, 100, us_of_rounds=[120.0])
    assert run.compared([], [one, two], [], [])["CPU of one worker's: grpc, 64 unpaced"]["values"] == [1.25]


def test_lost_tokens_and_refusals_without_retry_after_miss_their_goals():
    memory = {"rss_before_mib": 100.0, "peak_rss_mib": 120.0, "errors": {}}
    slow = memory | {"protocol": "http", "streams": 10_000, "in_flight": 10_000, "lost": 3}
    burst = memory | {"protocol": "grpc", "refused": 1000, "hinted": 999, "alive": True, "recovered_s": 0.5}
    missed = [what for what, _, _, met in run.goals([], [slow], [burst]) if not met]
    assert missed == [
        "10000 slow streams, http: errors and lost tokens, at most",
        "burst, grpc: refusals without retry-after, at most",
    ]


@pytest.mark.slow
def test_an_unknown_part_is_refused_by_name():
    command = [sys.executable, "-m", "benchmarks", "gateway", "--only", "speed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "only" in done.stderr and "latency" in done.stderr


def test_a_run_that_is_cut_off_has_kept_the_loads_before(tmp_path, monkeypatch):
    def cut_off(load, contender):
        if load.workload.concurrency == 64:
            raise SystemExit(143)
        return LoadTest(LoadResult([Record(0, 0.0, 0.0, [(0.1, 32)], ended_s=0.2, finish_reason="length")], 0.0, []))

    monkeypatch.setattr(run, "relay_paths", lambda *_: nullcontext([RelayPath("replica itself", "grpc", "h:1")]))
    monkeypatch.setattr(run.relaying.load_test, "run", cut_off)
    with pytest.raises(SystemExit):
        run.run(["cost"], True, 1, 0.1, 5, ["grpc"], tmp_path)
    [row] = json.loads((tmp_path / "gateway.json").read_text())["relayed"]
    assert (row["streams"], row["paced"], row["tokens"]) == (1, True, 32)


@pytest.mark.slow
def test_paths_are_measured(tmp_path, capsys):
    assert run.run(["latency"], True, 1, 0.6, 5, ["grpc"], tmp_path) == 0
    written = json.loads((tmp_path / "gateway.json").read_text())
    assert [row["path"] for row in written["relayed"]] == [
        "replica itself",
        *("gateway, grpc", "gateway, http", "bare relay, grpc", "bare relay, http"),
    ]
    assert all(row["tokens"] > 0 and not row["errors"] for row in written["relayed"])
    assert "gateway, http" in capsys.readouterr().out
