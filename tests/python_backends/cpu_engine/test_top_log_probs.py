import numpy as np
import pytest

from benchmarks import checkpoints
from contract import manifest as manifests
from python_backends.cpu_engine.top_log_probs import TopLogProbsModel
from tests.fakes import numpy_llama

pytestmark = pytest.mark.slow

CONFIG = checkpoints.CONFIGS["llama_gqa"]


@pytest.fixture(scope="module")
def reading(tiny_engine):
    return TopLogProbsModel(tiny_engine / "openvino_model.xml", manifests.load(tiny_engine).properties)


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(4).integers(0, CONFIG["vocab_size"], 340)


@pytest.fixture(scope="module")
def log_probs(ids, tmp_path_factory):
    """f64[len(ids), vocab]: after each id, computed by a forward pass in numpy."""
    weights = checkpoints.write(tmp_path_factory.mktemp("checkpoint"), CONFIG)
    logits = numpy_llama.logits(CONFIG, weights, ids.tolist()).astype(np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


@pytest.mark.parametrize("sizes", [[1] * 10, [10], [3, 4, 1, 2], [200]])
def test_every_id_has_its_own_log_probability_and_the_likeliest_of_its_place(reading, ids, log_probs, sizes):
    prompt = 140  # more than one piece
    reading.open(1, ids[:prompt], 5)
    place = prompt
    for size in sizes:
        entries = reading.read(1, ids[place : place + size].tolist())
        assert len(entries) == size
        for entry, chosen, expected in zip(entries, ids[place:], log_probs[place - 1 :], strict=False):
            best = np.argsort(-expected)[:5]
            assert entry.ids == best.tolist()
            np.testing.assert_allclose(entry.log_probs, expected[best], atol=1e-3)
            np.testing.assert_allclose(entry.chosen, expected[chosen], atol=1e-3)
        place += size
    reading.close(1)


def test_sequences_are_read_apart(reading, ids, log_probs):
    for id in (1, 2):
        reading.open(id, ids[: 20 + id], 1)
    for id in (2, 1):
        [entry] = reading.read(id, ids[20 + id : 21 + id].tolist())
        assert entry.ids == [int(log_probs[19 + id].argmax())]
        reading.close(id)


def test_a_sequence_that_did_not_ask_costs_nothing(tiny_engine):
    reading = TopLogProbsModel(tiny_engine / "no such model.xml", {})
    assert reading.read(7, [1, 2]) == []
    reading.close(7)


def test_no_new_ids_are_no_entries(reading, ids):
    reading.open(3, ids[:4], 2)
    assert reading.read(3, []) == []
    reading.close(3)
