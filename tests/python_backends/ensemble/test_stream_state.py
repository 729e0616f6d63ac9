import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_backends.ensemble.stream_state import StreamEvent, StreamState

int64 = st.integers(-(2**63), 2**63 - 1)
states = st.builds(StreamState, int64, int64, st.sampled_from(StreamEvent), *[int64] * 8, st.integers(0, 1))


@given(states)
def test_a_state_survives_its_tensor(state):
    array = state.to_array()
    assert array.dtype == np.int64 and array.shape[0] == 1 and array.ndim == 2
    assert StreamState.from_array(array) == state


def test_exactly_the_four_ends_are_last():
    assert {event for event in StreamEvent if event.last} == {
        StreamEvent.STOP,
        StreamEvent.LENGTH,
        StreamEvent.CANCELLED,
        StreamEvent.ERROR,
    }


@pytest.mark.parametrize("event", [-1, 6, 99])
def test_an_unknown_event_is_not_taken_for_one_of_ours(event):
    array = StreamState(1, 2, StreamEvent.RUNNING).to_array()
    array[0, 2] = event
    with pytest.raises(ValueError, match="is not a valid StreamEvent"):
        StreamState.from_array(array)
