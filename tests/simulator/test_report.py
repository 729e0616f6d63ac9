"""Reports: the figures of the bench, parts of the time to first token, two policies side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from simulator import report
from simulator.__main__ import main
from tests.simulator.test_run import CHAT, POOL, simulated

SCENARIO = """
duration_s = 5.0
[pools.main]
price_hour = 3.6
step = { step_s = 0.02, prefill_token_s = 0.0001 }
[personas.chat]
arrivals = "poisson:4"
"""


def test_a_report_has_the_figures_cost_and_what_took_longest():
    result = simulated(pools={"main": POOL | {"price_hour": 3600.0}})
    told = report.of(result, {"main": {}})
    assert told["all"]["ok"] == told["all"]["requests"] == len(result.everyone)
    assert told["cost"] == pytest.approx(15, abs=1.1) and told["cost_per_1000_tokens"] > 0
    parts = told["all"]["largest_part_of_ttft"]
    assert max(parts, key=parts.get) == "prefill" and sum(parts.values()) == pytest.approx(1)
    shown = report.text(told)
    assert "invariants: all held" in shown and "fidelity of main: unknown" in shown


def test_a_cost_without_tokens_is_not_told_per_token():
    told = report.of(simulated(duration_s=1.0, pools={"main": POOL | {"price_hour": 3600.0}}), {})
    nothing = told | {"cost_per_1000_tokens": None}
    assert f"  cost {told['cost']:.2f}, - per 1,000 tokens" in report.text(nothing).splitlines()


def test_a_refusal_says_why():
    shown = report.text(report.of(simulated(duration_s=5.0, gateway={"settings": {"max_in_flight": "1"}}), {}))
    assert "concurrency: 1 requests are in flight, the most allowed" in shown


def test_who_leaves_without_a_token_is_told_apart():
    people = {"chat": CHAT | {"arrivals": "poisson:20", "patience_s": 1.0}, "leaving": CHAT | {"leave": 1.0}}
    told = report.of(simulated(pools={"main": POOL | {"slots": 2, "send_s": 0.1}}, personas=people), {})
    left, waiting = told["all"]["cancelled"], told["all"]["left_without_a_token"]
    assert 0 < waiting < left and f"left: {left}, {waiting} of them without a token" in report.text(told)


def test_faults_that_hit_no_replica_are_told():
    kill, hang = ({"kind": kind, "pool": "main", "at_s": 2.0, "for_s": 2.0} for kind in ("kill", "hang"))
    faults = [kill, kill | {"replica": 2}, hang | {"at_s": 3.0}]
    told = report.of(simulated(scaling={"pools": {"main": {"max_replicas": 3}}}, duration_s=5.0, faults=faults), {})
    assert [one["number"] for one in told["missed_faults"]] == [1, 2]
    shown = report.text(told)
    assert "faults.1 (kill of main at 2 s) hit no replica" in shown
    assert "faults.2 (hang of main at 3 s) hit no replica" in shown and "faults.0" not in shown


def test_the_queue_is_the_largest_part_under_load():
    few = {"main": POOL | {"slots": 1}}
    parts = report.of(simulated(pools=few, personas={"chat": CHAT | {"arrivals": "poisson:2"}}), {})["all"]
    assert parts["largest_part_of_ttft"]["queue"] > 0.5


def test_the_fidelity_is_told():
    found = {"ttft_p95_error": 0.08, "latency_p95_error": -0.03, "when": "2026-11-23", "machine": "M, 2 cores"}
    assert "TTFT p95 +8.0%, end to end p95 -3.0%" in report.words(found)
    assert "+8.0%, end to end mean +1.0%, end" in report.words(found | {"latency_mean_error": 0.01})


def test_two_runs_are_compared_request_by_request():
    first = simulated()
    second = simulated(pools={"main": POOL | {"step": {"step_s": 0.04}}})
    shown, pairs = report.compared(first, second, [report.of(one, {}) for one in (first, second)])
    found = pairs["chat latency_s"]
    assert found["pairs"] == len(first.everyone) and found["mean_s"] > 3 * found["half_width_s"] > 0
    assert "chat latency_s: +" in shown


@pytest.mark.parametrize("day", [None, [1.0, 0.5] * 12])
def test_the_pairs_of_closed_loops_are_the_same_requests(day):
    users = {"users": 6, "think_s": 1.0, "input": CHAT["input"], "output": CHAT["output"], "day": day}
    people, slow = {"chat": users}, {"main": POOL | {"step": {"step_s": 0.06}}}
    near = {"duration_s": 40.0, "start_hour": 23.995, "personas": people}  # the hour ends within the run
    found = [report._answered(simulated(**near, **other), "chat") for other in ({}, {"pools": slow})]
    both = found[0].keys() & found[1].keys()
    assert len(both) > 20 and {user for user, _ in both} == set(range(6))
    assert len({one.input_tokens for one in found[0].values()}) > 10
    for sender in both:
        first, second = (one[sender] for one in found)
        assert (first.input_tokens, first.usage_tokens) == (second.input_tokens, second.usage_tokens)


def test_pairs_leave_the_warm_up_out():
    runs = [simulated(warmup_s=warmup_s) for warmup_s in (5.0, 10.0)]
    _, pairs = report.compared(*runs, [report.of(one, {}) for one in runs])
    late = [one for one in runs[0].everyone if one.intended_s >= runs[1].window[0]]
    assert pairs["chat ttft_s"]["pairs"] == len(late) < len(runs[0].everyone)


def test_the_command_line(tmp_path, capsys):
    path, out = tmp_path / "small.toml", tmp_path / "out.json"
    path.write_text(SCENARIO)
    assert main(["run", str(path), "--seed", "4", "--json", str(out)]) == 0
    told, shown = json.loads(out.read_text()), capsys.readouterr()
    assert told["scenario"] == "small" and told["seed"] == 4 and "5 simulated seconds, seed 4" in shown.out
    assert "a minute" in shown.err
    assert main(["compare", str(path), str(path), "--json", str(out)]) == 0
    assert json.loads(out.read_text())["pairs"]["chat ttft_s"]["mean_s"] == 0
    capsys.readouterr()
    for option in (
        ["--plot", "x.bmp"],
        ["--plot", str(path / "x.png")],
        ["--json", str(tmp_path / "none" / "x")],
        ["--json", str(tmp_path)],
    ):
        assert main(["run", str(path), *option]) == 2
        assert capsys.readouterr().err.startswith(f"simulator: {option[0][2:]}: must ")  # and not behind the pace
    path.write_text(SCENARIO.replace("4\n", "4", 1).replace("poisson", "often"))
    assert main(["run", str(path)]) == 2
    assert "personas.chat.arrivals: must be poisson:RATE" in capsys.readouterr().err


def test_ctrl_c_is_an_exit_status(tmp_path, monkeypatch, capsys):
    def interrupted(*given):
        raise KeyboardInterrupt

    (tmp_path / "small.toml").write_text(SCENARIO)
    monkeypatch.setattr("simulator.__main__.run", interrupted)
    assert main(["run", str(tmp_path / "small.toml")]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_a_reader_that_reads_no_further_ends_the_report_quietly(tmp_path):
    path, out = tmp_path / "small.toml", tmp_path / "out.json"
    path.write_text(SCENARIO)
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "simulator", "run", str(path), "--json", str(out)]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert ended.returncode == 0 and "Broken pipe" not in ended.stderr
    assert json.loads(out.read_text())["scenario"] == "small"


def test_a_broken_invariant_is_an_exit_status(tmp_path, monkeypatch, capsys):
    from gateway.admission.pool_slots import Claim

    monkeypatch.setattr(Claim, "release", lambda claim, number: claim._held.pop(number, None))
    monkeypatch.setattr(Claim, "close", lambda claim, used: None)
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO)
    assert main(["run", str(path)]) == 1
    assert "VIOLATED" in capsys.readouterr().out


def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need requirements/bench.txt")
    report.plot(simulated(duration_s=3.0), tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 5000
