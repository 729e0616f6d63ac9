"""The numpy decoder against an independent one, for every way in which checkpoints of these families differ."""

import numpy as np
import pytest

from build.base import checkpoint, gguf_folder, layout
from build.model import decoder
from tests.fakes import checkpoints, gguf_models, numpy_llama


@pytest.mark.parametrize("name", checkpoints.CONFIGS)
def test_logits_are_those_of_an_independent_forward_pass(tmp_path, name):
    config = checkpoints.CONFIGS[name]
    weights = checkpoints.write(tmp_path, config)
    model = decoder.from_checkpoint(checkpoint.open_checkpoint(tmp_path))
    blocks = np.random.default_rng(1).integers(0, config["vocab_size"], (2, 17))
    for ids, logits in zip(blocks, model.logits(blocks), strict=True):
        expected = numpy_llama.logits(config, weights, ids.tolist())
        assert logits.shape == expected.shape
        np.testing.assert_allclose(logits, expected, atol=2e-4 * np.abs(expected).max())


def test_the_reference_rounds_f32_weights_to_bf16(tmp_path):
    config = checkpoints.CONFIGS["llama_gqa"]
    exact = checkpoints.write(tmp_path / "f32", config, dtype="F32")
    rounded = checkpoints.write(tmp_path / "bf16", config, dtype="BF16")
    assert any((exact[name] != rounded[name]).any() for name in exact)
    blocks = np.arange(8)[None]
    logits = [
        next(decoder.from_checkpoint(checkpoint.open_checkpoint(tmp_path / kind)).logits(blocks))
        for kind in ("f32", "bf16")
    ]
    assert np.array_equal(*logits)


def test_the_reference_of_a_gguf_file_is_what_it_dequantises_to(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "FETCHED", tmp_path)
    config = checkpoints.CONFIGS["llama_gqa"]
    opened = checkpoint.open_checkpoint(gguf_folder.unpacked(gguf_models.write(tmp_path / "m.gguf", config, "Q4_1")))
    weights = {name: tensor.f32() for name, tensor in opened.tensors.items()}
    logits = next(decoder.from_checkpoint(opened).logits(np.arange(8)[None]))
    np.testing.assert_allclose(logits, numpy_llama.logits(config, weights, list(range(8))), atol=1e-4)


def test_a_position_depends_on_nothing_after_it(tmp_path):
    config = checkpoints.CONFIGS["llama_gqa"]
    checkpoints.write(tmp_path, config)
    model = decoder.from_checkpoint(checkpoint.open_checkpoint(tmp_path))
    whole = next(model.logits(np.arange(12)[None]))
    part = next(model.logits(np.arange(7)[None]))
    np.testing.assert_allclose(whole[:7], part, atol=1e-4)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (np.array([[0, 331]]), "token ids go from 0 to 331; the vocabulary has 331"),
        (np.array([[-1, 3]]), "token ids go from -1 to 3"),
        (np.array([1, 2]), r"blocks must be \[n, t\] token ids; got shape \[2\]"),
        (np.zeros((0, 4), int), r"got shape \[0, 4\]"),
    ],
)
def test_ids_that_no_token_has_are_refused(tmp_path, blocks, message):
    checkpoints.write(tmp_path, checkpoints.CONFIGS["llama_gqa"])
    model = decoder.from_checkpoint(checkpoint.open_checkpoint(tmp_path))
    with pytest.raises(ValueError, match=message):
        next(model.logits(blocks))


def test_a_layer_exists_only_while_it_is_computed(tmp_path):
    """Models larger than memory can be measured."""
    checkpoints.write(tmp_path, checkpoints.CONFIGS["llama_gqa"])
    model = decoder.from_checkpoint(checkpoint.open_checkpoint(tmp_path))
    made = []
    counting = [lambda make=make, i=i: made.append(i) or make() for i, make in enumerate(model.layers)]
    list(
        decoder.Decoder(model.architecture, model.embedding, counting, model.final_norm, model.head).logits(
            np.ones((3, 4), int)
        )
    )
    assert made == list(range(len(counting)))  # once for all three sequences
