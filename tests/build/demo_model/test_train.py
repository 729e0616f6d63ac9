"""The demo model's training, on a network small enough to train in a second. Needs torch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
training = pytest.importorskip("build.demo_model.train")
tiny_llama = pytest.importorskip("tests.fakes.tiny_llama")
TINY, tiny_model = tiny_llama.TINY, tiny_llama.tiny_model

pytestmark = pytest.mark.build_env


def tiny_documents():
    """Counting documents: each token is its predecessor plus one."""
    return [np.arange(start, start + 40, dtype=np.int64) % TINY["vocab_size"] for start in range(30)]


def run(seed=0, steps=12):
    return training.train(tiny_model(seed), tiny_documents(), steps, round(0.6 * steps), seed)


def test_the_same_seed_gives_the_same_loss_curve_bit_for_bit(tmp_path):
    for name in ("first.csv", "second.csv"):
        training.write_curve(tmp_path / name, run(seed=3))
    assert (tmp_path / "first.csv").read_bytes() == (tmp_path / "second.csv").read_bytes()
    assert len((tmp_path / "first.csv").read_text().splitlines()) == 13


def test_another_seed_gives_another_loss_curve():
    assert run(seed=3) != run(seed=4)


def test_the_loss_falls_where_there_is_something_to_learn():
    losses = run(steps=120)
    assert losses[0] == pytest.approx(np.log(TINY["vocab_size"]), rel=0.05)
    assert sum(losses[-5:]) / 5 < losses[0] / 2


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_the_learning_rate_warms_up_stays_and_ends_near_zero(steps, decay_from):
    factors = [training.learning_rate_factor(step, steps, min(decay_from, steps - 1)) for step in range(steps)]
    assert all(0 <= factor <= 1 for factor in factors)
    peak = factors.index(max(factors))
    assert factors[:peak] == sorted(factors[:peak]) and factors[peak:] == sorted(factors[peak:], reverse=True)


def test_batches_are_windows_of_the_documents_in_an_order_the_seed_decides():
    documents = tiny_documents()
    stream, again = training.batches(documents, 32, seed=1), training.batches(documents, 32, seed=1)
    for _ in range(40):  # more than an epoch
        batch = next(stream)
        assert batch.shape == (training.BATCH_SEQUENCES, 33) and torch.equal(batch, next(again))
        steps = (batch[:, 1:] - batch[:, :-1]) % TINY["vocab_size"]
        assert (steps == 1).float().mean() > 0.9  # but for the seams between documents
    with pytest.raises(ValueError, match="training text: 40 tokens, need 66"):
        next(training.batches(documents[:1], 32, seed=1))
