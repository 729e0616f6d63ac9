"""Tables and plots of a plan: see tests/cluster/test_main.py for the whole."""

from __future__ import annotations

import dataclasses

from cluster.plan import planner, report
from cluster.plan.scenario import of_table
from tests.cluster.plan.scenarios import table


def test_an_input_with_which_the_objectives_are_missed_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(planner, "REQUESTS", 40)
    monkeypatch.setattr(planner, "ROUNDS", 3)
    monkeypatch.setattr(planner, "SEARCH", 2)
    [found] = planner.plan(of_table(table(price={})), tmp_path)
    found.sensitivity["output"] = (-3.0, None)
    text = report.described(found, "$")
    assert "its points" not in text and "refused" not in text
    assert "0.50% of the requests, longer than" in report.described(dataclasses.replace(found, refused=0.005), "$")
    assert "its points are within" in report.described(dataclasses.replace(found, source="published"), "$")
    assert "other mixes" not in text and "one replica's" not in text
    mixed = dataclasses.replace(found, hour=3, others=[planner.Mix(8, 370.2, "slots"), planner.Mix(9, 41.0, "kv")])
    told = report.described(mixed, "$")
    assert "above is hour 3, with the most work; hour 8: 370 requests/s (slots); hour 9: 41 requests/s (kv)" in told
    assert "one replica's" in told
    assert "missed" in text and "-3 %" in text and "replica-hours, if" in text and "a month" not in text


def test_replicas_that_wait_for_requests_cost_nothing_that_could_be_told_per_token(monkeypatch, tmp_path):
    monkeypatch.setattr(planner, "REQUESTS", 40)
    monkeypatch.setattr(planner, "SEARCH", 2)
    one = {"name": "none", "requests_per_s": 0, "input": 200, "output": 50}
    [found] = planner.plan(of_table(table(classes=[one])), tmp_path)
    assert found.cost.day == 48 and found.cost.per_1000_tokens is found.cost.per_1000_output_tokens is None
    assert "$1,460 a month; - per 1,000 tokens, - of answers" in report.described(found, "$")
    paid = dataclasses.replace(found.cost, per_1000_tokens=0.25, per_1000_output_tokens=1.0)
    told = report.described(dataclasses.replace(found, cost=paid), "$")
    assert "$1,460 a month; $0.25 per 1,000 tokens, $1 of answers" in told


def test_large_numbers_stand_apart():
    assert report._row("replicas", [27_077_401, 5], 6).split() == ["replicas", "27077401", "5"]
