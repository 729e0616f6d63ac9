import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_backends.ensemble.token_increment import StreamEvent, StreamState, TokenIncrement, TopLogProbs


def test_exactly_the_four_ends_are_last():
    assert {event for event in StreamEvent if event.last} == {
        StreamEvent.STOP,
        StreamEvent.LENGTH,
        StreamEvent.CANCELLED,
        StreamEvent.ERROR,
    }


@pytest.mark.parametrize("event", [-1, 6, 99])
def test_an_unknown_event_is_not_taken_for_one_of_ours(event):
    array = TokenIncrement(StreamState(1, 2, StreamEvent.RUNNING), []).to_array()
    array[0, 2] = event
    with pytest.raises(ValueError, match="is not a valid StreamEvent"):
        TokenIncrement.from_array(array)


def test_what_an_engine_does_not_send_is_empty():
    increment = TokenIncrement(StreamState(1, 2, StreamEvent.RUNNING), [5])
    assert (increment.log_probs, increment.top_log_probs, increment.options, increment.error) == ((), (), "", "")
    assert (increment.cum_log_prob, increment.num_output_tokens) == (0.0, 0)


def test_an_entry_unpacks_to_ids_and_their_log_probabilities():
    ids, log_probs = TopLogProbs([5, 7], [-0.5, -2.5])
    assert (ids, log_probs) == ([5, 7], [-0.5, -2.5])


int64 = st.integers(-(2**63), 2**63 - 1)
states = st.builds(StreamState, int64, int64, st.sampled_from(StreamEvent), *[int64] * 8, st.integers(0, 1))
ids = st.lists(st.integers(0, 2**31 - 1), max_size=3)
log_probs = st.lists(st.floats(max_value=0, width=32), max_size=3)
texts = st.text(max_size=9)


@given(states, ids, log_probs, st.lists(st.builds(TopLogProbs, ids, log_probs), max_size=2), texts, texts)
def test_an_increment_survives_its_tensor(state, ids, log_probs, top, options, error):
    sent = TokenIncrement(state, ids, log_probs, top if log_probs else [], sum(log_probs), 7, options, error)
    array = sent.to_array()
    assert array.dtype == np.int64 and array.ndim == 2 and array.shape[0] == 1
    found = TokenIncrement.from_array(array)
    if not (log_probs or options or error):
        assert array.size == len(state) + 1 + len(ids)
        sent = TokenIncrement(state, ids)  # and nothing else
    assert found == sent
