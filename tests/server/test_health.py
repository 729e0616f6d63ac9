"""What is decided when something happens, without a server."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server import health
from server.health import (
    BecameReady,
    CanaryFailed,
    CanaryPassed,
    Drain,
    EngineHung,
    GiveUp,
    Nothing,
    Record,
    Restart,
    RevivalFailed,
    Revive,
    ServerExited,
    ServerHung,
    StartFailed,
    State,
    StopAsked,
    StubDied,
    StubHung,
    decide,
)

READY = Record(state=State.READY, since_s=0.0)
LONG_AFTER_S = 1000.0


def after(record, *events, now_s=LONG_AFTER_S):
    action = None
    for event in events:
        record, action = decide(record, event, now_s)
    return record, action


def test_a_first_start_that_fails_is_not_tried_again():
    record, action = after(Record(), StartFailed("no such weights"))
    assert action == GiveUp() and record.state is State.FAILED
    assert record.reason == "the server did not start: no such weights"


def test_a_first_start_that_crashes_is_tried_again_but_not_for_ever():
    record, action = after(Record(), StartFailed("signal 6", crashed=True))
    assert action == Restart(0.5) and record.state is State.STARTING
    record, action = after(record, StartFailed("signal 6", crashed=True), StartFailed("signal 6", crashed=True))
    assert action == GiveUp() and record.reason == "the server did not start 3 times in a row: signal 6"


def test_a_death_of_a_streaming_stub_restarts_the_server_at_once_and_says_why():
    record, action = after(READY, StubDied("engine", streams=True))
    assert action == Restart(0.0) and (record.state, record.restarts) == (State.RESTARTING, 1)
    assert record.reason.startswith("the engine's process died; its streams cannot end")


def test_a_death_of_the_tokenizer_only_revives_it():
    record, action = after(READY, StubDied("tokenizer", streams=False))
    assert action == Revive("tokenizer")
    assert (record.state, record.restarts, record.revivals) == (State.RESTARTING, 0, 1)
    record, action = after(record, BecameReady())
    assert action == Nothing() and record.state is State.READY and record.reason == ""


def test_a_death_during_a_revival_and_a_failed_revival_restart_the_server():
    reviving, _ = after(READY, StubDied("tokenizer", streams=False))
    for event in (StubDied("tokenizer", False), StubDied("engine", True), RevivalFailed("tokenizer", "no")):
        record, action = after(reviving, event)
        assert action == Restart(0.0) and record.restarts == 1


def test_an_exit_is_told_by_its_signal_or_code():
    assert "signal 9" in after(READY, ServerExited(137))[0].reason
    assert "code 1" in after(READY, ServerExited(1))[0].reason


def test_three_canaries_must_fail_in_a_row():
    record, action = after(READY, CanaryFailed("slow"), CanaryFailed("slow"), CanaryPassed(), CanaryFailed("slow"))
    assert action == Nothing() and record.state is State.READY
    record, action = after(record, CanaryFailed("slow"), CanaryFailed("no token within 5 s"))
    assert action == Restart(0.0) and "no token within 5 s" in record.reason


def test_starts_that_fail_in_a_row_are_retried_with_pauses_and_then_given_up():
    record, actions = after(READY, ServerExited(1))[0], []
    while record.state is not State.FAILED:
        record, action = after(record, StartFailed("port taken"))
        actions.append(action)
    assert actions == [Restart(0.5), Restart(1.0), GiveUp()]
    assert record.reason == "the server did not start 3 times in a row: port taken"


def test_quick_deaths_wait_ever_longer_up_to_a_bound_and_end():
    record, delays = READY, []
    while record.state is not State.FAILED:
        record, action = decide(record, ServerExited(139), now_s=1.0)
        if isinstance(action, Restart):
            delays.append(action.delay_s)
            record, _ = decide(record, BecameReady(), now_s=0.5)
    assert delays[:6] == [0.0, 0.5, 1.0, 2.0, 4.0, 5.0] and max(delays) == 5.0
    assert len(delays) == health.QUICK_DEATHS - 1 and "died 20 times" in record.reason


def test_a_server_that_ran_for_long_is_restarted_without_a_pause_whatever_came_before():
    tired = Record(state=State.READY, since_s=0.0, quick_deaths=7)
    record, action = decide(tired, ServerExited(139), now_s=health.QUICK_S)
    assert action == Restart(0.0) and record.quick_deaths == 1


@pytest.mark.parametrize("state", [State.STARTING, State.READY, State.RESTARTING])
def test_a_stop_is_obeyed_in_every_state(state):
    record, action = after(Record(state=state), StopAsked("it was interrupted"))
    assert action == Drain() and record.state is State.DRAINING


EVENTS = st.one_of(
    st.just(BecameReady()),
    st.builds(StartFailed, st.just("broken"), st.booleans()),
    st.builds(ServerExited, st.integers(0, 255)),
    st.builds(StubDied, st.sampled_from(["tokenizer", "engine"]), st.booleans()),
    st.builds(RevivalFailed, st.just("tokenizer"), st.just("broken")),
    st.just(CanaryPassed()),
    st.builds(CanaryFailed, st.just("slow")),
    st.builds(StopAsked, st.just("asked")),
)


@given(st.lists(st.tuples(EVENTS, st.floats(0, 100)), max_size=30))
def test_laws_of_every_history(history):
    record, now_s = Record(), 0.0
    for event, pause_s in history:
        now_s += pause_s
        was = record
        record, action = decide(record, event, now_s)
        # Only a token makes it ready.
        assert record.state is not State.READY or was.state is State.READY or isinstance(event, BecameReady)
        # A stop and a failure are final.
        if was.state in (State.DRAINING, State.FAILED):
            assert (record, action) == (was, Nothing())
        # Counters count actions; every action has a reason and a state that tells the truth.
        assert record.restarts - was.restarts == isinstance(action, Restart)
        assert record.revivals - was.revivals == isinstance(action, Revive)
        if isinstance(action, (Restart, Revive)):
            tries_to_start = isinstance(event, StartFailed) and was.state is State.STARTING
            assert record.state is (State.STARTING if tries_to_start else State.RESTARTING) and record.reason
        if isinstance(action, Restart):
            assert 0.0 <= action.delay_s <= health.LONGEST_BACKOFF_S
        assert isinstance(action, GiveUp) == (record.state is State.FAILED and was.state is not State.FAILED)


def test_a_hung_engine_restarts_the_server_after_its_streams_were_told_why():
    record, action = decide(replace(READY, strikes=2), EngineHung("the engine process hung and was killed"), 60.0)
    assert action == Restart(0.0, farewell="the engine process hung and was killed")
    assert record.state is State.RESTARTING and record.restarts == 1 and record.strikes == 0
    assert record.reason == "the engine process hung and was killed; restarting the server"


def test_a_hung_server_and_a_hung_stub_of_running_streams_restart_the_server_at_once():
    for event in (ServerHung("no answer"), StubHung("detokenizer", True, "no heartbeat")):
        record, action = decide(READY, event, 60.0)
        assert action == Restart(0.0) and record.state is State.RESTARTING and event.reason in record.reason


def test_a_hung_tokenizer_is_revived_and_during_a_repair_the_server_is_restarted():
    hung = StubHung("tokenizer", False, "no heartbeat")
    record, action = decide(READY, hung, 60.0)
    assert action == Revive("tokenizer") and (record.state, record.revivals) == (State.RESTARTING, 1)
    assert "hangs (no heartbeat)" in record.reason
    assert decide(record, hung, 61.0)[1] == Restart(0.0)


def test_a_canary_that_fails_during_a_repair_is_no_strike():
    repairing = replace(READY, state=State.RESTARTING, strikes=2)
    assert decide(repairing, CanaryFailed("no such model"), 60.0) == (repairing, Nothing())
