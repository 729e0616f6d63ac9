import queue
import uuid

import pytest

from python_backends.detokenizer.in_band_streams import InBandStreams
from python_backends.ensemble.control import ControlListener, ControlMessage, Verb
from python_backends.ensemble.stream_state import StreamEvent, StreamState
from python_backends.ensemble.token_increment import TokenIncrement
from python_backends.triton_io import Inputs

STATE = StreamState(11, 22, StreamEvent.RUNNING, num_input_tokens=3)


@pytest.fixture
def name():
    return f"trident-test-{uuid.uuid4()}"


@pytest.fixture
def streams(name):
    made = InBandStreams(name)
    yield made
    made.close()


def test_the_engines_tensor_becomes_the_increment_that_it_was(streams, triton):
    sent = TokenIncrement(STATE, [5, 6], options="options")
    request = triton.incoming({"stream_state": ("INT64", sent.to_array())})
    found = streams.read(request, Inputs(request))
    assert (found.state, found.token_ids, found.options) == (STATE, [5, 6], "options")


def test_stop_and_cancel_are_sent_to_the_engine_and_fail_without_one(streams, name):
    assert not streams.stop(STATE) and not streams.cancel(STATE)
    received = queue.Queue()
    listener = ControlListener(name, received.put)
    assert streams.stop(STATE) and streams.cancel(STATE)
    expected = [ControlMessage(verb, 11, 22) for verb in (Verb.STOP, Verb.CANCEL)]
    assert [received.get(timeout=60) for _ in expected] == expected
    listener.close()
