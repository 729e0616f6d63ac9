from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.wire.failures import RetryHint
from clients.wire.retries import NO_RETRY, RetryBudget, RetryPolicy, RetrySchedule
from contract.errors import DeadlineExceeded, EngineFailed, InvalidArgument, Overloaded, Unavailable

ENDLESS_S = 1e9


def schedule(policy: RetryPolicy | None = None, budget: RetryBudget | None = None, seed: int = 0) -> RetrySchedule:
    return RetrySchedule(policy or RetryPolicy(), budget or RetryBudget(), random.Random(seed))


@given(st.integers(1, 30), st.floats(0, 10), st.integers(0, 999))
def test_a_wait_lies_between_the_servers_hint_and_the_backoff_above_it(
    failures: int, after_s: float, seed: int
) -> None:
    policy = RetryPolicy(base_s=0.1, cap_s=3.0)
    wait_s = policy.wait_s(failures, RetryHint(after_s), random.Random(seed))
    assert after_s <= wait_s <= after_s + min(3.0, 0.1 * 2 ** (failures - 1))


def test_the_jitter_is_full_and_grows_with_the_failures() -> None:
    policy, rng = RetryPolicy(base_s=1.0, cap_s=100.0), random.Random(1)
    means = []
    for failures in (1, 2, 3):
        waits = [policy.wait_s(failures, RetryHint(), rng) for _ in range(2000)]
        assert min(waits) < 0.05 * 2 ** (failures - 1) and max(waits) > 0.95 * 2 ** (failures - 1)
        means.append(sum(waits) / len(waits))
    assert means == pytest.approx([0.5, 1.0, 2.0], rel=0.1)


def test_after_thousands_of_failures_a_wait_is_still_at_most_the_cap() -> None:
    assert 0 <= RetryPolicy(attempts=5000).wait_s(4999, RetryHint(), random.Random(1)) <= 2


def test_only_retryable_errors_are_tried_again() -> None:
    for error in (EngineFailed("x"), DeadlineExceeded("x"), InvalidArgument("a", "b")):
        assert schedule().wait_s(error, RetryHint(), ENDLESS_S) is None
    for error in (Overloaded("x"), Unavailable("x")):
        assert schedule().wait_s(error, RetryHint(), ENDLESS_S) is not None


def test_the_attempts_are_counted_with_the_first_one() -> None:
    retries = schedule(RetryPolicy(attempts=3))
    waits = [retries.wait_s(Unavailable("x"), RetryHint(), ENDLESS_S) for _ in range(3)]
    assert [wait is None for wait in waits] == [False, False, True]
    assert schedule(NO_RETRY).wait_s(Unavailable("x"), RetryHint(), ENDLESS_S) is None


def test_no_wait_reaches_beyond_the_deadline() -> None:
    assert schedule().wait_s(Overloaded("x"), RetryHint(2.0), remaining_s=1.5) is None
    assert schedule().wait_s(Overloaded("x"), RetryHint(2.0), remaining_s=10.0) >= 2.0


def test_a_server_that_asks_for_no_retry_gets_none_but_another_replica_may() -> None:
    assert schedule().wait_s(Unavailable("x"), RetryHint(never=True), ENDLESS_S) is None
    assert schedule().wait_s(Unavailable("x"), RetryHint(never=True), ENDLESS_S, alternative=True) == 0.0


def test_an_outage_is_not_multiplied_beyond_the_budget() -> None:
    budget = RetryBudget(ratio=0.2, reserve=10)
    sent = 0
    for seed in range(1000):
        retries = schedule(budget=budget, seed=seed)
        sent += 1
        while retries.wait_s(Unavailable("down"), RetryHint(), ENDLESS_S) is not None:
            sent += 1
    assert 1000 < sent <= 1000 * 1.2 + 10


def test_going_elsewhere_because_no_replica_was_reached_is_free() -> None:
    budget = RetryBudget(reserve=1)
    for _ in range(5):
        assert (
            schedule(budget=budget).wait_s(Unavailable("x"), RetryHint(unsent=True), ENDLESS_S, alternative=True) == 0
        )
    assert budget.tokens == 1


def test_settings_that_make_no_sense_are_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="retry.attempts: must be 1 .*, got 0"):
        RetryPolicy(attempts=0)
    with pytest.raises(InvalidArgument, match="retry.base_s: must be from 0 to cap_s, 2, got 3"):
        RetryPolicy(base_s=3, cap_s=2)
