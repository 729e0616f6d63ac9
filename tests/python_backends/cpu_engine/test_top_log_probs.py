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


@pytest.mark.parametrize(("prompt", "k"), [(1, 3), (2, 0), (128, 1), (129, 2), (130, 20), (300, 5)])
def test_a_prompts_ids_have_log_probabilities_chunk_by_chunk_and_so_have_those_after_it(
    model, ids, log_probs, prompt, k
):
    model.open(3, ids[:prompt], k)
    chosen, entries, chunks = [], [], 0
    while (chunk := model.score_prompt(3)) != ([], []):
        chosen, entries, chunks = chosen + chunk[0], entries + chunk[1], chunks + 1
    assert chunks == -(-(prompt - 1) // 128)
    np.testing.assert_allclose(chosen, log_probs[np.arange(prompt - 1), ids[1:prompt]], atol=1e-3)
    assert len(entries) == (prompt - 1 if k else 0)
    for entry, expected in zip(entries, log_probs, strict=False):
        assert entry.ids == np.argsort(-expected)[:k].tolist()
        np.testing.assert_allclose(entry.log_probs, expected[entry.ids], atol=1e-3)
    [after], _ = model.score(3, [int(ids[prompt])])
    np.testing.assert_allclose(after, log_probs[prompt - 1, ids[prompt]], atol=1e-3)
    model.close(3)


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
