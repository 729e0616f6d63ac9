import random
import threading
import time

import numpy as np
import pytest

from contract.errors import EngineFailed, Unavailable, to_text
from contract.generation import SamplingParams
from python_backends.cpu_engine.request import EngineRequest
from python_backends.cpu_engine.response_senders import ResponseSenders
from python_backends.cpu_engine.stream import Stream
from python_backends.ensemble.token_increment import StreamEvent


class Sink:
    """What one client gets. ``pause`` is called in the sender's thread before every response is taken."""

    def __init__(self, pause=lambda: None, fails=lambda increment: False):
        self.increments, self.errors, self.closed = [], [], threading.Event()
        self._pause, self._fails, self._busy = pause, fails, threading.Lock()

    def send(self, increment, request):
        assert self._busy.acquire(blocking=False), "two threads send for one stream"
        self._pause()
        self._busy.release()
        if self._fails(increment):
            raise RuntimeError("no shared memory")
        assert not self.closed.is_set(), "a response after the last"
        self.increments.append(increment)
        if increment.state.event.last:
            self.closed.set()

    def refuse(self, error):
        assert not self.increments, "a refusal after an answer"
        self.errors.append(error)
        self.closed.set()

    def close(self):
        self.closed.set()

    def ids(self):
        return [token for increment in self.increments for token in increment.token_ids]


def stream(key, sink, streaming=True):
    request = EngineRequest(
        "",
        np.array([1]),
        100,
        SamplingParams(),
        frozenset(),
        (),
        streaming,
        False,
        "",
        arrival_ns=1,
        tokenized_ns=1,
        timeout_ns=0,
    )
    return Stream(1, key, request, sink)


def add(senders, one, *ids):
    """What the engine does with new tokens."""
    with senders:
        one.add_tokens(list(ids), [0.0] * len(ids), [], time.monotonic_ns())
        if one.due(flush=True):
            senders.put(one)


def finish(senders, one, event=StreamEvent.LENGTH, error=None):
    with senders:
        one.finish(event, error=error)
        senders.put(one)


@pytest.fixture
def heard():
    return {"sent": [], "lost": []}


@pytest.fixture
def senders(triton, heard):
    senders = ResponseSenders(4, lambda sent: heard["sent"].extend(sent), lambda one, exc: heard["lost"].append(one))
    yield senders
    senders.close()


def test_many_streams_over_few_threads_keep_their_order_also_with_a_slow_reader(senders, heard):
    chance = random.Random(1)
    sinks = [Sink(pause=lambda: time.sleep(0.002))] + [
        Sink(pause=lambda: time.sleep(chance.random() / 5000)) for _ in range(20)
    ]
    streams = [stream(key, sink) for key, sink in enumerate(sinks)]
    for token in range(40):
        for one in streams:
            add(senders, one, token)
        while token % 8 == 7 and streams[1].queued:  # the senders get their turn
            time.sleep(0.0005)
    for one in streams:
        finish(senders, one)
    for sink in sinks:
        assert sink.closed.wait(60)
        assert sink.ids() == list(range(40))
    assert not heard["lost"] and max(len(sink.increments) for sink in sinks) > 3


def test_tokens_that_come_while_one_is_being_sent_wait_for_the_next_response(senders):
    entered, release = threading.Event(), threading.Event()

    def hold():
        entered.set()
        release.wait(60)

    sink = Sink(pause=hold)
    one = stream(1, sink)
    add(senders, one, 1)
    assert entered.wait(60)
    for token in (2, 3, 4):
        add(senders, one, token)
    finish(senders, one)
    release.set()
    assert sink.closed.wait(60)
    assert [increment.token_ids for increment in sink.increments] == [[1], [2, 3, 4]]


def test_what_becomes_due_together_is_sent_by_one_thread_and_a_large_step_by_several(senders):
    sinks, used, begun = [], {}, threading.Barrier(3)

    def pause(key):
        used[key] = threading.get_ident()
        if key % 32 == 0:
            begun.wait(60)  # no thread is done before each has begun

    for key in range(3 * 32):
        sinks.append(Sink(pause=lambda key=key: pause(key)))
    with senders:
        for key, sink in enumerate(sinks):
            one = stream(key, sink)
            one.finish(StreamEvent.LENGTH)
            senders.put(one)
        assert not any(sink.increments for sink in sinks)  # they leave when the lock is released
    for sink in sinks:
        assert sink.closed.wait(60)
    groups = [{used[key] for key in range(start, start + 32)} for start in (0, 32, 64)]
    assert [len(group) for group in groups] == [1] * 3 and len(set.union(*groups)) == 3


def test_step_after_step_is_sent_by_the_thread_that_sent_last(senders):
    used = []
    one = stream(1, Sink(pause=lambda: used.append(threading.get_ident())))
    for token in range(5):
        while len(senders._idle) < 4:
            time.sleep(0.001)
        add(senders, one, token)
        while len(used) == token:
            time.sleep(0.001)
    assert len(set(used)) == 1


def test_a_stream_that_is_put_twice_sends_once(senders):
    sink = Sink()
    one = stream(1, sink)
    with senders:
        one.add_tokens([1, 2], [0.0, 0.0], [], 1)
        senders.put(one)
        senders.put(one)
    finish(senders, one)
    assert sink.closed.wait(60) and sink.ids() == [1, 2]


def test_an_error_before_any_answer_is_a_refusal_and_after_one_it_is_in_band(senders, heard):
    silent, speaking = Sink(), Sink()
    error = Unavailable("going")
    finish(senders, stream(1, silent), StreamEvent.ERROR, error)
    assert silent.closed.wait(60) and silent.errors == [error] and not silent.increments
    one = stream(2, speaking)
    add(senders, one, 5)
    while not speaking.increments:
        time.sleep(0.001)
    finish(senders, one, StreamEvent.ERROR, error)
    assert speaking.closed.wait(60) and not speaking.errors
    assert speaking.increments[-1].error == to_text(error) and speaking.increments[-1].state.event is StreamEvent.ERROR


def test_a_probe_counts_as_an_answer(senders):
    sink = Sink()
    one = stream(1, sink)
    with senders:
        one.probe_due = True
        senders.put(one)
    while not sink.increments:
        time.sleep(0.001)
    finish(senders, one, StreamEvent.ERROR, EngineFailed("broke"))
    assert sink.closed.wait(60)
    assert [increment.state.event for increment in sink.increments] == [
        StreamEvent.PROBE,
        StreamEvent.ERROR,
    ] and not sink.errors


def test_a_lost_response_is_told_and_logged_and_the_others_go_on(senders, heard, triton):
    bad, good = Sink(fails=lambda increment: not increment.state.event.last), Sink()
    one, other = stream(1, bad), stream(2, good)
    add(senders, one, 1)
    while not heard["lost"]:
        time.sleep(0.001)
    assert heard["lost"] == [one] and not heard["sent"]
    assert triton.log == [("error", "response lost: stream=1 error=RuntimeError('no shared memory')")]
    finish(senders, one, StreamEvent.ERROR, EngineFailed("a response was lost"))  # what the engine does then
    for token in range(10):  # every sender thread is still there
        add(senders, other, token)
    finish(senders, other)
    assert bad.closed.wait(60) and good.closed.wait(60)
    assert bad.increments[-1].state.event is StreamEvent.ERROR and good.ids() == list(range(10))


def test_an_end_that_cannot_be_sent_still_closes_the_answer(senders, heard, triton):
    sink = Sink(fails=lambda increment: True)
    one = stream(1, sink)
    add(senders, one, 1)
    finish(senders, one)
    assert sink.closed.wait(60) and not sink.increments


def test_close_lets_every_end_out_first(triton):
    sinks = [Sink(pause=lambda: time.sleep(0.005)) for _ in range(8)]
    senders = ResponseSenders(2, lambda sent: None, lambda one, problem: None)
    streams = [stream(key, sink) for key, sink in enumerate(sinks)]
    for one in streams:
        add(senders, one, 1)
    for one in streams:  # some are being sent at this moment, some wait, some were sent
        finish(senders, one, StreamEvent.CANCELLED)
    senders.close()
    assert all(sink.closed.wait(60) for sink in sinks)
    assert [sink.ids() for sink in sinks] == [[1]] * 8
    assert all(sink.increments[-1].state.event is StreamEvent.CANCELLED for sink in sinks)


def test_an_end_that_comes_while_its_stream_is_being_sent_does_not_stand_behind_close(triton):
    entered, release = threading.Event(), threading.Event()

    def hold():
        entered.set()
        release.wait(60)

    sink = Sink(pause=hold)
    senders = ResponseSenders(1, lambda sent: None, lambda one, problem: None)
    one = stream(1, sink)
    add(senders, one, 1)
    assert entered.wait(60)
    finish(senders, one)
    closing = threading.Thread(target=senders.close)
    closing.start()
    while not senders._closed:
        time.sleep(0.001)
    release.set()
    closing.join()
    assert sink.closed.wait(60) and sink.increments[-1].state.event is StreamEvent.LENGTH


def test_every_response_is_reported_with_its_stream(senders, heard):
    sink = Sink()
    one = stream(1, sink)
    add(senders, one, 1)
    finish(senders, one)
    assert sink.closed.wait(60)
    while len(heard["sent"]) < len(sink.increments):
        time.sleep(0.001)
    assert [reported for reported, _ in heard["sent"]] == [one] * len(sink.increments)
    assert [increment for _, increment in heard["sent"]] == sink.increments
