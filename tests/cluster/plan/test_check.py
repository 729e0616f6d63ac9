"""Forecasts beside the bench."""

from __future__ import annotations

from cluster.plan.check import FIGURES, Compared, described


def test_errors_are_those_of_the_forecast():
    said, was = dict.fromkeys(FIGURES, 1.1), dict.fromkeys(FIGURES, 1.0)
    text = described(
        [Compared("2 requests/s", said, was, 0, 0.02), Compared("all", said, dict.fromkeys(FIGURES, 0.0), 3, 0)]
    )
    assert text.count("(+10%)") == len(FIGURES) and "3 failed" in text and "2%" in text
