"""The demo model's training, on a network small enough to train in a second. Needs torch."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
network = pytest.importorskip("build.demo_model.network")
training = pytest.importorskip("build.demo_model.train")
tiny_llama = pytest.importorskip("tests.fakes.tiny_llama")
TINY, tiny_model = tiny_llama.TINY, tiny_llama.tiny_model

pytestmark = pytest.mark.build_env


def tiny_documents():
    """Counting documents: each token is its predecessor plus one."""
    return [np.arange(start, start + 40, dtype=np.int64) % TINY["vocab_size"] for start in range(30)]


def run(seed=0, steps=12, budget_s=600.0, **options):
    model = tiny_model(seed)
    return model, training.train(model, tiny_documents(), training.Schedule.planned(steps), seed, budget_s, **options)


def test_the_same_seed_gives_the_same_loss_curve_bit_for_bit(tmp_path):
    for name in ("first.csv", "second.csv"):
        training.write_curve(tmp_path / name, run(seed=3)[1].losses)
    assert (tmp_path / "first.csv").read_bytes() == (tmp_path / "second.csv").read_bytes()
    assert len((tmp_path / "first.csv").read_text().splitlines()) == 13


def test_another_seed_gives_another_loss_curve():
    assert run(seed=3)[1].losses != run(seed=4)[1].losses


def test_the_loss_falls_where_there_is_something_to_learn():
    losses = run(steps=120)[1].losses
    assert losses[0] == pytest.approx(np.log(TINY["vocab_size"]), rel=0.05)
    assert sum(losses[-5:]) / 5 < losses[0] / 2


def test_a_spent_clock_ends_the_run_with_a_usable_model():
    model, result = run(steps=10_000, budget_s=1.0)
    assert 0 < len(result.losses) < 10_000
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_checkpoints_are_written_on_the_way_and_load_again(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "CHECKPOINT_EVERY_STEPS", 5)
    model = tiny_model()
    written = []

    def checkpoint(step):
        network.save_weights(model, tmp_path / str(step))
        written.append(step)

    training.train(model, tiny_documents(), training.Schedule.planned(12), 0, 600.0, checkpoint)
    assert written == [5, 10]
    assert network.load_weights(tmp_path / "10").config.hidden_size == TINY["hidden_size"]


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
