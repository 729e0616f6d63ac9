"""Forecasts beside the bench."""

from __future__ import annotations

import pytest

from cluster.plan.check import FIGURES, Compared, _mean, described, keep
from cluster.plan.planner import _checked
from cluster.plan.report import _errors


def test_errors_are_those_of_the_forecast():
    said, was = dict.fromkeys(FIGURES, 1.1), dict.fromkeys(FIGURES, 1.0)
    text = described(
        [Compared("2 requests/s", said, was, 0, 0.02), Compared("all", said, dict.fromkeys(FIGURES, 0.0), 3, 0)]
    )
    assert text.endswith("steps take 1.00 times what they took when the engine was calibrated")
    assert text.count("(+10%)") == len(FIGURES) and "3 failed" in text and "2%" in text


def test_the_largest_errors_are_told_with_the_plans_of_the_same_step_model(tmp_path):
    said = [dict.fromkeys(FIGURES, value) for value in (1.1, 0.7, 1.2)]
    was = [dict.fromkeys(FIGURES, 1.0), dict.fromkeys(FIGURES, 1.0), dict.fromkeys(FIGURES, 0.0)]
    loads = [Compared("x", *one, 0, 0.02) for one in zip(said, was, strict=True)]
    keep(tmp_path, "today", loads)
    assert _checked(tmp_path, "today") == pytest.approx(dict.fromkeys(FIGURES, -0.3))
    assert _checked(tmp_path, "later") == {} == _checked(tmp_path / "none", "today")
    keep(tmp_path, "later", [Compared("x", said[0], was[0], 0, 0.5)])
    assert _checked(tmp_path, "today")  # others used half of the machine: not kept
    keep(tmp_path, "later", [Compared("x", said[0], was[0], 0, 0.0, steps_take=1.3)])
    assert _checked(tmp_path, "today")  # the machine is slower than when the engine was calibrated
    assert "ttft_p95_s -30%" in _errors(_checked(tmp_path, "today"))
    assert "not compared" in _errors({})


def test_the_turns_of_a_load_count_by_their_mean():
    turns = [
        Compared("2 requests/s", dict.fromkeys(FIGURES, said), dict.fromkeys(FIGURES, was), failed, others)
        for said, was, failed, others in [(1.0, 2.0, 0, 0.1), (3.0, 2.0, 1, 0.0), (2.0, 5.0, 2, 0.2)]
    ]
    mean = _mean(turns, 1.05)
    assert mean.forecast == dict.fromkeys(FIGURES, 2.0) and mean.measured == dict.fromkeys(FIGURES, 3.0)
    assert (mean.load, mean.failed, mean.others, mean.steps_take) == ("2 requests/s", 3, pytest.approx(0.1), 1.05)
