"""Forecasts beside the bench."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest

from benchmarks import arrivals
from cluster.plan import check, scenario
from cluster.plan.check import FIGURES, Compared, _loads, _mean, described, keep, run
from cluster.plan.planner import CHECKED, _checked, loads_of
from cluster.plan.report import _errors
from cluster.plan.scenario import of_table
from contract.errors import InvalidArgument
from tests.cluster.plan.scenarios import REPLICA, table


def test_errors_are_those_of_the_forecast_as_calibrated_and_at_the_speed_of_the_run():
    said, was, at_pace = (dict.fromkeys(FIGURES, value) for value in (1.1, 1.0, 0.9))
    none = dict.fromkeys(FIGURES, 0.0)
    text = described(
        [Compared("2 requests/s", said, was, 0, 0.02, at_pace, 0.8), Compared("all", said, none, 3, 0, at_pace, 0.8)]
    )
    calibrated, drift, now = text.partition("steps take 0.80 times what they took when the engine was calibrated")
    assert drift and calibrated.count("(+10%)") == now.count("(-10%)") == len(FIGURES)
    assert "3 failed" in calibrated and "2%" in calibrated


def test_the_largest_errors_are_told_with_the_plans_of_the_same_step_model(tmp_path):
    said = [dict.fromkeys(FIGURES, value) for value in (1.1, 0.7, 1.2)]
    was = [dict.fromkeys(FIGURES, 1.0), dict.fromkeys(FIGURES, 1.0), dict.fromkeys(FIGURES, 0.0)]
    at_pace = dict.fromkeys(FIGURES, 9.0)  # not kept: plans are made as the engine was calibrated
    loads = [Compared("x", *one, 0, 0.02, at_pace) for one in zip(said, was, strict=True)]
    keep(tmp_path, "today", loads)
    assert _checked(tmp_path, "today") == pytest.approx(dict.fromkeys(FIGURES, -0.3))
    assert _checked(tmp_path, "later") == {} == _checked(tmp_path / "none", "today")
    keep(tmp_path, "later", [Compared("x", said[0], was[0], 0, 0.5, said[0])])
    assert _checked(tmp_path, "today")  # others used half of the machine: not kept
    keep(tmp_path, "later", [Compared("x", said[0], was[0], 0, 0.0, said[0], 1.3)])
    assert _checked(tmp_path, "today")  # the machine is slower than when the engine was calibrated
    assert "ttft_p95_s -30%" in _errors(_checked(tmp_path, "today"))
    assert "not compared" in _errors({})


def test_the_turns_of_a_load_count_by_their_mean():
    turns = [
        Compared(
            "2 requests/s",
            *(dict.fromkeys(FIGURES, x) for x in (said, was)),
            failed,
            others,
            dict.fromkeys(FIGURES, 2 * said),
        )
        for said, was, failed, others in [(1.0, 2.0, 0, 0.1), (3.0, 2.0, 1, 0.0), (2.0, 5.0, 2, 0.2)]
    ]
    mean = _mean(turns, 1.05)
    assert mean.forecast == dict.fromkeys(FIGURES, 2.0) and mean.measured == dict.fromkeys(FIGURES, 3.0)
    assert mean.at_pace == dict.fromkeys(FIGURES, 4.0)
    assert (mean.load, mean.failed, mean.others, mean.steps_take) == ("2 requests/s", 3, pytest.approx(0.1), 1.05)


def test_errors_that_cannot_be_read_are_none_and_what_was_not_measured_has_none(tmp_path):
    """Answers of one token have no ITL."""
    for damaged in ('{"of": "today", "err', "[]", '{"of": "today"}', '{"of": "today", "errors": 1}'):
        (tmp_path / CHECKED).write_text(damaged)
        assert _checked(tmp_path, "today") == {}
    was = dict.fromkeys(FIGURES, 1.0) | {"itl_mean_s": math.nan}
    said = dict.fromkeys(FIGURES, 1.1)
    found = [Compared("x", said, was, 0, 0.0, said)]
    keep(tmp_path, "today", found)
    assert _checked(tmp_path, "today") == pytest.approx(dict.fromkeys(set(FIGURES) - {"itl_mean_s"}, 0.1))
    assert [path.name for path in tmp_path.iterdir()] == [CHECKED] and "nan" not in described(found)


@pytest.mark.parametrize(("step_s", "warmup_s"), [(0.01, check.WARMUP_S), (0.1, 2 * 10.2)])
def test_clients_that_all_begin_at_once_are_measured_from_their_third_answers(tmp_path, step_s, warmup_s):
    one = {"name": "chat", "requests_per_s": 1.0, "input": 9, "output": 100}
    replica = dataclasses.replace(REPLICA, step=dataclasses.replace(REPLICA.step, step_s=step_s))
    load = loads_of(of_table(table(classes=[one])).pools["main"], replica, 0, "")[0]
    *_, closed = _loads(load, replica, 20.0, 4, 15.0, str(tmp_path))
    assert float(closed.options[closed.options.index("--warmup") + 1]) == pytest.approx(warmup_s, rel=0.05)


def test_requests_that_the_engine_refuses_are_not_sent(tmp_path):
    one = {"name": "chat", "requests_per_s": 1.0, "input": {"p50": 200, "p95": 300, "most": 2000}, "output": 9}
    for longest, loads in ((380, 3), (2009, 4)):
        replica = dataclasses.replace(REPLICA, max_seq_len=longest)
        load = loads_of(of_table(table(classes=[one])).pools["main"], replica, 0, "")[0]
        assert bool(load.means(longest, "")[2]) == (loads == 3)
        found = list(zip(range(4), _loads(load, replica, 20.0, 4, 15.0, str(tmp_path)), strict=False))
        assert len(found) == loads  # the bench itself draws the requests of the fourth, a closed loop
        forecasts = [[one.forecast(replica) for _ in "ab"] for _, one in found]
        assert all(first == second for first, second in forecasts)  # a forecast leaves the load as it is
        rows = arrivals.read_trace(tmp_path / "trace.jsonl").rows
        assert len(rows) > 100 and max(row.input_tokens + row.output_tokens for row in rows) <= longest


@pytest.mark.parametrize("seconds", [1.0, math.inf, math.nan])
def test_seconds_that_no_load_can_last_are_refused(seconds):
    with pytest.raises(InvalidArgument, match="seconds: must be from 3 to 3600, got"):
        run(of_table(table()), "main", seconds)


@pytest.mark.parametrize(("rate", "seconds", "enough"), [(0.05, 45.0, False), (0.05, 3000.0, True), (2.0, 3.0, False)])
def test_a_turn_in_which_no_request_comes_is_refused_before_anything_is_measured(monkeypatch, rate, seconds, enough):
    def measured(engine, folder):
        raise AssertionError("the engine is measured")

    monkeypatch.setenv("TRIDENT_ENGINES_DIR", "engines")  # which the check changes
    for module in (check, scenario):
        monkeypatch.setattr(module, "kind_of", lambda pool, place: REPLICA)
    point = rate, SimpleNamespace(sequences=1.0), "slots"
    monkeypatch.setattr(check, "operating_point", lambda *given: point)
    monkeypatch.setattr(check, "_steps_take", measured)
    problem = "the engine is measured" if enough else "^seconds: must be more: of .* requests/s none comes in a turn of"
    with pytest.raises(AssertionError if enough else InvalidArgument, match=problem):
        run(of_table(table(estimate=None, engine="engines/some")), "main", seconds)
