import threading
import uuid

import numpy as np
import pytest

from contract import packed_delta
from python_backends.client_watch.model import TritonPythonModel
from python_backends.ensemble.control import ControlListener, ControlMessage, Verb


@pytest.fixture
def heard(triton_types, tiny_engine, monkeypatch):
    """``heard(*looks)`` is what the engine hears of looks at (epoch, key, cancelled); the model has answered them."""
    name = f"trident-test-{uuid.uuid4()}"
    monkeypatch.setenv("TRIDENT_ENGINE_DIR", str(tiny_engine))
    monkeypatch.setenv("TRIDENT_CONTROL_SOCKET", name)
    triton_types.forget()
    messages, last = [], threading.Event()

    def hear(message):
        messages.append(message)
        if message.key == 99:
            last.set()

    listener, model = ControlListener(name, hear), TritonPythonModel()
    model.initialize({})

    def look(*looks):
        requests = []
        for epoch, key, cancelled in (*looks, (1, 99, True)):
            watch = np.array([[epoch, key, 5]])[:, : 3 if key else 1]
            requests.append(triton_types.incoming({packed_delta.WATCH: ("INT64", watch)}))
            requests[-1].cancelled = cancelled
        for answer, (epoch, *_) in zip(model.execute(requests), (*looks, (1,)), strict=True):
            names = [tensor.name() for tensor in answer.output_tensors()]
            assert names == ([] if epoch else [packed_delta.WATCHED]) and not answer.has_error()
        assert last.wait(60)
        return messages[:-1]

    yield look
    model.finalize()
    listener.close()


def test_the_engine_hears_of_disconnected_clients_alone(heard):
    assert heard((7, 1, False), (7, 2, True), (0, 3, True)) == [ControlMessage(Verb.CANCEL, 7, 2)]


def test_a_look_that_cannot_be_read_is_answered_all_the_same(heard, triton_types):
    assert heard((7, 0, True), (7, 4, True)) == [ControlMessage(Verb.CANCEL, 7, 4)]
    assert "client_watch failed" in triton_types.log[-1][1]


def test_it_tells_that_there_is_a_packed_ensemble(heard, triton_types):
    assert triton_types.metric_value(packed_delta.METRIC) == 1
