"""When a candidate is rolled back: on what it does worse, surely and still, and on nothing else."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.release import RollbackRules
from gateway.telemetry.burn_rate import Share, judge, surely_more
from gateway.telemetry.pool_outcomes import Outcomes

RULES = RollbackRules()


def outcomes(requests: int, errors: int = 0, first_s: float = 0.1, token_s: float = 0.02) -> Outcomes:
    made = Outcomes(requests=requests, errors=errors)
    for _ in range(requests - errors):
        made.first.add(first_s)
        made.token.add(token_s)
    return made


def reason(candidate: Outcomes, stable: Outcomes, short: Outcomes | None = None, rules: RollbackRules = RULES) -> str:
    return judge(rules, (short or candidate, candidate), stable).reason


def test_a_candidate_that_fails_is_rolled_back_whatever_the_traffic_of_the_stable_pool():
    for stable in (0, 5, 20, 10_000):
        assert reason(outcomes(20, 20), outcomes(stable)).startswith("errors: 20 of 20 requests in 300 s")
    assert reason(outcomes(200, 20), outcomes(2000))


def test_a_candidate_that_refuses_what_the_stable_pool_takes_is_rolled_back():
    refusing = Outcomes(requests=40, refusals=20)
    assert reason(refusing, outcomes(500)).startswith("refusals: 20 of 60")
    assert reason(Outcomes(refusals=20), outcomes(500)).startswith("refusals: 20 of 20")
    assert not reason(refusing, Outcomes(requests=400, refusals=200))


def test_a_slow_candidate_is_rolled_back():
    assert reason(outcomes(50, first_s=0.5), outcomes(500)).startswith("first_token: 50 of 50")
    assert reason(outcomes(50, token_s=0.1), outcomes(500)).startswith("token: 50 of 50")
    assert not reason(outcomes(50, first_s=0.15, token_s=0.025), outcomes(500))  # slower, and within the ratio
    off = RollbackRules(first_token=0.0, token=0.0)
    assert not reason(outcomes(50, first_s=50.0, token_s=50.0), outcomes(500), rules=off)


def test_latency_is_not_judged_without_a_stable_pool_to_compare_with():
    assert not reason(outcomes(50, first_s=50.0), outcomes(4))


@given(st.integers(0, 19), st.integers(0, 1000))
def test_few_requests_decide_nothing(requests, stable):
    assert not reason(outcomes(requests, requests), outcomes(stable))


@given(st.integers(20, 2000), st.integers(20, 2000), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_errors_that_the_stable_pool_has_too_decide_nothing(candidate, stable, share):
    assert not reason(outcomes(candidate, int(candidate * share)), outcomes(stable, round(stable * share + 0.5 - 1e-9)))


def test_what_is_over_decides_nothing():
    assert not reason(outcomes(200, 100), outcomes(2000), short=outcomes(50))
    assert not reason(outcomes(200, 100), outcomes(2000), short=outcomes(0))


def test_no_figures_decide_nothing():
    assert not reason(outcomes(0), outcomes(0)) and not reason(outcomes(0), outcomes(500))


def test_equal_pools_are_hardly_ever_told_apart_by_chance():
    rng, wrong = random.Random(4), 0
    for _ in range(500):
        candidate, stable = (sum(rng.random() < 0.01 for _ in range(count)) for count in (100, 1000))
        wrong += bool(reason(Outcomes(requests=100, errors=candidate), Outcomes(requests=1000, errors=stable)))
    assert wrong <= 5


@given(st.integers(1, 500), st.integers(1, 500), st.floats(0, 1), st.floats(0, 1))
def test_the_bound_is_below_what_was_measured_and_never_negative(n, m, p, q):
    candidate, stable = Share(int(n * p), n), Share(int(m * q), m)
    assert 0 <= surely_more(candidate, stable) <= max(0.0, candidate.value - stable.value)


@pytest.mark.parametrize("bad", [5, 10, 20, 40])
def test_more_failures_burn_faster(bad):
    burns = [judge(RULES, (outcomes(100, n), outcomes(100, n)), outcomes(100)).burns["errors"] for n in (bad, bad * 2)]
    assert burns[0].short < burns[1].short and burns[0].long < burns[1].long
