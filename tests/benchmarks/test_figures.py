import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import figures
from benchmarks.figures import Slo
from benchmarks.record import Record


def record(intended_s=0.0, first_s=0.1, ended_s=1.0, messages=None, **options):
    """An answered request; ``messages`` are its (instant, tokens), by default one token at ``first_s``."""
    options = {"finish_reason": "length", "sent_s": intended_s, "input_tokens": 10} | options
    messages = [(first_s, 1)] if messages is None else messages
    return Record(len(messages), intended_s, messages=messages, ended_s=ended_s, **options)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=60))
def test_percentiles_are_numpy_s(values):
    found = figures.spread(values)
    for name, q in {"p50": 50, "p90": 90, "p95": 95, "p99": 99}.items():
        assert getattr(found, name) == pytest.approx(np.percentile(values, q))
    assert found.max == max(values) and found.mean == pytest.approx(np.mean(values)) and found.count == len(values)


def test_nothing_measured_is_nan_not_zero():
    assert figures.spread([]).count == 0 and math.isnan(figures.spread([]).p99)


@given(st.lists(st.tuples(st.floats(1e-3, 1), st.integers(1, 9)), min_size=1, max_size=30))
def test_an_inter_token_latency_counts_every_token_of_a_response(steps):
    at_s, messages = 0.0, [(0.0, 1)]
    for gap, count in steps:
        messages.append((at_s := at_s + gap, count))
    expected = [gap / count for gap, count in record(messages=messages).gaps for _ in range(count)]
    found = figures.of_gaps(record(messages=messages).gaps)
    assert found.count == sum(count for _, count in steps)
    assert found.p99 == pytest.approx(np.percentile(expected, 99))
    assert found.mean * found.count == pytest.approx(at_s)


def test_latencies_count_from_the_intended_instant_of_sending():
    late = record(intended_s=1.0, sent_s=3.0, first_s=3.5, ended_s=4.0)
    found = figures.compute([late], (0, 10))
    assert found.ttft_s.p50 == 2.5 and found.latency_s.p50 == 3.0


def test_goodput_counts_requests_that_met_both_targets():
    good = record(first_s=0.4, ended_s=4.9)
    slow_start, slow_end = record(first_s=0.5, ended_s=1.0), record(first_s=0.1, ended_s=5.0)
    failed = record(messages=[], finish_reason="", error="Overloaded: full")
    cancelled = record(first_s=0.1, ended_s=0.2, cancelled=True, finish_reason="")
    found = figures.compute([good, slow_start, slow_end, failed, cancelled], (0, 2))
    assert found.goodput_per_s == 0.5 and found.good_fraction == 0.25
    assert (found.requests, found.ok, found.failed, found.cancelled) == (5, 3, 1, 1)
    assert found.errors == {"Overloaded": 1} and not found.slo_met
    assert figures.compute([good, slow_start], (0, 2), Slo(1.0, 10.0)).goodput_per_s == 1.0


@pytest.mark.parametrize(("bad", "met"), [(4, True), (6, False)])
def test_the_targets_hold_at_the_95th_percentile_failures_counted(bad, met):
    records = [record(first_s=0.1) for _ in range(100 - bad)]
    for broken in ({"error": "EngineFailed: x", "messages": []}, {"first_s": 2.0}):
        assert figures.compute(records + [record(**broken)] * bad, (0, 2)).slo_met is met


def test_rates_are_of_what_fell_into_the_window():
    early = record(intended_s=0.0, ended_s=2.5, messages=[(0.5, 3), (2.5, 5)])  # begun before it, ended within
    inside = record(intended_s=2.0, ended_s=3.0, messages=[(2.1, 1), (3.0, 2)])
    late = record(intended_s=3.9, ended_s=9.0, messages=[(4.5, 7)])
    found = figures.compute([early, inside, late], (2.0, 4.0))
    assert found.output_tokens_per_s == 8 / 2 and found.requests_per_s == 2 / 2 and found.input_tokens_per_s == 10 / 2
    assert found.requests == 2 and found.latency_s.max == pytest.approx(5.1)


def test_noise_is_how_far_rounds_are_apart():
    assert figures.noise([2.0, 3.0, 2.5]) == 0.5 and figures.noise([2.0]) == figures.LEAST_NOISE


def test_rounds_of_nothing_do_not_differ_and_others_differ_from_them_without_bound():
    assert figures.noise([0.0]) == figures.noise([0.0, 0.0]) == figures.LEAST_NOISE
    assert figures.noise([0.0, 0.5]) == math.inf


def test_a_round_without_a_value_has_the_worst():
    assert figures.rounds_of({"better": "lower", "values": [1.0, None, math.nan, math.inf]}) == [1.0] + [math.inf] * 3
    assert figures.rounds_of({"better": "higher", "values": [1.0, None, math.nan, math.inf]}) == [1.0] + [0.0] * 3


def test_compared_figures_say_which_is_better():
    assert figures.compared(figures.LOWER, {"ms: a": (1.0, 2.0)}) == {
        "ms: a": {"better": "lower", "values": [1.0, 2.0]}
    }
