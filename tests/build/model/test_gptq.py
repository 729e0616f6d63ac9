"""Four bits chosen on text lose less of a layer's output than four bits chosen by themselves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from build.base.checkpoint import CheckpointError, open_checkpoint
from build.model import gptq
from build.model.gptq import influence_of, quantize
from build.model.weights import quantize_int4
from tests.fakes import checkpoints
from tests.fakes.dequantized import dequantized

BLOCKS = np.random.default_rng(5).integers(0, 256, (4, 32))


def inputs(seed: int, tokens: int, columns: int) -> np.ndarray:
    """f64[tokens, columns] of few underlying directions and uneven sizes, as activations are."""
    random = np.random.default_rng(seed)
    mixed = random.standard_normal((tokens, columns // 4)) @ random.standard_normal((columns // 4, columns))
    return (mixed + 0.1 * random.standard_normal((tokens, columns))) * random.uniform(0.1, 3, columns)


@pytest.mark.slow
@settings(max_examples=30)
@given(seed=st.integers(0, 1000), group=st.sampled_from([16, 32, 64]))
def test_outputs_on_the_texts_are_nearer_than_with_rounding_to_nearest(seed, group):
    x = inputs(seed, 256, 64)
    weight = np.random.default_rng(seed + 1).standard_normal((24, 64)).astype(np.float32)
    exact, nearest = x @ weight.T, dequantized(quantize_int4(weight, group))
    found = quantize(weight, influence_of(x.T @ x), group)
    assert np.linalg.norm(x @ dequantized(found).T - exact) < 0.8 * np.linalg.norm(x @ nearest.T - exact)
    assert found.values.shape == (24, 64 // group, group) and found.values.max() <= 15 and found.zeros.max() <= 15
    assert (found.values.dtype, found.zeros.dtype, found.scales.dtype) == (np.uint8, np.uint8, np.float16)


@given(seed=st.integers(0, 1000))
def test_inputs_that_know_nothing_of_each_other_leave_rounding_to_nearest(seed):
    weight = np.random.default_rng(seed).standard_normal((8, 64)).astype(np.float32)
    found, nearest = quantize(weight, influence_of(np.eye(64)), 32), quantize_int4(weight, 32)
    assert np.array_equal(found.values, nearest.values) and np.array_equal(found.scales, nearest.scales)


def test_inputs_that_are_always_zero_do_no_harm():
    weight = np.random.default_rng(1).standard_normal((8, 32)).astype(np.float32)
    for moments in (np.zeros((32, 32)), np.diag([0.0] * 16 + [1.0] * 16)):
        found = dequantized(quantize(weight, influence_of(moments), 16))
        assert np.allclose(found, dequantized(quantize_int4(weight, 16)), atol=1e-6)


@pytest.mark.parametrize("name", ["llama_gqa", "qwen3"])
def test_a_checkpoint_is_calibrated_matrix_by_matrix(tmp_path, name):
    values = checkpoints.write(tmp_path, checkpoints.CONFIGS[name])
    said = []
    found = gptq.calibrated(open_checkpoint(tmp_path), BLOCKS, 32, said.append)
    assert found.keys() == {name for name in values if "_proj.weight" in name}
    assert said == ["calibrating layer 1 of 2", "calibrating layer 2 of 2"]
    for matrix, chosen in found.items():
        assert dequantized(chosen).shape == values[matrix].shape
        assert np.abs(dequantized(chosen) - values[matrix]).max() < 1.5  # weights reach 6, a step is about 0.3


@pytest.mark.parametrize("tensor", ["model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_a_damaged_checkpoint_is_refused(tmp_path, tensor):
    checkpoints.write(tmp_path, checkpoints.CONFIGS["llama_gqa"])
    damaged = checkpoints.tensors(checkpoints.CONFIGS["llama_gqa"])
    damaged[tensor][0, 0] = np.nan
    checkpoints.write_weights(tmp_path, damaged)
    with np.errstate(all="ignore"), pytest.raises(CheckpointError, match="holds NaN or infinity"):
        gptq.calibrated(open_checkpoint(tmp_path), BLOCKS, 32, lambda line: None)
