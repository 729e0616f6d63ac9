"""A budget's warnings are in the headers of every request, and in the log once."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import CollectorRegistry

from gateway.admission.budgets import Demand, Standing
from gateway.telemetry import budget_watch
from gateway.telemetry.budget_watch import WARNING, BudgetWatch


def standing(balance: float, left_s: float = 100.0, level: str = "acme") -> Standing:
    name = f"tokens_per_day@2026-11-23:{level}" if left_s else f"tokens:{level}"
    return Standing(Demand(name, 0.0, 1000, 1, True, left_s, False, False, 0.8), balance)


def test_warnings_are_told_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    watch = BudgetWatch(registry)
    assert watch.observe([standing(201), standing(0, left_s=0.0)]) == {}
    for balance, told in ((200, "80%"), (100, "90%"), (0, "100%"), (-5, "100%")):
        assert watch.observe([standing(balance)]) == {WARNING: f"acme tokens_per_day {told}"}
    assert [record.fields["used_part"] for record in caplog.records if record.levelno == logging.WARNING] == [0.8, 1.0]
    value = registry.get_sample_value
    assert value("trident_gateway_budget_warnings_total", {"limit": "tokens_per_day", "at": "warn_at"}) == 1
    assert value("trident_gateway_budget_used_ratio", {"limit": "tokens_per_day", "level": "acme"}) == 1.005


def test_the_metric_is_bounded_and_forgets_what_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_watch, "MAX_SERIES", 3)
    registry = CollectorRegistry()
    watch = BudgetWatch(registry)
    for number in range(40):
        watch.observe([standing(0, level=f"team{number}")])
    assert len(watch.collect()[0].samples) == 3
    monkeypatch.setattr(budget_watch.time, "time", lambda: 10**12)
    assert not watch.collect()[0].samples
