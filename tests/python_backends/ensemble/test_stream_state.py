import numpy as np
import pytest

from python_backends.ensemble.stream_state import StreamEvent, StreamState


def test_exactly_the_four_ends_are_last():
    assert {event for event in StreamEvent if event.last} == {
        StreamEvent.STOP,
        StreamEvent.LENGTH,
        StreamEvent.CANCELLED,
        StreamEvent.ERROR,
    }


@pytest.mark.parametrize("event", [-1, 6, 99])
def test_an_unknown_event_is_not_taken_for_one_of_ours(event):
    array = np.array(StreamState(1, 2, StreamEvent.RUNNING))
    array[2] = event
    with pytest.raises(ValueError, match="is not a valid StreamEvent"):
        StreamState.from_array(array)
