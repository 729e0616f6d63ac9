import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import EngineFailed
from contract.generation import SamplingParams
from python_backends.cpu_engine.request import EngineRequest
from python_backends.cpu_engine.stream import Stream
from python_backends.ensemble.token_increment import StreamEvent, TopLogProbs

MS = 1_000_000


def request(**changes):
    fields = {
        "request_id": "",
        "input_ids": np.array([7, 8, 9], np.int64),
        "max_tokens": 100,
        "sampling": SamplingParams(),
        "stop_ids": frozenset(),
        "stop_sequences": (),
        "streaming": True,
        "echo": False,
        "stream_options": "options",
        "arrival_ns": 1,
        "tokenized_ns": 2,
        "timeout_ns": 0,
    }
    return EngineRequest(**fields | changes)


def stream(key=22, **changes):
    return Stream(epoch=11, key=key, request=request(**changes), sink=None, submitted_ns=3)


def add(stream, *ids, now_ns=10 * MS):
    stream.add_tokens(list(ids), [-0.5] * len(ids), [], now_ns)


def test_the_first_chunk_names_the_stream_and_carries_its_options():
    one = stream()
    one.num_cached_tokens, one.first_scheduled_ns = 2, 5
    add(one, 1, 2, now_ns=10)
    increment = one.take(20)
    assert (increment.token_ids, increment.log_probs, increment.options, increment.error) == (
        [1, 2],
        [-0.5, -0.5],
        "options",
        "",
    )
    state = increment.state
    assert (state.epoch, state.key, state.event, state.stop_id) == (11, 22, StreamEvent.RUNNING, -1)
    assert (state.num_input_tokens, state.num_cached_tokens, state.first) == (3, 2, 1)
    times = (state.arrival_ns, state.first_scheduled_ns, state.first_token_ns, state.last_token_ns, state.sent_ns)
    assert times == (1, 5, 10, 10, 20)


def test_cached_ids_of_a_continued_output_are_no_cached_prompt():
    one = stream(continued=2)
    one.num_cached_tokens = 3
    add(one, 1)
    state = one.take(20).state
    assert (state.num_input_tokens, state.num_cached_tokens) == (1, 1)


def test_later_chunks_carry_what_is_new_and_no_options():
    one = stream()
    add(one, 1)
    one.take(20)
    add(one, 2, 3, now_ns=30)
    increment = one.take(40)
    assert (increment.token_ids, increment.options, increment.state.first, increment.num_output_tokens) == (
        [2, 3],
        "",
        0,
        3,
    )
    assert increment.cum_log_prob == -1.5 and increment.state.last_token_ns == 30
    assert one.take(50) is None


def test_an_echoed_prompt_leaves_with_its_own_log_probabilities():
    one = stream(echo=True)
    prompt = [TopLogProbs([-1], [0.0]), TopLogProbs([8], [-1.0]), TopLogProbs([9], [-2.0])]
    one.prompt_log_probs, one.prompt_top = [0.0, -1.0, -2.0], prompt
    one.add_tokens([1], [-0.5], [TopLogProbs([1], [-0.5])], 10)
    increment = one.take(20)
    assert (increment.token_ids, increment.log_probs) == ([7, 8, 9, 1], [0.0, -1.0, -2.0, -0.5])
    assert increment.top_log_probs == [*prompt, TopLogProbs([1], [-0.5])]
    assert (increment.cum_log_prob, increment.num_output_tokens) == (-0.5, 1)


def test_likeliest_ids_leave_with_the_ids_they_belong_to():
    one = stream()
    entries = [TopLogProbs([1], [-0.1]), TopLogProbs([2], [-0.2]), TopLogProbs([3], [-0.3])]
    one.add_tokens([1], [-0.1], entries[:1], 10)
    assert one.take(20).top_log_probs == entries[:1]
    one.add_tokens([2, 3], [-0.2, -0.3], entries[1:], 30)
    assert one.take(40).top_log_probs == entries[1:]


def test_the_first_token_and_the_end_are_due_at_once_the_rest_with_a_flush():
    one = stream()
    assert not one.due(flush=True)
    one.probe_due = True
    one.take(5 * MS)  # a probe before the first token does not make it wait
    add(one, 1)
    assert one.due(flush=False)
    one.take(10 * MS)
    add(one, 2)
    assert not one.due(flush=False)
    assert one.due(flush=True)
    one.finish(StreamEvent.LENGTH)
    assert one.due(flush=False)
    one.take(11 * MS)
    assert not one.due(flush=True)


def test_a_unary_stream_says_everything_at_its_end():
    one = stream(streaming=False)
    for token in (1, 2, 3):
        add(one, token)
        assert not one.due(flush=True) and one.take(99 * MS) is None
    one.finish(StreamEvent.STOP, stop_id=3)
    assert one.due(flush=False)
    increment = one.take(99 * MS)
    assert (increment.token_ids, increment.options, increment.state.stop_id, increment.state.first) == (
        [1, 2, 3],
        "options",
        3,
        1,
    )


@pytest.mark.parametrize("streaming", [True, False])
def test_a_probe_carries_no_ids_and_those_that_wait_are_kept(streaming):
    one = stream(streaming=streaming)
    if not streaming:
        add(one, 1)
    one.probe_due = True
    probe = one.take(20)
    assert (probe.state.event, probe.token_ids, probe.options, probe.state.first) == (
        StreamEvent.PROBE,
        [],
        "options",
        0,
    )
    assert not one.probe_due and one.take(30) is None
    add(one, 2)
    one.finish(StreamEvent.LENGTH)
    last = one.take(40)
    assert last.token_ids == ([2] if streaming else [1, 2]) and last.options == "" and last.state.first == 1


def test_a_probe_that_is_overtaken_by_tokens_is_not_sent():
    one = stream()
    one.probe_due = True
    add(one, 1)
    assert one.take(20).state.event is StreamEvent.RUNNING
    assert one.take(30) is None


def test_time_between_responses_counts_those_with_tokens_only():
    one = stream()
    add(one, 1)
    one.take(100)
    assert one.since_last_ns == 0
    one.probe_due = True
    one.take(150)
    assert one.since_last_ns == 0
    add(one, 2)
    one.take(200)
    assert one.since_last_ns == 100
    one.finish(StreamEvent.LENGTH)
    one.take(300)  # has no tokens
    assert one.since_last_ns == 100


def test_a_response_tells_how_long_its_oldest_ids_waited():
    one = stream()
    add(one, 1, now_ns=10)
    one.take(11)
    add(one, 2, 3, now_ns=20)  # a step with drafts makes several
    add(one, 4, now_ns=50)
    one.take(60)
    assert one.waited_ns == 40
    one.probe_due = True
    one.take(70)  # no ids
    add(one, 5, now_ns=90)
    one.take(91)
    assert one.waited_ns == 1


def test_an_echo_comes_once_in_front_of_the_first_tokens_and_not_with_a_probe():
    one = stream(echo=True)
    one.probe_due = True
    assert one.take(10).token_ids == []
    add(one, 1)
    increment = one.take(20)
    assert (increment.token_ids, increment.log_probs, increment.num_output_tokens) == ([7, 8, 9, 1], [-0.5], 1)
    add(one, 2)
    assert one.take(30).token_ids == [2]


def test_an_echo_comes_also_when_nothing_was_generated():
    one = stream(echo=True)
    one.finish(StreamEvent.CANCELLED)
    increment = one.take(10)
    assert (increment.token_ids, increment.num_output_tokens, increment.state.first) == ([7, 8, 9], 0, 0)


def test_a_failure_before_the_first_token_sends_no_echo():
    one = stream(echo=True)
    one.probe_due = True
    one.take(10)
    one.finish(StreamEvent.ERROR, error=EngineFailed("broke"))
    failed = one.take(20)
    assert (failed.token_ids, failed.log_probs, failed.state.event) == ([], [], StreamEvent.ERROR)


def test_a_stream_ends_once_and_the_first_end_counts():
    one = stream()
    add(one, 1)
    one.finish(StreamEvent.CANCELLED)
    one.finish(StreamEvent.ERROR, error=EngineFailed("late"))
    add(one, 2)
    increment = one.take(20)
    assert (increment.token_ids, increment.state.event, increment.error) == ([1], StreamEvent.CANCELLED, "")
    assert one.closed


def test_a_failure_refuses_a_stream_only_before_its_first_response():
    error, silent, speaking = EngineFailed("broke"), stream(), stream()
    assert silent.refusal() is None and not silent.closed
    silent.finish(StreamEvent.ERROR, error=error)
    assert silent.refusal() is error and silent.closed
    assert silent.refusal() is None and silent.take(20) is None
    add(speaking, 1)
    speaking.take(20)
    speaking.finish(StreamEvent.ERROR, error=error)
    assert speaking.refusal() is None and speaking.take(30).state.event is StreamEvent.ERROR


@pytest.mark.parametrize(
    ("chunks", "keeps"),
    [
        ([[1, 2]], [2]),
        ([[5, 1, 2, 6]], [3]),
        ([[5, 1], [2]], [None, 1]),
        ([[1], [1], [1, 2, 3]], [None, None, 2]),
        ([[3, 4], [5, 9]], [None, 1]),
        ([[3], [4], [5]], [None, None, 1]),
        ([[3, 4, 1], [2, 3]], [None, 1]),
        ([[2, 1, 5, 4, 3]], [None]),
        ([[], [1], [], [2]], [None, None, None, 1]),
    ],
)
def test_a_stop_sequence_is_found_across_steps(chunks, keeps):
    one = stream(stop_sequences=((1, 2), (3, 4, 5)))
    assert [one.stop_sequence_end(chunk) for chunk in chunks] == keeps


ids = st.lists(st.integers(0, 2), max_size=30)


@given(ids, st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=4).map(tuple), min_size=1, max_size=3), st.data())
def test_a_stop_sequence_is_found_where_it_first_ends_however_the_ids_are_cut(generated, sequences, data):
    one = stream(stop_sequences=tuple(sequences))
    found, seen = None, 0
    while seen < len(generated) and found is None:
        size = data.draw(st.integers(1, 4))
        keep = one.stop_sequence_end(generated[seen : seen + size])
        found = None if keep is None else seen + keep
        seen += size
    ends = [
        end for end in range(1, len(generated) + 1) if any(tuple(generated[:end])[-len(s) :] == s for s in sequences)
    ]
    assert found == (ends[0] if ends else None)


@given(
    st.lists(st.sampled_from(["tokens", "take", "probe", "finish", "tick"]), max_size=40),
    st.booleans(),
    st.booleans(),
    st.sampled_from([StreamEvent.STOP, StreamEvent.LENGTH, StreamEvent.CANCELLED]),
)
def test_whatever_the_order_of_things_every_token_leaves_once_and_in_order(steps, streaming, echo, end):
    one = stream(streaming=streaming, echo=echo)
    generated, increments = [], []
    for now_ns, step in enumerate([*steps, "finish", "take"], 1):
        if step == "tokens" and not one.event.last:
            generated.append(len(generated))
            one.add_tokens(generated[-1:], [-float(generated[-1])], [], now_ns)
        elif step == "probe":
            one.probe_due = True
        elif step == "finish":
            one.finish(end)
        elif step == "take" and not one.closed:
            increment = one.take(now_ns)
            increments += [increment] if increment else []
        elif step == "tick" and one.due(flush=now_ns % 2 == 0):
            increments.append(one.take(now_ns))
    assert one.closed and None not in increments
    assert [token for increment in increments for token in increment.token_ids] == [7, 8, 9] * echo + generated
    assert [value for increment in increments for value in increment.log_probs] == [
        -float(token) for token in generated
    ]
    assert (
        [increment.state.event for increment in increments if increment.state.event.last]
        == [increments[-1].state.event]
        == [end]
    )
    assert sum(increment.state.first for increment in increments) == (1 if generated else 0)
    assert [increment.options for increment in increments] == ["options"] + [""] * (len(increments) - 1)
    assert increments[-1].num_output_tokens == len(generated)
    if not streaming:
        assert all(increment.state.event is StreamEvent.PROBE for increment in increments[:-1])
