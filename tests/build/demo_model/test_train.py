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


def test_bits_of_a_text_longer_than_the_window_count_each_token_once(monkeypatch):
    monkeypatch.setattr(training, "STRIDE_TOKENS", 16)
    model = tiny_model()
    torch.nn.init.zeros_(model.model.embed_tokens.weight)  # every token equally likely: log2(vocabulary) bits each
    for length in (2, 31, 32, 33, 47, 100):
        bits = training.token_bits(model, list(range(length)) if length <= 64 else [1] * length)
        assert bits == pytest.approx((length - 1) * np.log2(TINY["vocab_size"]))


def test_bits_within_one_window_are_the_summed_cross_entropy():
    model = tiny_model()
    ids = [5, 6, 7, 9, 20, 1]
    with torch.inference_mode():
        nats = torch.nn.functional.cross_entropy(
            model(torch.tensor([ids[:-1]])).logits[0], torch.tensor(ids[1:]), reduction="sum"
        )
    assert training.token_bits(model, ids) == pytest.approx(nats.item() / np.log(2), rel=1e-5)
