import numpy as np
import pytest

from contract import manifest as manifests
from python_backends.cpu_engine.top_log_probs import TopLogProbsModel
from tests.fakes import checkpoints, numpy_llama

pytestmark = pytest.mark.slow

CONFIG = checkpoints.CONFIGS["llama_gqa"]


@pytest.fixture(scope="module")
def model(tiny_engine):
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
def test_every_id_has_its_own_log_probability_and_the_likeliest_at_its_position(model, ids, log_probs, sizes):
    prompt = 140  # more than one chunk
    model.open(1, ids[:prompt], 5)
    place = prompt
    for size in sizes:
        chosen, entries = model.score(1, ids[place : place + size].tolist())
        assert len(chosen) == len(entries) == size
        for entry, value, id, expected in zip(entries, chosen, ids[place:], log_probs[place - 1 :], strict=False):
            best = np.argsort(-expected)[:5]
            assert entry.ids == best.tolist()
            np.testing.assert_allclose(entry.log_probs, expected[best], atol=1e-3)
            np.testing.assert_allclose(value, expected[id], atol=1e-3)
        place += size
    model.close(1)


def test_sequences_do_not_share_state(model, ids, log_probs):
    for id in (1, 2):
        model.open(id, ids[: 20 + id], 1)
    for id in (2, 1):
        _, [entry] = model.score(id, ids[20 + id : 21 + id].tolist())
        assert entry.ids == [int(log_probs[19 + id].argmax())]
        model.close(id)


def test_a_sequence_without_top_log_probs_compiles_no_model(tiny_engine):
    model = TopLogProbsModel(tiny_engine / "no such model.xml", {})
    assert model.score(7, [1, 2]) == ([], [])
    model.close(7)


def test_no_new_ids_are_no_entries(model, ids):
    model.open(3, ids[:4], 2)
    assert model.score(3, []) == ([], [])
    model.close(3)
