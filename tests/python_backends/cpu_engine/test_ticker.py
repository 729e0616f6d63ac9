"""The ticker by itself: how often it works, and when it sleeps. What it decides is in test_engine.py."""

import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_backends.cpu_engine import ticker
from python_backends.cpu_engine.coalescing_window import CoalescingWindow, ServingCost
from python_backends.cpu_engine.metrics import EngineLoad
from python_backends.cpu_engine.scheduler import Scheduler
from python_backends.cpu_engine.ticker import HttpDisconnects, Ticker
from python_backends.ensemble.token_increment import StreamEvent
from python_backends.ensemble.worker_messages import StepReport
from tests.python_backends.cpu_engine.test_stream import stream


class Recorder:
    """Stands for the senders, whose lock it is, and the metrics."""

    def __init__(self):
        self.put_keys, self.sent, self.loads, self._lock = [], 0, [], threading.RLock()

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()

    def put(self, found):
        self.put_keys.append(found.key)

    def show(self, load):
        self.loads.append(load)


class Setting:
    def __init__(self):
        self.recorder, self.streams, self.ended = Recorder(), {}, []
        self.scheduler, self.now_ns, self.closed = Scheduler(slots=2, blocks=8, max_waiting=4), 10**12, ()
        cost = ServingCost(lambda: None)
        self.ticker = Ticker(
            self.streams,
            self.scheduler,
            CoalescingWindow(0, cost),
            cost,
            self.recorder,
            self.recorder,
            HttpDisconnects(lambda: self.closed),
            end=self._end,
            load=lambda: EngineLoad(self.scheduler.running, self.scheduler.waiting, 2, 8, StepReport(0, 0), 0),
            clock_ns=lambda: self.now_ns,
        )
        self.ticker.start()

    def _end(self, key, event, *, error=None, cancelled_by=None):
        self.ended.append((key, event, cancelled_by))
        del self.streams[key]
        self.scheduler.release(key)

    def add(self, **changes):
        one = stream(**changes)
        one.submitted_ns = self.now_ns
        self.scheduler.enqueue(one.key, 1)
        self.scheduler.schedule()
        one.started_ns = self.now_ns
        with self.recorder:
            self.streams[one.key] = one
            self.ticker.watch(one.request.deadline_ns)
        return one


@pytest.fixture
def setting():
    made = Setting()
    yield made
    made.ticker.close()


def until(condition):
    give_up_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.005)


def test_without_work_it_sleeps_and_close_still_shows_the_gauges(setting):
    assert not setting.ticker._work.is_set() and setting.recorder.loads == []
    setting.ticker.close()
    assert setting.recorder.loads


def test_it_ticks_while_a_stream_lives_and_sleeps_after_the_last(setting):
    one = setting.add()
    until(lambda: setting.recorder.loads)
    assert setting.ticker._work.is_set()
    del setting.streams[one.key]
    setting.scheduler.release(one.key)
    until(lambda: not setting.ticker._work.is_set())
    assert setting.recorder.loads[-1].running == 0


def test_a_tick_that_fails_does_not_end_those_after_it(setting, monkeypatch):
    failures = iter([RuntimeError("no shared memory")])

    def show(load):
        for failure in failures:
            raise failure
        setting.recorder.loads.append(load)

    monkeypatch.setattr(setting.recorder, "show", show)
    setting.add(timeout_ns=10**9)
    until(lambda: setting.recorder.loads)
    setting.now_ns += 10**12
    until(lambda: setting.ended)


def test_gauges_that_could_not_be_shown_are_shown_although_nothing_runs(setting, monkeypatch):
    show, tries = setting.recorder.show, iter([False])
    monkeypatch.setattr(setting.recorder, "show", lambda load: show(load) if next(tries, True) else 1 / 0)
    setting.ticker.wake()  # for one tick
    until(lambda: setting.recorder.loads and not setting.ticker._work.is_set())


def test_a_stream_past_its_deadline_is_ended(setting):
    one = setting.add(timeout_ns=10**9)
    setting.now_ns += 10**12
    until(lambda: setting.ended)
    assert setting.ended == [(one.key, StreamEvent.ERROR, "deadline")]


def test_a_deadline_before_the_next_check_is_kept(setting):
    setting.add()
    until(lambda: setting.recorder.loads)  # it has looked at the first stream
    one = stream(key=23, timeout_ns=10**7, arrival_ns=setting.now_ns)
    with setting.recorder:
        setting.streams[one.key] = one
        setting.ticker.watch(one.request.deadline_ns)
    setting.now_ns += 2 * 10**7  # no stream has been silent for long yet
    until(lambda: setting.ended)
    assert setting.ended == [(one.key, StreamEvent.ERROR, "deadline")]


def test_a_silent_stream_is_probed(setting):
    one = setting.add()
    setting.now_ns += 10**9
    until(lambda: setting.recorder.put_keys)
    assert one.probe_due and set(setting.recorder.put_keys) == {one.key}


@pytest.mark.parametrize("streaming", [True, False])
def test_closed_http_connections_end_requests_that_answer_once_and_no_stream(setting, streaming):
    one, setting.closed = setting.add(streaming=streaming), ["client"]
    for _ in range(5):
        setting.now_ns += 10**9
        shown = len(setting.recorder.loads)
        until(lambda shown=shown: len(setting.recorder.loads) > shown or not setting.ticker._work.is_set())
    if not streaming:
        until(lambda: setting.ended)
    assert setting.ended == ([] if streaming else [(one.key, StreamEvent.CANCELLED, "client")])


@pytest.mark.parametrize("once", [{"streaming": False}, {"gathered": True}])
def test_a_closed_connection_of_a_stream_without_a_response_ends_no_request(setting, once):
    """A client of a stream that left while it waited for a slot had another client's request cancelled."""
    silent, whole = setting.add(key=1), setting.add(key=2, **once)
    setting.closed = ["client of the stream"]

    def seconds(count):
        for _ in range(count):
            setting.now_ns += 10**9
            shown = len(setting.recorder.loads)
            until(lambda shown=shown: len(setting.recorder.loads) > shown)

    seconds(5)
    assert not setting.ended
    silent.last_sent_ids_ns = setting.now_ns + 10**10  # a response by which the server finds the client
    setting.closed = ["client of the request that answers once"]
    seconds(2)
    until(lambda: setting.ended)
    assert setting.ended == [(whole.key, StreamEvent.CANCELLED, "client")]


# ---- disconnected HTTP clients ---------------------------------------------------------------------------------------


SECOND = 1_000_000_000


class Looks:
    """Looks a second apart at ``live`` requests, of which the kernel says that ``closed`` connections were left."""

    def __init__(self):
        self.closed, self.now_ns, self.asked = frozenset(), 0, 0
        self.disconnects = HttpDisconnects(self._half_closed)

    def _half_closed(self):
        self.asked += 1
        return self.closed

    def __call__(self, live, closed, silent=0):
        self.closed = frozenset(map(str, range(closed))) if isinstance(closed, int) else closed
        self.now_ns += SECOND
        assert self.disconnects.due(self.now_ns)
        found = self.disconnects.check(frozenset(live), self.now_ns, silent)
        assert not self.disconnects.due(self.now_ns + SECOND - 1)
        return set(found)


@pytest.fixture
def look():
    return Looks()


def test_requests_were_left_when_two_looks_find_a_closed_connection_for_each(look):
    assert look({1, 2}, 2) == set()
    assert look({1, 2}, 2) == {1, 2}


def test_one_caller_who_is_still_there_keeps_all(look):
    for _ in range(5):
        assert look({1, 2, 3}, 2) == set()


def test_a_closed_connection_may_be_that_of_a_stream_without_a_response(look):
    for _ in range(5):
        assert look({1}, 1, silent=1) == set()
    assert look({1}, 2, silent=1) == set()
    assert look({1}, 2, silent=1) == {1}


def test_a_request_that_is_new_or_has_ended_starts_the_count_again(look):
    assert look({1, 2}, 2) == set()
    assert look({1, 3}, 2) == set()
    assert look({1, 3}, 2) == {1, 3}
    assert look({4}, 1) == set()


def test_connections_that_others_have_closed_for_a_moment_are_no_callers(look):
    for number in range(5):  # of a health check each second, which the server closes late
        assert look({1}, {f"check {number}"}) == set()


def test_with_nothing_or_very_much_running_the_kernel_is_not_asked(look):
    assert look(set(), 0) == set()
    assert look(range(65), 65) == set() == look(range(65), 65)
    assert look.asked == 0


@given(st.lists(st.tuples(st.frozensets(st.integers(1, 4)), st.integers(0, 4)), max_size=12))
def test_only_what_every_caller_has_left_at_two_looks_is_ended(history):
    look = Looks()
    before = None
    for live, closed in history:
        left = bool(live) and closed == len(live)
        expected = set(live) if left and before == live else set()
        assert look(live, closed) == expected
        before = live if left else None


def counted(port, expected):
    """Return whether so many connections are counted, once in ten: rows of the table move while others connect."""
    return any(len(ticker.half_closed(port)) == expected for _ in range(10))


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_kernel_tells_callers_who_have_closed_from_those_who_have_not(family):
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with server:
        port = server.getsockname()[1]
        callers = [socket.create_connection((host, port)) for _ in range(3)]
        accepted = [server.accept()[0] for _ in callers]
        assert counted(port, 0)
        callers[0].close()
        assert accepted[0].recv(1) == b""  # the kernel has it
        assert counted(port, 1)
        callers[1].shutdown(socket.SHUT_WR)
        assert accepted[1].recv(1) == b""
        assert counted(port, 2)
        assert counted(callers[2].getsockname()[1], 0)
        accepted[0].close()
        assert counted(port, 1)
        for one in (*callers, *accepted):
            one.close()


def test_without_tables_no_client_has_left(tmp_path):
    assert not ticker.half_closed(8000, [tmp_path / "none"])
