"""The ticker by itself: how often it works, and when it sleeps. What it decides is in test_engine.py."""

import threading
import time

import pytest

from python_backends.cpu_engine.coalescing_window import CoalescingWindow
from python_backends.cpu_engine.http_disconnects import HttpDisconnects
from python_backends.cpu_engine.metrics import EngineLoad
from python_backends.cpu_engine.scheduler import Scheduler
from python_backends.cpu_engine.serving_cost import ServingCost
from python_backends.cpu_engine.ticker import Ticker
from python_backends.ensemble.stream_state import StreamEvent
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
    assert setting.ticker.idle and setting.recorder.loads == []
    setting.ticker.close()
    assert setting.recorder.loads


def test_it_ticks_while_a_stream_lives_and_sleeps_after_the_last(setting):
    one = setting.add()
    until(lambda: setting.recorder.loads)
    assert not setting.ticker.idle
    del setting.streams[one.key]
    setting.scheduler.release(one.key)
    until(lambda: setting.ticker.idle)
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
    until(lambda: setting.recorder.loads and setting.ticker.idle)


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
        until(lambda shown=shown: len(setting.recorder.loads) > shown or setting.ticker.idle)
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
