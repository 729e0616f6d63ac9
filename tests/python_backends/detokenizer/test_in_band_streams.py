import json
import queue
import uuid

import pytest

from python_backends.detokenizer.in_band_streams import InBandStreams
from python_backends.ensemble.control import ControlListener, ControlMessage, Verb
from python_backends.ensemble.stream_state import StreamEvent, StreamState
from python_backends.ensemble.token_increment import TokenIncrement, TopLogProbs
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


def read(streams, triton, **tensors):
    request = triton.incoming({"stream_state": ("INT64", [STATE])} | tensors)
    return streams.read(request, Inputs(request))


def test_the_engines_tensors_become_one_increment(streams, triton):
    note = json.dumps({"options": "options", "error": "EngineFailed: x"})
    assert read(
        streams,
        triton,
        output_ids=("INT32", [[[5, 6]]]),
        output_log_probs=("FP32", [[[-0.5, -1.5]]]),
        top_log_probs_ids=("INT32", [[[5, 7], [6, 8]]]),
        top_log_probs=("FP32", [[[-0.5, -2.5], [-1.5, -3.5]]]),
        stream_note=("BYTES", [[note]]),
    ) == TokenIncrement(
        STATE,
        [5, 6],
        [-0.5, -1.5],
        [TopLogProbs([5, 7], [-0.5, -2.5]), TopLogProbs([6, 8], [-1.5, -3.5])],
        options="options",
        error="EngineFailed: x",
    )


def test_absent_tensors_are_empty(streams, triton):
    assert read(streams, triton) == TokenIncrement(STATE, [], [], [])


def test_stop_and_cancel_are_sent_to_the_engine_and_fail_without_one(streams, name):
    assert not streams.stop(STATE) and not streams.cancel(STATE)
    received = queue.Queue()
    listener = ControlListener(name, received.put)
    assert streams.stop(STATE) and streams.cancel(STATE)
    expected = [ControlMessage(verb, 11, 22) for verb in (Verb.STOP, Verb.CANCEL)]
    assert [received.get(timeout=60) for _ in expected] == expected
    listener.close()
