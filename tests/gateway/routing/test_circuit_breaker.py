"""The breaker, moved through time by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from contract.errors import DeadlineExceeded, EngineFailed, InvalidArgument, Overloaded, Unavailable
from gateway.routing.circuit_breaker import (
    LONGEST_OPEN,
    SILENCE_S,
    Breaker,
    BreakerPolicy,
    BreakerState,
    blames_replica,
    token_digest,
)

POLICY = BreakerPolicy(failures=3, open_s=10.0)


def failed(times: int, now_s: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(times):
        breaker = breaker.after(False, now_s, POLICY)
    return breaker


def test_it_opens_after_so_many_failures_in_a_row():
    assert failed(2).state is BreakerState.CLOSED and failed(2).allows(0.0)
    assert failed(3).state is BreakerState.OPEN and not failed(3).allows(9.9)
    assert failed(2).after(True, 0.0, POLICY).after(False, 0.0, POLICY).state is BreakerState.CLOSED


def test_after_its_pause_one_trial_goes_through_and_decides():
    opened = failed(3)
    assert opened.allows(10.0)
    trial = opened.sent(10.0)
    assert trial.state is BreakerState.HALF_OPEN and not trial.allows(10.0)
    assert trial.after(True, 11.0, POLICY) == Breaker()
    again = trial.after(False, 11.0, POLICY)
    assert again.state is BreakerState.OPEN and not again.allows(30.9) and again.allows(31.0)


def test_an_open_breaker_whose_pause_is_over_is_half_open_before_any_trial():
    opened = failed(3)
    assert opened.state_at(9.9) is BreakerState.OPEN and opened.state_at(10.0) is BreakerState.HALF_OPEN
    assert opened.sent(10.0).state_at(10.0) is BreakerState.HALF_OPEN and Breaker().state_at(1e9) is BreakerState.CLOSED


def test_the_first_tokens_of_a_trial_close_it_and_the_next_failure_opens_it_for_longer():
    trial = failed(3).sent(10.0)
    assert trial.began(POLICY, sent_s=9.9) is trial and Breaker().began(POLICY, 10.0) == Breaker()
    begun = trial.began(POLICY, sent_s=10.0)
    assert begun.allows(10.0) and begun.after(True, 20.0, POLICY) == Breaker()
    again = begun.after(False, 20.0, POLICY)
    assert not again.allows(39.9) and again.allows(40.0)


def test_a_trial_that_says_nothing_may_be_made_again():
    assert failed(3).sent(10.0).left(12.0).allows(12.0)


def test_requests_that_began_before_it_opened_neither_close_it_nor_prolong_it():
    opened = failed(3)
    assert opened.after(True, 1.0, POLICY) == opened and opened.after(False, 1.0, POLICY) == opened


def test_only_the_trial_decides_a_half_open_breaker():
    trial = failed(3).sent(10.0)
    for error in (None, Unavailable("x"), InvalidArgument("a", "b")):
        assert trial.over(error, 0.0, 11.0, POLICY, sent_s=9.9) is trial
        assert trial.over(error, 0.0, 11.0, POLICY, sent_s=10.0) is not trial


@given(st.lists(st.tuples(st.sampled_from(["ok", "bad", "left"]), st.floats(0, 100)), max_size=60))
def test_it_never_stays_shut_for_ever_and_never_lets_two_trials_out(events):
    breaker, now_s = Breaker(), 0.0
    for what, wait_s in events:
        now_s += wait_s
        if breaker.allows(now_s):
            breaker = breaker.sent(now_s)
            assert breaker.state is not BreakerState.OPEN
            if breaker.state is BreakerState.HALF_OPEN:
                assert not breaker.allows(now_s + 1e6)
            breaker = breaker.left(now_s) if what == "left" else breaker.after(what == "ok", now_s, POLICY)
        assert breaker.allows(now_s + POLICY.open_s * LONGEST_OPEN)


def test_refusals_are_answers_and_silence_is_not():
    answers = (None, InvalidArgument("a", "b"), Overloaded("x"))
    assert [blames_replica(one, SILENCE_S) for one in answers] == [False, None, None]
    assert all(blames_replica(one, SILENCE_S) for one in (Unavailable("x"), EngineFailed("x"), DeadlineExceeded("x")))


def test_a_deadline_blames_only_who_was_silent_for_long():
    assert blames_replica(DeadlineExceeded("x"), SILENCE_S - 0.01) is None
    assert blames_replica(DeadlineExceeded("x"), 0.0) is None and blames_replica(Unavailable("x"), 0.0)


def test_the_digest_is_of_the_ids_in_decimal():
    assert token_digest((12, 7)) == "fb9058ebc189cc58c5eeb42c5660096ec128d3ca55be115a09d5e5b804754a9c"


def test_a_replica_that_another_gateway_found_faulty_may_fail_once_and_recovers_with_a_success():
    suspected = Breaker().suspected(POLICY)
    assert suspected.allows(0.0) and suspected.suspected(POLICY) == suspected
    assert suspected.after(False, 0.0, POLICY).state is BreakerState.OPEN
    assert suspected.after(True, 0.0, POLICY) == Breaker()
    opened = Breaker(BreakerState.OPEN, 9, 10.0, 10.0)
    assert opened.suspected(POLICY) is opened
