"""Decisions of the supervisor about each event, without a server."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server import recovery
from server.recovery import (
    BecameReady,
    Drain,
    GiveUp,
    ProbeFailed,
    ProbePassed,
    Record,
    Reload,
    Restart,
    ServerFailed,
    StartFailed,
    State,
    StopRequested,
    StubFailed,
    decide,
)

READY = Record(state=State.READY, since_s=0.0)
LONG_AFTER_S = 1000.0
TOKENIZER_EXITED = StubFailed("tokenizer", False, "tokenizer process exited")
ENGINE_EXITED = StubFailed("engine", True, "engine process exited")
CRASHED = ServerFailed("tritonserver exited with signal 11")


def after(record, *events, now_s=LONG_AFTER_S):
    action = None
    for event in events:
        record, action = decide(record, event, now_s)
    return record, action


def test_a_first_start_that_fails_is_not_retried():
    record, action = after(Record(), StartFailed("no such weights"))
    assert action == GiveUp() and record.state is State.FAILED
    assert record.reason == "tritonserver did not start: no such weights"


def test_a_first_start_that_crashes_is_retried_a_limited_number_of_times():
    record, action = after(Record(), StartFailed("signal 6", crashed=True))
    assert action == Restart(0.5) and record.state is State.STARTING
    record, action = after(record, StartFailed("signal 6", crashed=True), StartFailed("signal 6", crashed=True))
    assert action == GiveUp() and record.reason == "tritonserver did not start 3 times in a row: signal 6"


def test_the_exit_of_a_stub_with_streams_restarts_the_server_at_once():
    record, action = after(READY, ENGINE_EXITED)
    assert action == Restart(0.0) and (record.state, record.restarts) == (State.RESTARTING, 1)
    assert record.reason == "engine process exited; its streams cannot end in this server; restarting tritonserver"


def test_the_exit_of_a_tokenizer_stub_reloads_the_tokenizer():
    record, action = after(READY, TOKENIZER_EXITED)
    assert action == Reload("tokenizer")
    assert (record.state, record.restarts, record.reloads) == (State.RESTARTING, 0, 1)
    assert record.reason == "tokenizer process exited; reloading the tokenizer, streams in flight continue"
    record, action = after(record, BecameReady())
    assert action is None and record.state is State.READY and record.reason == ""


def test_an_exit_during_a_reload_and_a_failed_reload_restart_the_server():
    reloading, _ = after(READY, TOKENIZER_EXITED)
    for event in (TOKENIZER_EXITED, ENGINE_EXITED, ServerFailed("tokenizer reload failed (no)")):
        record, action = after(reloading, event)
        assert action == Restart(0.0) and record.restarts == 1


@pytest.mark.parametrize("code, text", [(137, "signal 9"), (128, "code 128"), (1, "code 1"), (0, "code 0")])
def test_an_exit_code_is_described_by_its_signal_or_number(code, text):
    assert recovery.describe_exit(code) == text


def test_three_liveness_probes_in_a_row_must_fail():
    record, action = after(READY, ProbeFailed("slow"), ProbeFailed("slow"), ProbePassed(), ProbeFailed("slow"))
    assert action is None and record.state is State.READY
    record, action = after(record, ProbeFailed("slow"), ProbeFailed("no token within 5 s"))
    assert action == Restart(0.0) and "no token within 5 s" in record.reason


def test_starts_that_fail_in_a_row_are_retried_with_pauses_and_then_end_the_supervisor():
    record, actions = after(READY, CRASHED)[0], []
    while record.state is not State.FAILED:
        record, action = after(record, StartFailed("port taken"))
        actions.append(action)
    assert actions == [Restart(0.5), Restart(1.0), GiveUp()]
    assert record.reason == "tritonserver did not start 3 times in a row: port taken"


def test_early_failures_back_off_up_to_a_bound_and_end_the_supervisor():
    record, delays = READY, []
    while record.state is not State.FAILED:
        record, action = decide(record, CRASHED, now_s=1.0)
        if isinstance(action, Restart):
            delays.append(action.delay_s)
            record, _ = decide(record, BecameReady(), now_s=0.5)
    assert delays[:6] == [0.0, 0.5, 1.0, 2.0, 4.0, 5.0] and max(delays) == 5.0
    assert len(delays) == recovery.MAX_EARLY_FAILURES - 1 and "failed 20 times" in record.reason


def test_a_failure_long_after_readiness_is_restarted_without_a_pause():
    record = Record(state=State.READY, since_s=0.0, early_failures=7)
    record, action = decide(record, CRASHED, now_s=recovery.EARLY_S)
    assert action == Restart(0.0) and record.early_failures == 1


@pytest.mark.parametrize("state", [State.STARTING, State.READY, State.RESTARTING])
def test_a_stop_request_drains_in_every_state(state):
    record, action = after(Record(state=state), StopRequested("interrupted"))
    assert action == Drain() and record.state is State.DRAINING


EVENTS = st.one_of(
    st.just(BecameReady()),
    st.builds(StartFailed, st.just("broken"), st.booleans()),
    st.builds(ServerFailed, st.just("broken"), st.sampled_from(["", "the engine process hung"])),
    st.builds(StubFailed, st.sampled_from(["tokenizer", "engine"]), st.booleans(), st.just("broken")),
    st.just(ProbePassed()),
    st.builds(ProbeFailed, st.just("slow")),
    st.builds(StopRequested, st.just("interrupted")),
)


@given(st.lists(st.tuples(EVENTS, st.floats(0, 100)), max_size=30))
def test_invariants_of_every_sequence_of_events(history):
    record, now_s = Record(), 0.0
    for event, pause_s in history:
        now_s += pause_s
        before = record
        record, action = decide(record, event, now_s)
        # Only a passed probe makes it ready.
        assert record.state is not State.READY or before.state is State.READY or isinstance(event, BecameReady)
        # Draining and failed are final.
        if before.state in (State.DRAINING, State.FAILED):
            assert (record, action) == (before, None)
        # Counters count actions; every action has a reason and the matching state.
        assert record.restarts - before.restarts == isinstance(action, Restart)
        assert record.reloads - before.reloads == isinstance(action, Reload)
        if isinstance(action, (Restart, Reload)):
            is_first_start = isinstance(event, StartFailed) and before.state is State.STARTING
            assert record.state is (State.STARTING if is_first_start else State.RESTARTING) and record.reason
        if isinstance(action, Restart):
            assert 0.0 <= action.delay_s <= recovery.MAX_BACKOFF_S
        assert isinstance(action, GiveUp) == (record.state is State.FAILED and before.state is not State.FAILED)


def test_a_failure_with_running_streams_ends_them_with_its_error():
    hung = "the engine process hung and was killed"
    record, action = decide(replace(READY, failed_probes=2), ServerFailed(hung, stream_error=hung), 60.0)
    assert action == Restart(0.0, stream_error=hung)
    assert record.state is State.RESTARTING and record.restarts == 1 and record.failed_probes == 0
    assert record.reason == f"{hung}; restarting tritonserver"


def test_a_probe_that_fails_during_a_restart_is_not_counted():
    restarting = replace(READY, state=State.RESTARTING, failed_probes=2)
    assert decide(restarting, ProbeFailed("no such model"), 60.0) == (restarting, None)
