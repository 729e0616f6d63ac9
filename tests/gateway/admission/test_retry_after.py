"""Paces and hints."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.retry_after import DrainRate, headers, retry_after_s


def test_a_steady_pace_is_found_and_a_new_one_followed() -> None:
    drain, now_s = DrainRate(memory_s=10), 100.0
    for pace in (500, 2000):
        for _ in range(600):
            now_s += 0.1
            drain.observe(pace / 10, now_s)
        assert drain.tokens_per_s(now_s) == pytest.approx(pace, rel=0.03)


def test_the_pace_is_right_before_the_memory_is_full() -> None:
    drain = DrainRate(memory_s=60)
    for tenth in range(31):
        drain.observe(100, tenth / 10)
    assert drain.tokens_per_s(3.0) == pytest.approx(1000, rel=0.1)


def test_nothing_seen_or_nothing_done_for_long_is_no_pace() -> None:
    drain = DrainRate()
    assert drain.tokens_per_s(5) == 0
    drain.observe(1000, 5)
    assert drain.tokens_per_s(500) < 1e-9


def test_the_hint_is_backlog_by_pace_with_jitter_above_it() -> None:
    rng = random.Random(1)
    hints = [retry_after_s(5000, 1000, rng) for _ in range(1000)]
    assert min(hints) >= 5 and max(hints) <= 6.25
    assert len({round(hint, 3) for hint in hints}) > 500


@given(st.floats(0, 1e12), st.floats(0, 1e12), st.integers())
def test_a_hint_is_always_within_its_bounds(backlog: float, pace: float, seed: int) -> None:
    assert 0.1 <= retry_after_s(backlog, pace, random.Random(seed)) <= 75


@given(st.floats(0, 1e6))
def test_headers_are_never_early(wait_s: float) -> None:
    message = headers(wait_s)
    assert int(message["retry-after"]) >= max(wait_s, 1) and int(message["retry-after-ms"]) >= wait_s * 1000
