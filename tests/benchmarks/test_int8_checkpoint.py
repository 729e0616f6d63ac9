"""The 8-bit checkpoint as its readers take it: integers times their row's scale are the weights, to half a step."""

import json

import numpy as np

from benchmarks import int8_checkpoint, random_model
from build.base import shards


def test_projections_are_integers_with_a_scale_for_each_row_and_the_rest_stays(tmp_path):
    shapes = {"model.layers.0.mlp.up_proj.weight": (6, 32), "model.norm.weight": (32,)}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text('{"model_type": "llama"}')
    random_model.write_weights(tmp_path / "a" / "model.safetensors", shapes)
    int8_checkpoint.write(tmp_path / "a", tmp_path / "b")
    before = shards.read_header(tmp_path / "a" / "model.safetensors")
    after = shards.read_header(tmp_path / "b" / "model.safetensors")
    name, norm = shapes
    assert set(after) == {*shapes, f"{name}_scale"} and after[name].dtype == "I8"
    assert np.array_equal(after[norm].f32(), before[norm].f32())
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["model_type"] == "llama" and config["quantization_config"]["quant_method"] == "compressed-tensors"
    weight = before[name].f32()
    integers, scale = int8_checkpoint.quantised(weight)
    assert np.abs(integers * scale - weight).max() <= scale.max() / 2 * 1.001 and np.abs(integers).max() == 127
    assert not int8_checkpoint.quantised(np.zeros((2, 4), np.float32))[0].any()
