import itertools
import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract.errors import DeadlineExceeded, EngineFailed, InvalidArgument, Overloaded, Unavailable, from_text
from contract.generation import Guide, SamplingParams
from python_backends.cpu_engine import engine, ticker
from python_backends.cpu_engine.engine import _PAUSES_S, Engine, WorkerStarts
from python_backends.cpu_engine.metrics import CANCEL_REASONS, EngineMetrics
from python_backends.cpu_engine.request import EngineRequest
from python_backends.ensemble.control import ControlMessage, Verb
from python_backends.ensemble.token_increment import StreamEvent
from python_backends.ensemble.worker_messages import AddSequence, EndSequence, StepOutput, StepReport
from python_backends.limits import EngineLimits
from python_backends.metrics import Metrics
from python_backends.triton_io import metric_family

LIMITS = EngineLimits(vocab_size=100, max_seq_len=256, max_batch_size=2, kv_cache_blocks=8)
NAMES = {"model": "engine", "version": "1"}
SECOND = 1_000_000_000


class Clock:
    """Stands still until it is moved; counts how often it was looked at."""

    def __init__(self):
        self.now_ns, self.looks = 5 * SECOND, 0

    def __call__(self):
        self.looks += 1
        return self.now_ns

    def move(self, seconds):
        self.now_ns += int(seconds * SECOND)


class Link:
    """One life of a worker that does what the test says."""

    def __init__(self, engine):
        self._engine, self.commands, self.closed = engine, [], False

    def send(self, command):
        self.commands.append(command)

    def close(self):
        self.closed = True

    def added(self):
        return [command.id for command in self.commands if isinstance(command, AddSequence)]

    def ended(self):
        return [command.id for command in self.commands if isinstance(command, EndSequence)]

    def report(self, *outputs, **fields):
        """What the worker says after a step; each output is (id, token_ids, event)."""
        made = [StepOutput(id, list(ids), [-0.5] * len(ids), event) for id, ids, event in outputs]
        self._engine.on_report(StepReport(1, 2, made, **fields))

    def confirm(self, *ids):
        """The worker has freed what these held."""
        self.report(*[(id, [], StreamEvent.CANCELLED) for id in ids])


class Sink:
    def __init__(self):
        self.increments, self.error, self.closed, self._changed = [], None, False, threading.Condition()

    def send(self, increment, request):
        with self._changed:
            assert not self.closed, "a response after the last"
            self.increments.append(increment)
            self.closed = increment.state.event.last
            self._changed.notify_all()

    def refuse(self, error):
        with self._changed:
            assert not self.increments and not self.closed, "a refusal after an answer"
            self.error, self.closed = error, True
            self._changed.notify_all()

    def close(self):
        self.closed = True

    def wait(self, condition):
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), timeout=60), (self.increments, self.error)

    def end(self):
        """The event and the ids, once it has ended."""
        self.wait(lambda sink: sink.closed)
        return (self.increments[-1].state.event if self.increments else None), self.ids()

    def ids(self):
        return [token for increment in self.increments for token in increment.token_ids]


class Setting:
    """An engine, its links so far (``link`` is the present one), its clock, and a way to submit."""

    def __init__(
        self, limits=LIMITS, max_waiting=10, prefix_reuse=False, ready=True, sender_threads=2, max_coalesce_ns=0
    ):
        self.clock, self.links = Clock(), []
        self.metrics = Metrics(metric_family)
        self.engine = Engine(
            limits,
            self._open,
            EngineMetrics(self.metrics, "engine", "1", ("poet",)),
            max_waiting=max_waiting,
            sender_threads=sender_threads,
            max_coalesce_ns=max_coalesce_ns,
            prefix_reuse=prefix_reuse,
            clock_ns=self.clock,
        )
        if ready:
            self.engine.on_ready()

    def _open(self, engine):
        self.links.append(Link(engine))
        return self.links[-1]

    @property
    def link(self):
        return self.links[-1]

    def submit(self, prompt=4, max_tokens=10, sink=None, held=False, **changes):
        fields = {
            "request_id": "",
            "input_ids": np.arange(prompt, dtype=np.int64),
            "max_tokens": max_tokens,
            "sampling": SamplingParams(),
            "stop_ids": frozenset({99}),
            "stop_sequences": (),
            "streaming": True,
            "echo": False,
            "stream_options": "options",
            "arrival_ns": self.clock.now_ns,
            "tokenized_ns": self.clock.now_ns,
            "timeout_ns": 0,
        }
        sink = sink or Sink()
        return self.engine.submit(EngineRequest(**fields | changes), sink, held), sink

    def wait_until_sent(self, key, sink, ids):
        """Until the sink has so many ids and its sender is free for more: what comes before waits for a later step."""
        sink.wait(lambda sink: sink.ids() == ids)
        wait_until(lambda: not self.engine._streams[key].queued)

    def control(self, verb, key, epoch=None):
        self.engine.on_control(ControlMessage(verb, self.epoch if epoch is None else epoch, key))

    @property
    def epoch(self):
        return 5 * SECOND

    def is_empty(self):
        scheduler, streams = self.engine._scheduler, self.engine._streams
        held = (scheduler.running, scheduler.waiting, scheduler.blocks - scheduler._free_blocks)
        return not streams and held == (0, 0, 0)


@pytest.fixture
def open_setting(triton, monkeypatch):
    monkeypatch.setattr(engine, "_PAUSES_S", (0, 0, 0, 0))
    opened = []

    def make(**options):
        opened.append(Setting(**options))
        return opened[-1]

    yield make
    for setting in opened:
        setting.engine.close()


@pytest.fixture
def setting(open_setting):
    return open_setting()


def wait_until(condition):
    """For what the engine's own threads do."""
    give_up_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up_s, "it did not happen in 60 s"
        time.sleep(0.005)


def comes_to(read, wanted):
    """Waits until ``read`` gives what is wanted, and says what it gave instead."""
    give_up_s = time.monotonic() + 60
    while (found := read()) != wanted and time.monotonic() < give_up_s:
        time.sleep(0.005)
    assert found == wanted


# ---- the usual way --------------------------------------------------------------------------------------------------


def test_a_request_goes_to_the_worker_and_its_tokens_come_back_in_order(setting):
    key, sink = setting.submit()
    [command] = setting.link.commands
    assert (command.id, command.max_tokens, command.stop_ids) == (key, 10, {99})
    assert command.input_ids.tolist() == [0, 1, 2, 3]
    for token in range(5):
        setting.link.report((key, [token], StreamEvent.RUNNING))
    setting.link.report((key, [99], StreamEvent.STOP))
    assert sink.end() == (StreamEvent.STOP, [0, 1, 2, 3, 4, 99])
    last = sink.increments[-1].state
    assert (last.epoch, last.key, last.stop_id, last.num_input_tokens) == (setting.epoch, key, 99, 4)
    assert setting.link.ended() == [] and setting.is_empty()


def test_a_sequence_that_reaches_its_length_ends_without_a_stop_id(setting):
    key, sink = setting.submit(max_tokens=2)
    setting.link.report((key, [1, 2], StreamEvent.LENGTH))
    assert sink.end() == (StreamEvent.LENGTH, [1, 2])
    assert sink.increments[-1].state.stop_id == -1


def test_a_continued_sequence_counts_on_from_where_it_was_cut(setting):
    key, sink = setting.submit(prompt=6, max_tokens=3, continued=2, stop_sequences=((5, 8),))
    [command] = setting.link.commands
    assert (command.input_ids.tolist(), command.max_tokens) == ([0, 1, 2, 3, 4, 5], 3)
    scored = StepOutput(key, [], [], StreamEvent.RUNNING, prompt_log_probs=[0.0, -1.0, -1.0, -1.0, -2.0, -3.0])
    setting.engine.on_report(StepReport(1, 2, [scored]))
    setting.link.report((key, [8], StreamEvent.RUNNING))  # completes a stop sequence that began before the cut
    assert sink.end() == (StreamEvent.STOP, [8])
    last = sink.increments[-1]
    assert (last.state.num_input_tokens, last.num_output_tokens, last.cum_log_prob) == (4, 3, -5.5)


def test_ids_that_a_penalty_counts_are_generated_again_and_not_sent(setting):
    changes = {"prompt": 6, "max_tokens": 5, "continued": 2, "replay": True}
    key, sink = setting.submit(**changes)
    wrong, refused = setting.submit(**changes)
    assert [command.input_ids.tolist() for command in setting.link.commands] == [[0, 1, 2, 3]] * 2
    setting.link.report((key, [4], StreamEvent.RUNNING), (wrong, [9], StreamEvent.RUNNING))
    setting.link.report((key, [5, 6], StreamEvent.RUNNING))
    setting.link.report((key, [7], StreamEvent.LENGTH))
    assert sink.end() == (StreamEvent.LENGTH, [6, 7])
    last = sink.increments[-1]
    assert (last.num_output_tokens, last.cum_log_prob, last.state.num_input_tokens) == (4, -2.0, 4)
    assert refused.end() == (None, []) and setting.link.ended() == [wrong]
    assert "continue_ids: must be what this engine generates" in str(refused.error)
    assert "got 4 in place of 9" in str(refused.error)
    setting.link.confirm(wrong)
    assert setting.is_empty()


def test_a_continued_sequence_that_had_ended_ends_as_it_did(setting):
    key, sink = setting.submit(max_tokens=0, continued=2, ended_by=3)
    setting.link.report((key, [], StreamEvent.LENGTH))
    assert sink.end() == (StreamEvent.STOP, []) and sink.increments[-1].state.stop_id == 3


def test_requests_join_while_others_run_and_wait_for_slots_and_blocks(setting):
    first, second, third = (setting.submit()[0] for _ in range(3))
    assert setting.link.added() == [first, second]  # two slots
    setting.link.report((first, [1], StreamEvent.LENGTH))
    assert setting.link.added() == [first, second, third]


def test_blocks_for_the_whole_request_are_reserved_before_it_starts(open_setting):
    setting = open_setting(limits=EngineLimits(100, 256, max_batch_size=10, kv_cache_blocks=8))
    long, _ = setting.submit(prompt=100, max_tokens=93)  # 193 tokens: 7 blocks
    short, _ = setting.submit(prompt=1, max_tokens=31)  # 1 block
    waiting, _ = setting.submit(prompt=1, max_tokens=1)
    assert setting.link.added() == [long, short]
    setting.link.report((short, [1], StreamEvent.LENGTH))
    assert setting.link.added() == [long, short, waiting]


def test_a_full_queue_refuses_at_once_and_leaves_no_trace(open_setting):
    setting = open_setting(max_waiting=2)
    for _ in range(4):
        setting.submit()
    with pytest.raises(Overloaded, match="queue full: 2 of 2 requests wait, 2 are running"):
        setting.submit(request_id="refused")
    assert len(setting.engine) == 4


def test_no_two_streams_share_a_key_whatever_ids_clients_send(setting):
    submitted = [setting.submit(request_id=request_id) for request_id in ("a", "a", "", "", "a" * 65_536)]
    keys = [key for key, _ in submitted]
    assert len(set(keys)) == 5
    for token in range(3):
        for key in keys[:2]:
            setting.link.report((key, [10 * key + token], StreamEvent.RUNNING))
    for key in keys[:2]:
        setting.link.report((key, [], StreamEvent.LENGTH))
    assert [sink.end()[1] for _, sink in submitted[:2]] == [[10 * key + n for n in range(3)] for key in keys[:2]]


def test_a_repeated_prompt_is_counted_as_cached_until_the_worker_dies_with_its_cache(open_setting):
    setting = open_setting(prefix_reuse=True)
    for expected in (0, 64, 0):
        if not expected:
            setting.engine.on_death("dead")
            setting.engine.on_ready()
        key, sink = setting.submit(prompt=70, max_tokens=1)
        setting.link.report((key, [1], StreamEvent.LENGTH))
        sink.end()
        assert sink.increments[-1].state.num_cached_tokens == expected


def test_a_prompt_is_cached_for_others_once_it_is_read_and_not_when_it_is_started(open_setting):
    setting = open_setting(prefix_reuse=True)
    first, second = (setting.submit(prompt=70, max_tokens=1) for _ in range(2))
    assert [command.cached_tokens for command in setting.link.commands] == [0, 0]
    setting.link.report((first[0], [1], StreamEvent.LENGTH), begun={first[0]: 0})
    setting.submit(prompt=70, max_tokens=1)
    assert setting.link.commands[-1].cached_tokens == 64
    setting.link.report((second[0], [1], StreamEvent.LENGTH), begun={second[0]: 64})  # the worker had it wait
    for (_, sink), expected in ((first, 0), (second, 64)):
        sink.end()
        assert sink.increments[-1].state.num_cached_tokens == expected


def test_a_unary_request_gets_one_response(setting):
    key, sink = setting.submit(streaming=False)
    for token in range(3):
        setting.link.report((key, [token], StreamEvent.RUNNING))
    setting.link.report((key, [3], StreamEvent.LENGTH))
    assert sink.end() == (StreamEvent.LENGTH, [0, 1, 2, 3])
    assert len(sink.increments) == 1 and sink.increments[0].options == "options"


def test_times_of_a_stream_grow_from_arrival_to_the_last_token(setting):
    key, sink = setting.submit(max_tokens=2)
    setting.clock.move(1)
    setting.engine.on_report(StepReport(setting.clock.now_ns, 2, [StepOutput(key, [1], [0.0], StreamEvent.RUNNING)]))
    setting.clock.move(1)
    setting.link.report((key, [2], StreamEvent.LENGTH))
    sink.end()
    state = sink.increments[-1].state
    times = (state.arrival_ns, state.first_scheduled_ns, state.first_token_ns, state.last_token_ns)
    assert times == (5 * SECOND, 6 * SECOND, 6 * SECOND, 7 * SECOND)


def test_a_prompt_that_is_read_in_several_steps_was_scheduled_in_the_first_of_them(setting):
    key, sink = setting.submit(max_tokens=1)
    for _ in range(3):
        setting.clock.move(1)
        setting.engine.on_report(StepReport(setting.clock.now_ns, 2, begun={key: 0, 12345: 0}))
    setting.clock.move(1)
    setting.engine.on_report(StepReport(setting.clock.now_ns, 2, [StepOutput(key, [1], [0.0], StreamEvent.LENGTH)]))
    sink.end()
    state = sink.increments[-1].state
    assert (state.first_scheduled_ns, state.first_token_ns) == (6 * SECOND, 9 * SECOND)


# ---- ends from our side ---------------------------------------------------------------------------------------------


def test_a_stop_sequence_ends_the_stream_where_it_ends_and_stops_the_worker(setting):
    key, sink = setting.submit(stop_sequences=((7, 8),))
    setting.link.report((key, [5, 7], StreamEvent.RUNNING))
    setting.link.report((key, [8, 9], StreamEvent.RUNNING))
    assert sink.end() == (StreamEvent.STOP, [5, 7, 8])
    assert [value for increment in sink.increments for value in increment.log_probs] == [-0.5] * 3
    assert setting.link.ended() == [key]
    setting.link.report((key, [9], StreamEvent.RUNNING))  # it was in a step
    setting.link.confirm(key)
    assert sink.ids() == [5, 7, 8] and setting.is_empty()


def test_a_stop_sequence_in_the_last_tokens_needs_no_stop(setting):
    key, sink = setting.submit(stop_sequences=((7, 8),))
    setting.link.report((key, [7, 8], StreamEvent.LENGTH))
    assert sink.end() == (StreamEvent.STOP, [7, 8]) and setting.is_empty()


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_a_cancel_ends_the_stream_at_once_and_its_slot_when_the_worker_confirms(setting, tokens):
    key, sink = setting.submit()
    other, _ = setting.submit()
    waiting, _ = setting.submit()
    for token in range(tokens):
        setting.link.report((key, [token], StreamEvent.RUNNING))
    setting.control(Verb.CANCEL, key)
    assert sink.end() == (StreamEvent.CANCELLED, list(range(tokens)))
    assert setting.link.ended() == [key]
    assert setting.link.added() == [key, other]  # its blocks are not free yet
    setting.link.confirm(key)
    assert setting.link.added() == [key, other, waiting]


def test_a_cancel_of_a_waiting_request_never_reaches_the_worker(setting):
    for _ in range(2):
        setting.submit()
    key, sink = setting.submit()
    setting.control(Verb.CANCEL, key)
    assert sink.end() == (StreamEvent.CANCELLED, [])
    assert setting.engine._scheduler.waiting == 0
    assert key not in setting.link.added() and key not in setting.link.ended()


@pytest.mark.parametrize("ended_by", ["client", "deadline"])
def test_those_behind_a_waiting_request_that_ends_start_at_once(open_setting, ended_by):
    setting = open_setting(limits=EngineLimits(100, 256, max_batch_size=10, kv_cache_blocks=8))
    running, _ = setting.submit(prompt=100, max_tokens=60)  # 5 blocks
    waiting, sink = setting.submit(prompt=100, max_tokens=60, timeout_ns=SECOND)
    behind, _ = setting.submit(prompt=1, max_tokens=31)
    assert setting.link.added() == [running]
    if ended_by == "client":
        setting.control(Verb.CANCEL, waiting)
    else:
        setting.clock.move(1)
        sink.wait(lambda sink: sink.closed)
    assert setting.link.added() == [running, behind]


def test_a_second_cancel_a_late_one_and_a_strangers_change_nothing(setting):
    key, sink = setting.submit()
    other, others = setting.submit()
    setting.control(Verb.CANCEL, other, epoch=setting.epoch - 1)  # of an engine that is gone
    setting.control(Verb.CANCEL, 12345)
    for _ in range(3):
        setting.control(Verb.CANCEL, key)
    setting.link.confirm(key)
    setting.control(Verb.CANCEL, key)
    assert sink.end() == (StreamEvent.CANCELLED, []) and setting.link.ended() == [key]
    assert not others.closed
    setting.metrics.flush()
    setting.link.report((other, [1], StreamEvent.LENGTH))
    setting.control(Verb.CANCEL, other)  # after its last token
    assert others.end() == (StreamEvent.LENGTH, [1]) and setting.is_empty()


def test_a_worker_that_ended_by_itself_confirms_a_cancel_too(setting):
    key, sink = setting.submit()
    setting.control(Verb.CANCEL, key)
    setting.link.report((key, [1], StreamEvent.LENGTH))  # it was at its end when the word came
    assert sink.end() == (StreamEvent.CANCELLED, []) and setting.is_empty()


def test_the_detokenizers_stop_ends_with_stop(setting):
    key, sink = setting.submit()
    setting.link.report((key, [1], StreamEvent.RUNNING))
    setting.control(Verb.STOP, key)
    assert sink.end() == (StreamEvent.STOP, [1]) and setting.link.ended() == [key]
    assert sink.increments[-1].state.stop_id == -1


def test_a_stop_request_ends_every_stream_of_its_id_and_no_other(setting):
    same = [setting.submit(request_id="a") for _ in range(3)]  # two running, one waiting
    other, others = setting.submit(request_id="b")
    for request_id, left in (("unknown", 4), ("", 4), ("a", 1), ("a", 1)):
        setting.engine.stop_request(request_id)
        assert len(setting.engine) == left
    assert [sink.end()[0] for _, sink in same] == [StreamEvent.CANCELLED] * 3
    assert not others.closed and list(setting.engine._streams) == [other]


def test_500_cancels_at_once_leave_nothing_behind(open_setting):
    setting = open_setting(limits=EngineLimits(100, 256, max_batch_size=300, kv_cache_blocks=10_000), max_waiting=1000)
    submitted = [setting.submit(request_id=str(n % 7)) for n in range(500)]
    threads = [
        threading.Thread(target=lambda part=part: [setting.control(Verb.CANCEL, key) for key, _ in part])
        for part in (submitted[::2], submitted[1::2], submitted)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {sink.end()[0] for _, sink in submitted} == {StreamEvent.CANCELLED}
    assert sorted(setting.link.added()) == sorted(setting.link.ended())
    setting.link.confirm(*setting.link.ended())
    assert setting.is_empty()


# ---- deadlines ------------------------------------------------------------------------------------------------------


def test_a_deadline_that_has_passed_before_it_came_is_refused(setting):
    with pytest.raises(DeadlineExceeded, match="had passed before the request reached the engine"):
        setting.submit(arrival_ns=setting.clock.now_ns - SECOND, timeout_ns=SECOND)
    assert setting.is_empty()


def test_a_deadline_that_passes_in_the_queue_never_reaches_the_worker(setting):
    for _ in range(2):
        setting.submit()
    key, sink = setting.submit(timeout_ns=SECOND)
    setting.clock.move(1)
    sink.wait(lambda sink: sink.closed)
    assert isinstance(sink.error, DeadlineExceeded) and "while it waited for a slot" in str(sink.error)
    assert key not in setting.link.added()


def test_a_deadline_that_passes_while_running_stops_the_worker(setting):
    key, sink = setting.submit(timeout_ns=SECOND)
    setting.link.report((key, [1], StreamEvent.RUNNING))
    sink.wait(lambda sink: sink.increments)
    setting.clock.move(1)
    assert sink.end() == (StreamEvent.ERROR, [1])
    assert isinstance(from_text(sink.increments[-1].error), DeadlineExceeded)
    assert "while it was generating" in sink.increments[-1].error and setting.link.ended() == [key]


# ---- guides ---------------------------------------------------------------------------------------------------------


GUIDE, CHECKED = Guide("choice", '["a"]'), Guide("ebnf_grammar", 'root ::= "a"')


def test_a_held_request_starts_with_its_checked_guide(setting):
    key, sink = setting.submit(held=True, guide=GUIDE)
    other, _ = setting.submit()
    assert setting.link.added() == [other] and setting.engine._load().waiting == 1 and key in setting.engine
    setting.engine.guide_checked(key, CHECKED)
    assert setting.link.commands[-1].id == key and setting.link.commands[-1].guide == CHECKED
    setting.link.report((key, [1], StreamEvent.LENGTH))
    assert sink.end() == (StreamEvent.LENGTH, [1]) and key not in setting.engine


def test_a_held_request_whose_guide_is_refused_gets_the_error_and_is_counted_once(setting, triton):
    key, sink = setting.submit(held=True, guide=GUIDE)
    setting.engine.guide_checked(key, InvalidArgument("guided_decoding_guide", "must compile"))
    assert sink.end() == (None, []) and sink.error.problem == "must compile" and setting.is_empty()
    setting.engine.guide_checked(key, CHECKED)
    assert setting.link.commands == []
    comes_to(lambda: value(triton, "trident_errors_total", error_type="InvalidArgument"), 1)
    assert not value(triton, "trident_requests_total", finish_reason="error")
    assert not value(triton, "trident_input_tokens_total")


def test_a_held_request_that_finds_a_full_queue_is_refused(open_setting):
    setting = open_setting(max_waiting=1)
    key, sink = setting.submit(held=True, guide=GUIDE)
    for _ in range(3):
        setting.submit()
    with pytest.raises(Overloaded, match="queue full: 1 of 1 requests wait") as caught:
        setting.engine.guide_checked(key, CHECKED)
    setting.engine.guide_checked(key, caught.value)
    assert sink.end() == (None, []) and sink.error is caught.value and len(setting.engine) == 3


@pytest.mark.parametrize("ended_by", ["stop_request", "client", "deadline", "shutdown"])
def test_a_held_request_can_be_ended(setting, ended_by):
    key, sink = setting.submit(held=True, guide=GUIDE, request_id="r", timeout_ns=SECOND)
    if ended_by == "stop_request":
        setting.engine.stop_request("r")
    elif ended_by == "client":
        setting.control(Verb.CANCEL, key)
    elif ended_by == "deadline":
        setting.clock.move(2)
    else:
        setting.engine.abort("draining")
    if ended_by in ("stop_request", "client"):
        assert sink.end() == (StreamEvent.CANCELLED, [])
    else:
        assert sink.end() == (None, [])
        waited = "the deadline passed while its grammar waited to be compiled"
        assert str(sink.error) == (waited if ended_by == "deadline" else "draining")
    setting.engine.guide_checked(key, CHECKED)
    assert setting.is_empty() and setting.link.commands == []


def test_a_held_request_is_not_probed(setting):
    _, sink = setting.submit(held=True, guide=GUIDE)
    _, running = setting.submit()
    for probes in (1, 2):
        setting.clock.move(1)
        running.wait(lambda sink, probes=probes: len(sink.increments) == probes)
    assert not sink.increments


# ---- faults ---------------------------------------------------------------------------------------------------------


def test_when_the_worker_dies_running_streams_end_and_waiting_ones_go_to_the_next(setting):
    running = [setting.submit() for _ in range(2)]
    waiting, patient = setting.submit()
    setting.link.report((running[0][0], [1], StreamEvent.RUNNING))
    running[0][1].wait(lambda sink: sink.increments)
    setting.engine.on_death("the engine process was killed by signal 9")
    assert running[0][1].end() == (StreamEvent.ERROR, [1])
    running[1][1].wait(lambda sink: sink.closed)
    for error in (from_text(running[0][1].increments[-1].error), running[1][1].error):
        assert isinstance(error, EngineFailed)
        assert str(error) == "the engine process was killed by signal 9; it is being restarted"
    assert len(setting.links) == 2 and not setting.link.commands and not patient.closed
    setting.engine.on_ready()
    assert setting.link.added() == [waiting]
    setting.link.report((waiting, [5], StreamEvent.LENGTH))
    assert patient.end() == (StreamEvent.LENGTH, [5]) and setting.is_empty()


def test_a_stream_that_was_cancelled_when_the_worker_died_gives_its_slot_back(setting):
    key, _ = setting.submit()
    setting.control(Verb.CANCEL, key)
    setting.engine.on_death("dead")
    assert setting.is_empty()


def test_requests_that_come_while_the_worker_restarts_wait(open_setting):
    setting = open_setting(ready=False)
    key, sink = setting.submit()
    assert not setting.link.commands and not sink.closed
    setting.engine.on_ready()
    assert setting.link.added() == [key]


def test_an_engine_that_does_not_start_says_so_at_once_and_is_tried_again(open_setting):
    setting = open_setting(ready=False)
    _, sink = setting.submit()
    for _ in range(4):
        assert not sink.closed
        setting.engine.on_death("the engine process ended with code 1: no such file")
    sink.wait(lambda sink: sink.closed)
    assert isinstance(sink.error, Unavailable)
    assert str(sink.error) == "the engine process ended with code 1: no such file; it does not start"
    assert setting.engine.wait_until_ready(timeout_s=600) is False  # known, so there is nothing to wait for
    with pytest.raises(Unavailable, match="does not start; see the server's log"):
        setting.submit()
    assert setting.is_empty() and len(setting.links) == 5
    setting.engine.on_ready()
    key, _ = setting.submit()
    assert setting.link.added() == [key]


def test_a_start_after_some_failed_ones_counts_them_no_more(open_setting):
    setting = open_setting(ready=False)
    for _ in range(5):
        for _ in range(3):
            setting.engine.on_death("dead")
        setting.engine.on_ready()
        assert setting.engine.wait_until_ready(timeout_s=600)
        setting.engine.on_death("dead")
    setting.submit()


def test_a_worker_that_cannot_be_started_now_is_started_later(setting, monkeypatch, triton):
    key, sink = setting.submit(max_tokens=1)
    refusals = iter([OSError("no memory"), OSError("no memory")])
    opened = setting.engine._open_link

    def open_link(engine):
        for refusal in refusals:
            raise refusal
        return opened(engine)

    monkeypatch.setattr(setting.engine, "_open_link", open_link)
    setting.engine.on_death("dead")
    assert len(setting.links) == 2 and "could not be started: no memory" in triton.log[-1][1]
    setting.engine.on_ready()
    next_key, next_sink = setting.submit(max_tokens=1)
    setting.link.report((next_key, [1], StreamEvent.LENGTH))
    assert next_sink.end() == (StreamEvent.LENGTH, [1])


def test_a_request_the_pipeline_rejects_ends_with_its_words(setting):
    key, sink = setting.submit()
    output = StepOutput(key, [], [], StreamEvent.ERROR, error="the KV cache ran out of blocks")
    setting.engine.on_report(StepReport(0, 0, [output]))
    sink.wait(lambda sink: sink.closed)
    assert isinstance(sink.error, EngineFailed) and str(sink.error) == "the KV cache ran out of blocks"
    assert setting.is_empty()


def test_a_response_that_is_lost_ends_its_stream_in_band(setting):
    class Leaky(Sink):
        def send(self, increment, request):
            if increment.state.event is StreamEvent.RUNNING:
                raise RuntimeError("no shared memory")
            super().send(increment, request)

    key, sink = setting.submit(sink=Leaky())
    setting.link.report((key, [1], StreamEvent.RUNNING))
    assert sink.end() == (StreamEvent.ERROR, [])
    assert "a response could not be sent: RuntimeError('no shared memory')" in sink.increments[-1].error
    assert setting.link.ended() == [key]


# ---- the end of the engine ------------------------------------------------------------------------------------------


def test_an_abort_ends_every_stream_with_its_reason_and_takes_no_more(setting):
    submitted = [setting.submit() for _ in range(3)]
    setting.link.report((submitted[0][0], [1], StreamEvent.RUNNING))
    submitted[0][1].wait(lambda sink: sink.increments)
    setting.engine.on_control(ControlMessage(Verb.ABORT, reason="the server is draining"))
    assert submitted[0][1].end() == (StreamEvent.ERROR, [1])
    errors = [from_text(submitted[0][1].increments[-1].error)]
    for _, sink in submitted[1:]:
        sink.wait(lambda sink: sink.closed)
        errors.append(sink.error)
    assert [(type(error), str(error)) for error in errors] == [(Unavailable, "the server is draining")] * 3
    assert len(setting.link.added()) == 2  # the third did not start when those before it ended
    with pytest.raises(Unavailable, match="the server is shutting down"):
        setting.submit()


def test_close_waits_for_every_last_response_and_ends_the_worker(open_setting):
    setting = open_setting()
    sinks = [setting.submit()[1] for _ in range(3)]
    setting.engine.close()
    for sink in sinks:
        sink.wait(lambda sink: sink.closed)
        assert isinstance(sink.error, Unavailable)
    assert setting.link.closed
    setting.engine.on_death("killed by close")  # is no reason to start another
    setting.engine.on_control(ControlMessage(Verb.CANCEL, setting.epoch, 1))
    assert len(setting.links) == 1


# ---- the ticker -----------------------------------------------------------------------------------------------------


def test_a_silent_running_stream_is_probed_and_a_waiting_one_less_often(setting):
    _, running = setting.submit()
    setting.submit()
    _, waiting = setting.submit()
    setting.clock.move(0.1)
    running.wait(lambda sink: len(sink.increments) == 1)
    assert running.increments[0].state.event is StreamEvent.PROBE and running.increments[0].options == "options"
    assert not waiting.increments
    setting.clock.move(0.2)
    waiting.wait(lambda sink: len(sink.increments) == 1)
    running.wait(lambda sink: len(sink.increments) == 2)
    assert waiting.increments[0].state.event is StreamEvent.PROBE and not waiting.ids()


def test_a_stream_that_speaks_is_not_probed(setting):
    key, sink = setting.submit()
    for token in range(4):
        setting.clock.move(0.07)
        setting.link.report((key, [token], StreamEvent.RUNNING))
        setting.wait_until_sent(key, sink, list(range(token + 1)))
    assert all(increment.state.event is StreamEvent.RUNNING for increment in sink.increments)


def test_only_the_oldest_waiting_streams_are_probed(open_setting, monkeypatch):
    monkeypatch.setattr(ticker, "_PROBED_WAITING", 3)
    setting = open_setting(limits=EngineLimits(100, 256, max_batch_size=1, kv_cache_blocks=8))
    sinks = [setting.submit()[1] for _ in range(6)]
    setting.clock.move(1)
    for sink in sinks[:4]:
        sink.wait(lambda sink: sink.increments)
    looks = setting.clock.looks
    wait_until(lambda: setting.clock.looks > looks + 3)  # some ticks later
    assert [len(sink.increments) for sink in sinks] == [1, 1, 1, 1, 0, 0]


def test_tokens_held_back_by_the_window_are_sent_by_the_ticker(open_setting):
    setting = open_setting(max_coalesce_ns=SECOND)
    streams = [setting.submit() for _ in range(2)]
    key, sink = streams[0]
    setting.link.report((key, [1], StreamEvent.RUNNING))
    setting.wait_until_sent(key, sink, [1])
    setting.link.report((key, [2], StreamEvent.RUNNING))  # within the window of two responses: the clock stands
    looks = setting.clock.looks
    wait_until(lambda: setting.clock.looks > looks + 3)
    assert sink.ids() == [1]
    setting.clock.move(0.02)
    sink.wait(lambda sink: sink.ids() == [1, 2])


def test_an_idle_engine_does_not_tick(setting):
    key, sink = setting.submit()
    setting.link.report((key, [1], StreamEvent.LENGTH))
    sink.end()

    def is_still():
        looks = setting.clock.looks
        time.sleep(5 * ticker.TICK_S)
        return setting.clock.looks == looks

    wait_until(is_still)  # not at once: something may still be under way


# ---- metrics --------------------------------------------------------------------------------------------------------


def value(triton, name, **labels):
    return triton.metric_value(name, **NAMES, **labels)


def test_the_slots_are_shown_before_the_first_request(setting, triton):
    assert value(triton, "nv_trt_llm_request_metrics", request_type="max") == 2
    assert value(triton, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="max") == 8


def test_the_load_is_shown_while_it_lasts_and_gone_when_it_is_gone(setting, triton):
    first, _ = setting.submit(max_tokens=60)
    second, _ = setting.submit()
    third, _ = setting.submit()
    setting.link.report((first, [1], StreamEvent.RUNNING), scheduled=2, context=1, context_tokens=4, cache_usage=0.375)

    def shown():
        requests = {
            k: value(triton, "nv_trt_llm_request_metrics", request_type=k)
            for k in ("active", "scheduled", "waiting", "max", "context")
        }
        blocks = {
            k: value(triton, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type=k)
            for k in ("max", "used", "free", "tokens_per", "fraction")
        }
        batcher = {
            k: value(triton, "nv_trt_llm_inflight_batcher_metrics", inflight_batcher_specific_metric=k)
            for k in ("total_context_tokens", "generation_requests", "micro_batch_id", "paused_requests")
        }
        return requests, blocks, batcher

    requests = {"active": 3, "scheduled": 2, "waiting": 1, "max": 2, "context": 1}
    blocks = {"max": 8, "used": 3, "free": 5, "tokens_per": 32, "fraction": 0.375}
    batcher = {"total_context_tokens": 4, "generation_requests": 1, "micro_batch_id": 0, "paused_requests": 0}
    comes_to(shown, (requests, blocks, batcher))
    for key in (first, second, third):
        setting.link.report((key, [1], StreamEvent.LENGTH), scheduled=1, cache_usage=0.5)
    requests = {"active": 0, "scheduled": 0, "waiting": 0, "max": 2, "context": 0}
    blocks = {"max": 8, "used": 0, "free": 8, "tokens_per": 32, "fraction": 0.0}
    comes_to(shown, (requests, blocks, dict.fromkeys(batcher, 0)))
    comes_to(lambda: value(triton, "nv_trt_llm_general_metrics", general_type="iteration_counter"), 4)


def test_a_step_in_which_many_wait_for_their_prompts_shows_no_negative_numbers(setting, triton):
    key, _ = setting.submit()
    setting.submit()
    setting.link.report((key, [], StreamEvent.RUNNING), scheduled=1, context=2, context_tokens=8)
    name = "nv_trt_llm_inflight_batcher_metrics"
    comes_to(lambda: value(triton, name, inflight_batcher_specific_metric="total_context_tokens"), 8)
    assert value(triton, name, inflight_batcher_specific_metric="generation_requests") == 0


def test_a_finished_request_is_counted_everywhere_also_when_the_engine_is_idle_after_it(setting, triton):
    key, sink = setting.submit(prompt=4, max_tokens=3)
    for token in (1, 2):
        setting.link.report((key, [token], StreamEvent.RUNNING))
        setting.wait_until_sent(key, sink, list(range(1, token + 1)))
        setting.clock.move(0.01)
    setting.link.report((key, [3], StreamEvent.LENGTH))
    sink.end()
    comes_to(lambda: value(triton, "trident_inter_token_latency_seconds"), 2)
    comes_to(lambda: value(triton, "trident_requests_total", finish_reason="length"), 1)
    comes_to(lambda: value(triton, "trident_input_tokens_total"), 4)
    comes_to(lambda: value(triton, "trident_output_tokens_total"), 3)
    for histogram in (
        "gen_ai_server_time_to_first_token_seconds",
        "gen_ai_server_time_per_output_token_seconds",
        "gen_ai_server_request_duration_seconds",
    ):
        comes_to(lambda histogram=histogram: value(triton, histogram), 1)
    comes_to(lambda: value(triton, "nv_llm_input_token_len", response_metric_type="total_input_tokens"), 1)
    comes_to(lambda: value(triton, "nv_llm_output_token_len", response_metric_type="total_output_tokens"), 1)
    for phase in ("tokenize", "queue", "prefill", "first_decode"):
        labels = {"model": "engine", "phase": phase}
        comes_to(lambda: triton.metric_value("trident_time_to_first_token_phase_seconds", **labels), 1)  # noqa: B023


def test_a_response_that_leaves_after_the_engine_went_idle_is_observed_all_the_same(setting, triton):
    release = threading.Event()

    class Slow(Sink):
        def send(self, increment, request):
            release.wait(60)
            super().send(increment, request)

    key, sink = setting.submit(sink=Slow())
    setting.link.report((key, [1], StreamEvent.LENGTH))
    wait_until(lambda: not setting.engine._ticker._work.is_set())
    time.sleep(3 * ticker.TICK_S)
    assert value(triton, "gen_ai_server_time_to_first_token_seconds") == 0
    release.set()
    wait_until(lambda: value(triton, "gen_ai_server_time_to_first_token_seconds") == 1)


def test_ends_are_counted_by_their_reason(setting, triton):
    for reason in ("client", "stop_request", "deadline"):
        key, sink = setting.submit(request_id="r", timeout_ns=10 * SECOND)
        if reason == "client":
            setting.control(Verb.CANCEL, key)
        elif reason == "stop_request":
            setting.engine.stop_request("r")
        else:
            setting.clock.move(10)
        sink.wait(lambda sink: sink.closed)
        setting.link.confirm(key)
    setting.submit()
    setting.engine.abort("going")

    def counts():
        return [value(triton, "trident_cancellations_total", reason=reason) for reason in CANCEL_REASONS]

    comes_to(counts, [1, 1, 1, 1])
    comes_to(lambda: value(triton, "trident_requests_total", finish_reason="cancelled"), 2)
    comes_to(lambda: value(triton, "trident_requests_total", finish_reason="error"), 2)
    comes_to(lambda: value(triton, "trident_errors_total", error_type="DeadlineExceeded"), 1)
    comes_to(lambda: value(triton, "trident_errors_total", error_type="Unavailable"), 1)


def test_a_refusal_reaches_the_page_of_an_idle_engine(setting, triton):
    setting.engine.refused(Overloaded("full"))
    wait_until(lambda: value(triton, "trident_errors_total", error_type="Overloaded") == 1)


# ---- the law --------------------------------------------------------------------------------------------------------

steps = st.lists(
    st.sampled_from(["submit", "submit", "step", "step", "step", "cancel", "stop", "stop_request", "confirm", "death"]),
    max_size=60,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=steps, chance=st.randoms(use_true_random=False))
def test_whatever_happens_every_stream_gets_its_tokens_in_order_and_one_end(open_setting, steps, chance):
    setting = open_setting(max_waiting=3, sender_threads=2)
    sinks, produced = {}, {}
    running = set()  # in the worker's mind
    commands_read = 0

    def obey():
        nonlocal commands_read
        ended = []
        for command in setting.link.commands[commands_read:]:
            if isinstance(command, AddSequence):
                running.add(command.id)
            elif command.id in running:
                running.discard(command.id)
                ended.append(command.id)
            commands_read += 1
        setting.link.confirm(*ended)

    for step in itertools.chain(steps, ["finish"]):
        if step == "submit":
            try:
                key, sink = setting.submit(request_id=chance.choice(["a", "b", ""]), prompt=chance.choice([1, 90]))
            except Overloaded:
                continue
            sinks[key], produced[key] = sink, []
        elif step == "step" and running:
            outputs = []
            for key in list(running):
                token, last = len(produced[key]), chance.random() < 0.1
                if not sinks[key].closed and key in setting.engine._streams:
                    produced[key].append(token)
                outputs.append((key, [token], StreamEvent.LENGTH if last else StreamEvent.RUNNING))
                if last:
                    running.discard(key)
            setting.link.report(*outputs)
        elif step in ("cancel", "stop") and sinks:
            setting.control(Verb.CANCEL if step == "cancel" else Verb.STOP, chance.choice(list(sinks)))
        elif step == "stop_request":
            setting.engine.stop_request("a")
        elif step == "confirm":
            obey()
        elif step == "death":
            setting.engine.on_death("dead")
            running.clear()
            commands_read = 0
            setting.engine.on_ready()
        assert (
            setting.engine._scheduler.running <= 2
            and setting.engine._scheduler.blocks - setting.engine._scheduler._free_blocks <= 8
        )
    setting.engine.close()
    for key, sink in sinks.items():
        sink.wait(lambda sink: sink.closed)
        assert sink.ids() == produced[key] or (sink.error and not sink.increments), key
        assert [increment.state.event.last for increment in sink.increments] == [False] * (len(sink.increments) - 1) + [
            True
        ] * bool(sink.increments)
    assert not setting.engine._streams


def test_adapters_reach_the_worker_and_never_share_cached_prompts(open_setting):
    setting = open_setting(prefix_reuse=True)
    marked = np.arange(40, dtype=np.int64)
    marked[0] = 4096
    for changes, cached in (({}, 0), ({}, 32), ({"adapter": "poet", "marked_ids": marked}, 0)):
        key, sink = setting.submit(prompt=40, max_tokens=1, **changes)
        assert dict(setting.engine._load().running_adapters) == ({"poet": 1} if changes else {})
        assert setting.link.commands[-1].input_ids.tolist() == (marked if changes else np.arange(40)).tolist()
        setting.link.report((key, [1], StreamEvent.LENGTH))
        sink.end()
        assert sink.increments[-1].state.num_cached_tokens == cached


# ---- starts of the worker -------------------------------------------------------------------------------------------


def test_each_failed_start_in_a_row_waits_longer_until_it_gives_up():
    starts, pauses_s = WorkerStarts(), []
    while not starts.given_up:
        pauses_s.append(starts.pause_s)
        starts.ended()
    assert pauses_s == list(_PAUSES_S) and not starts.wait(0)


def test_a_worker_that_was_ready_did_not_fail_to_start():
    starts = WorkerStarts()
    for _ in range(10):
        starts.succeeded()
        assert starts.ready
        starts.ended()
        assert not starts.ready and not starts.given_up and starts.pause_s == 0


def test_waiting_ends_when_the_worker_is_ready_or_given_up():
    ready, given_up = WorkerStarts(), WorkerStarts()
    found = {}
    threads = [
        threading.Thread(target=lambda: found.update(ready=ready.wait(60))),
        threading.Thread(target=lambda: found.update(given_up=given_up.wait(60))),
    ]
    for thread in threads:
        thread.start()
    ready.succeeded()
    for _ in _PAUSES_S:
        given_up.ended()
    for thread in threads:
        thread.join(60)
    assert found == {"ready": True, "given_up": False}
