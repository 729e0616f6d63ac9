"""Inputs in 8 bits: the smoothed checkpoint computes the same, and the CPU multiplies 8-bit integers."""

import numpy as np
import openvino as ov
import pytest

from build.base.checkpoint import CheckpointError, open_checkpoint
from build.model import graph, smoothquant
from build.model.openvino_engine import OpenVinoEngine, save
from build.model.weights import Weights
from tests.fakes import checkpoints

BLOCKS = np.random.default_rng(5).integers(0, 256, (2, 32))
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


def logits(folder, opened, precision, rounded=None, head="int8"):
    """f32[2, 32, vocab] of the checkpoint compiled in ``precision``, and what the plugin computes products in."""
    folder.mkdir()
    weights = Weights(opened, precision, 32, None, head)
    arch = opened.architecture
    save(graph.decoder(arch, weights.matrix, weights.vector, None, weights.stacked, rounded), folder)
    compiled = ov.Core().compile_model(folder / "openvino_model.xml", "CPU", EXACT)
    nodes = [node.get_rt_info() for node in compiled.get_runtime_model().get_ops()]
    kinds = [info["primitiveType"].astype(str) for info in nodes if info["layerType"].astype(str) == "FullyConnected"]
    return np.stack(list(OpenVinoEngine(folder, EXACT, arch.vocab_size).logits(BLOCKS))), kinds


def with_outliers(folder, name):
    """A checkpoint of which a few columns of every product's input are 20 times the others."""
    values = checkpoints.write(folder, checkpoints.CONFIGS[name])
    for key, value in values.items():
        if key.endswith(("layernorm.weight", "model.norm.weight")):
            value[:3] *= 20
        elif key.endswith(("up_proj.weight", "v_proj.weight")):
            value[:2] *= 20
    checkpoints.write_weights(folder, values)
    return open_checkpoint(folder)


@pytest.mark.slow
def test_the_smoothed_checkpoint_computes_the_same_and_its_products_run_in_8_bits(tmp_path):
    opened, said = with_outliers(tmp_path / "checkpoint", "qwen2"), []  # tied, with biases, query heads that share
    smoothed = smoothquant.Smoothed(opened, BLOCKS, True, said.append)
    assert said == ["calibrating layer 1 of 2", "calibrating layer 2 of 2"] and len(smoothed.ranges) == 4 * 2 + 1
    exact, _ = logits(tmp_path / "exact", opened, "fp32")
    same, _ = logits(tmp_path / "same", smoothed.checkpoint, "fp32")
    np.testing.assert_allclose(same, exact, atol=2e-3 * np.abs(exact).max())
    rounded = smoothquant.Rounded(smoothed.ranges)
    eight, kinds = logits(tmp_path / "eight", smoothed.checkpoint, "int8_sq", rounded)
    assert sum(kind.endswith(("i8", "I8", "u8")) for kind in kinds) == 5 * 2 + 1  # query, key and value are one
    assert np.abs(eight - exact).mean() < 0.3 * exact.std()
    [result] = ov.Core().read_model(tmp_path / "eight" / "openvino_model.xml").get_results()
    last = result.input_value(0).get_node().get_type_name()
    assert last == "MatMul", "OpenVINO GenAI would compute the logits of every token of a prompt"


@pytest.mark.slow
def test_outliers_cost_less_after_smoothing(tmp_path, monkeypatch):
    opened = with_outliers(tmp_path / "checkpoint", "llama_gqa")
    exact, _ = logits(tmp_path / "exact", opened, "fp32")
    missed = []
    for share in ((0.0,), smoothquant.MIGRATED):
        monkeypatch.setattr(smoothquant, "MIGRATED", share)
        monkeypatch.setattr(smoothquant, "MOST_MISSED", 1.0)
        smoothed = smoothquant.Smoothed(opened, BLOCKS, False, lambda line: None)
        rounded = smoothquant.Rounded(smoothed.ranges)
        found, kinds = logits(tmp_path / str(len(share)), smoothed.checkpoint, "int8_sq", rounded, "bf16")
        assert sum(kind.endswith(("i8", "I8", "u8")) for kind in kinds) == 5 * 2
        missed.append(np.abs(found - exact).mean())
    assert missed[1] < 0.8 * missed[0]


def test_activations_that_are_no_numbers_are_refused(tmp_path):
    values = checkpoints.write(tmp_path, checkpoints.CONFIGS["llama_gqa"])
    values["model.layers.1.post_attention_layernorm.weight"][0] = np.inf
    checkpoints.write_weights(tmp_path, values)
    with (
        np.errstate(all="ignore"),
        pytest.raises(CheckpointError, match="gate_proj.weight multiplies holds NaN or inf"),
    ):
        smoothquant.Smoothed(open_checkpoint(tmp_path), BLOCKS, True, lambda line: None)
