"""Sums over the last minutes, and percentiles that are at most a tenth too high."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.telemetry.pool_outcomes import LONGEST_S, SLICE_S, Distribution, PoolOutcomes

durations = st.lists(st.floats(0.0001, 1000), min_size=1, max_size=50)


@given(durations, st.sampled_from([0.01, 0.5, 0.95, 1.0]))
def test_a_percentile_is_at_most_a_tenth_too_high(seconds, fraction):
    found = Distribution()
    for duration in seconds:
        found.add(duration)
    rank = next(n for n in range(1, len(seconds) + 1) if n >= fraction * len(seconds) - 1e-6)
    true = sorted(seconds)[rank - 1]
    assert true * 0.999 <= found.percentile(fraction) <= true * 1.11
    assert found.total() == len(seconds)


@given(durations, st.floats(0.001, 100))
def test_what_counts_as_above_is_above(seconds, limit):
    found = Distribution()
    for duration in seconds:
        found.add(duration)
    assert sum(s > limit * 1.11 for s in seconds) <= found.above(limit) <= sum(s > limit * 0.999 for s in seconds)


def test_windows_end_where_they_should():
    now = [1000.0]
    outcomes = PoolOutcomes(lambda: now[0])
    for _ in range(10):
        outcomes.now("a").requests += 1
        outcomes.now("a").first.add(0.5)
        assert outcomes.window("a", 0).requests == 1  # at once
        told = outcomes.fold()
        assert list(told) == ["a"] and told["a"].requests == 1
        now[0] += SLICE_S
    assert outcomes.window("a", 3 * SLICE_S).requests == 3
    assert outcomes.window("a", LONGEST_S).requests == outcomes.window("a", LONGEST_S).first.total() == 10
    assert outcomes.window("b", LONGEST_S).summary()["ttft_p95_s"] == 0
    outcomes.forget("a")
    assert outcomes.window("a", LONGEST_S).requests == 0


def test_nothing_is_kept_for_longer_than_it_can_be_asked_for():
    now = [0.0]
    outcomes = PoolOutcomes(lambda: now[0])
    for _ in range(2000):
        outcomes.now("a").errors += 1
        outcomes.fold()
        now[0] += SLICE_S
    assert outcomes.window("a", 1e9).errors == pytest.approx(LONGEST_S / SLICE_S, abs=1)
