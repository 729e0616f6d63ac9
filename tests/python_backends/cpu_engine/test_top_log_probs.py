import numpy as np
import pytest

from contract import manifest as manifests
from python_backends.cpu_engine import top_log_probs
from python_backends.cpu_engine.top_log_probs import CHUNK_TOKENS, TopLogProbsModel
from tests.fakes import checkpoints, numpy_llama

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


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[1] * 10, [10], [3, 4, 1, 2], [200]])
def test_every_id_has_its_own_log_probability_and_the_likeliest_at_its_position(model, ids, log_probs, sizes):
    prompt = 140  # more than one chunk
    scored = model.open(ids[:prompt], 5, prompt=False)
    while scored.read_prompt() is None:
        pass
    place = prompt
    for size in sizes:
        chosen, entries = scored.score(ids[place : place + size].tolist())
        assert len(chosen) == len(entries) == size
        for entry, value, id, expected in zip(entries, chosen, ids[place:], log_probs[place - 1 :], strict=False):
            best = np.argsort(-expected)[:5]
            assert entry.ids == best.tolist()
            np.testing.assert_allclose(entry.log_probs, expected[best], atol=1e-3)
            np.testing.assert_allclose(value, expected[id], atol=1e-3)
        place += size


@pytest.mark.slow
@pytest.mark.parametrize(("prompt", "k"), [(1, 3), (2, 0), (32, 1), (33, 2), (34, 20), (300, 5)])
def test_a_prompts_ids_have_log_probabilities_chunk_by_chunk_and_so_have_those_after_it(
    model, ids, log_probs, prompt, k
):
    scored = model.open(ids[:prompt], k, prompt=True)
    chunks = 1
    while (scores := scored.read_prompt()) is None:
        chunks += 1
    assert chunks == max(1, -(-(prompt - 1) // CHUNK_TOKENS))
    [none, *chosen], entries = scores
    assert none == 0 and [entry.ids for entry in entries[:1]] == [[-1] * k] * (k > 0)
    entries = entries[1:]
    np.testing.assert_allclose(chosen, log_probs[np.arange(prompt - 1), ids[1:prompt]], atol=1e-3)
    assert len(entries) == (prompt - 1 if k else 0)
    for entry, expected in zip(entries, log_probs, strict=False):
        assert entry.ids == np.argsort(-expected)[:k].tolist()
        np.testing.assert_allclose(entry.log_probs, expected[entry.ids], atol=1e-3)
    [after], _ = scored.score([int(ids[prompt])])
    np.testing.assert_allclose(after, log_probs[prompt - 1, ids[prompt]], atol=1e-3)


@pytest.mark.slow
def test_sequences_do_not_share_state(model, ids, log_probs):
    opened = {id: model.open(ids[: 20 + id], 1, prompt=False) for id in (1, 2)}
    for id in (2, 1):
        _, [entry] = opened[id].score(ids[20 + id : 21 + id].tolist())
        assert entry.ids == [int(log_probs[19 + id].argmax())]


@pytest.mark.slow
def test_a_prompt_that_is_not_scored_is_read_alone(monkeypatch, model, ids):
    monkeypatch.setattr(top_log_probs, "log_probs", None)
    scored = model.open(ids[:40], 2, prompt=False)
    assert scored.read_prompt() is None and scored.read_prompt() == ([], [])


def test_log_probabilities_of_a_large_vocabulary_are_exact():
    logits = np.random.default_rng(5).normal(0, 3, (4, 50_000)).astype(np.float32)
    exact = logits.astype(np.float64)
    exact -= np.logaddexp.reduce(exact, axis=-1, keepdims=True)
    chosen, top = top_log_probs.log_probs(logits, np.arange(4), 3)
    np.testing.assert_allclose(chosen, exact[range(4), range(4)], atol=1e-5)
    np.testing.assert_allclose([entry.log_probs for entry in top], -np.sort(-exact)[:, :3], atol=1e-5)
