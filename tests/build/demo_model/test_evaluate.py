"""Bits of a held-out text. Needs torch."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
evaluation = pytest.importorskip("build.demo_model.evaluate")
tiny_llama = pytest.importorskip("tests.fakes.tiny_llama")
TINY, tiny_model = tiny_llama.TINY, tiny_llama.tiny_model

pytestmark = pytest.mark.build_env


def test_bits_of_a_text_longer_than_the_window_count_each_token_once(monkeypatch):
    monkeypatch.setattr(evaluation, "STRIDE_TOKENS", 16)
    model = tiny_model()
    torch.nn.init.zeros_(model.model.embed_tokens.weight)  # every token equally likely: log2(vocabulary) bits each
    for length in (2, 31, 32, 33, 47, 100):
        bits = evaluation.token_bits(model, list(range(length)) if length <= 64 else [1] * length)
        assert bits == pytest.approx((length - 1) * np.log2(TINY["vocab_size"]))


def test_bits_within_one_window_are_the_summed_cross_entropy():
    model = tiny_model()
    ids = [5, 6, 7, 9, 20, 1]
    with torch.inference_mode():
        nats = torch.nn.functional.cross_entropy(
            model(torch.tensor([ids[:-1]])).logits[0], torch.tensor(ids[1:]), reduction="sum"
        )
    assert evaluation.token_bits(model, ids) == pytest.approx(nats.item() / np.log(2), rel=1e-5)
