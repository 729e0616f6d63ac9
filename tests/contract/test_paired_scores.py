import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.paired_scores import compare, holm, mean_interval, resampled_means, sign_test, wilson


def binary(seed, cases, loss, discordant):
    """Differences of scores 0 and 1: a share ``discordant`` differs, and the mean is -loss."""
    worse, better = (discordant + loss) / 2, (discordant - loss) / 2
    return np.random.default_rng(seed).choice([-1.0, 0.0, 1.0], p=[worse, 1 - worse - better, better], size=cases)


@given(better=st.integers(0, 40), worse=st.integers(0, 40))
def test_the_sign_test_is_the_binomial_tail(better, worse):
    count = better + worse
    exact = sum(math.comb(count, k) for k in range(worse, count + 1)) / 2**count
    assert sign_test(better, worse) == pytest.approx(exact)


@given(hits=st.integers(0, 50), more=st.integers(0, 50), confidence=st.sampled_from([0.9, 0.95, 0.99]))
def test_wilsons_interval_holds_the_share_and_is_symmetric(hits, more, confidence):
    cases = hits + more
    low, high = wilson(hits, cases, confidence)
    assert 0 <= low <= (hits / cases if cases else 0.5) <= high <= 1
    assert wilson(more, cases, confidence) == pytest.approx((1 - high, 1 - low)) or not cases


def test_wilsons_interval_is_the_published_one():
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)  # Newcombe 1998, method 3


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1), max_size=8), st.sampled_from([0.01, 0.05, 0.2]))
def test_holm_rejects_between_bonferroni_and_each_alone(probabilities, alpha):
    rejected = holm(probabilities, alpha)
    assert {name for name, p in probabilities.items() if p <= alpha / len(probabilities)} <= rejected
    assert rejected <= {name for name, p in probabilities.items() if p <= alpha}


@given(st.lists(st.integers(-1, 1), max_size=60), st.sampled_from([0.0, 0.02, 0.1]))
def test_a_loss_is_never_both_kept_and_shown(differences, margin):
    found = compare(np.array(differences, float), margin)
    assert not (found.kept and found.loss_p <= 0.05)
    assert found.low <= found.high and found.better + found.worse <= found.cases == len(differences)
    assert found == compare(np.array(differences, float), margin), "the same cases give the same answer"


@given(st.lists(st.integers(-1, 1), min_size=1, max_size=60))
def test_a_larger_margin_is_kept_where_a_smaller_one_is(differences):
    kept = [compare(np.array(differences, float), margin).kept for margin in (0.0, 0.05, 0.1, 0.3, 0.9)]
    assert kept == sorted(kept)


def test_equal_cases_pass_once_there_are_as_many_as_it_asked_for():
    few = compare(np.zeros(20), 0.05)
    assert not few.kept and few.needed is not None
    assert compare(np.zeros(20 + few.needed), 0.05).kept
    assert not compare(np.zeros(0), 0.05).kept and compare(np.zeros(0), 0.0).needed is None


def test_a_mean_of_many_values_has_the_normal_interval():
    values = np.random.default_rng(3).normal(1.0, 2.0, 400)
    low, high = mean_interval(values)
    assert (low + high) / 2 == pytest.approx(values.mean(), abs=0.02)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)
    assert resampled_means(np.ones(3)).tolist() == [1.0] * 4000


def rates(cases, loss, discordant, margin=0.05, seeds=2000):
    """The share of seeds where the loss is shown to be kept, and where it is shown to be larger."""
    found = [compare(binary(seed, cases, loss, discordant), margin) for seed in range(seeds)]
    return np.mean([one.kept for one in found]), np.mean([max(one.loss_p, one.sign_p) <= 0.05 for one in found])


@pytest.mark.slow
@pytest.mark.parametrize("cases,discordant", [(60, 0.1), (200, 0.3), (500, 0.06)])
def test_the_error_rates_are_those_of_the_docs(cases, discordant):
    passed, failed = rates(cases, 0.05, discordant, seeds=1000)
    assert passed <= 0.07 and failed <= 0.07  # 5 %, with three standard errors of 1000 seeds
    assert rates(cases, 0.0, discordant, seeds=1000)[1] <= 0.005


@pytest.mark.slow
@pytest.mark.parametrize("loss", [0.0, 0.12])
def test_with_the_cases_that_it_asks_for_it_decides(loss):
    true = binary(1, 200_000, loss, 0.2)
    few = np.quantile(true, (np.arange(100) + 0.5) / 100)  # as the truth is, in 100 cases
    cases = 100 + compare(few, 0.05).needed
    assert 0.75 <= rates(cases, loss, 0.2, seeds=400)[loss > 0] <= 0.95
