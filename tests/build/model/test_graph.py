"""The graph computes what the papers say, in every form a checkpoint of these families takes."""

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import pytest

from build.base import architecture
from build.model import graph
from tests.fakes import checkpoints, numpy_llama

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
IDS = [int(i) for i in np.random.default_rng(3).integers(0, 256, 40)]


class Decoder:
    """A compiled graph with its state, fed piece by piece."""

    def __init__(self, config: dict, values: dict[str, np.ndarray]) -> None:
        def weight(name: str) -> ov.Node:
            return ops.constant(values[name])

        self.model = graph.decoder(architecture.from_config(config), weight, weight)
        self._request = ov.Core().compile_model(self.model, "CPU", EXACT).create_infer_request()

    def __call__(self, ids: np.ndarray, mask: np.ndarray, positions: np.ndarray, beam_idx: list[int]) -> np.ndarray:
        """f32[B, L, V] of ids i64[B, L] after all that was fed before."""
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        result = self._request.infer(inputs | {"beam_idx": np.array(beam_idx, np.int32)})
        return result["logits"].copy()

    def forget(self) -> None:
        self._request.reset_state()

    def row(self, ids: list[int], past: int = 0) -> np.ndarray:
        mask = np.ones((1, past + len(ids)), np.int64)
        return self(np.array([ids]), mask, np.arange(past, past + len(ids))[None], [0])[0]


@pytest.mark.parametrize("name", checkpoints.CONFIGS)
def test_logits_equal_the_reference_whether_fed_at_once_or_in_pieces(name):
    config = checkpoints.CONFIGS[name]
    values = checkpoints.tensors(config)
    expected = numpy_llama.logits(config, values, IDS)
    decoder = Decoder(config, values)
    pieces = [decoder.row(IDS[:25]), decoder.row(IDS[25:26], 25), decoder.row(IDS[26:], 26)]
    np.testing.assert_allclose(np.concatenate(pieces), expected, atol=2e-4)
    decoder.forget()
    np.testing.assert_allclose(decoder.row(IDS), expected, atol=2e-4)


def test_a_row_padded_on_the_left_is_not_disturbed_by_its_padding():
    config = checkpoints.CONFIGS["llama_gqa"]
    values = checkpoints.tensors(config)
    ids = np.array([IDS[:8], [0, 0, 0, *IDS[20:25]]])
    mask = np.array([[1] * 8, [0] * 3 + [1] * 5])
    positions = np.array([np.arange(8), [0, 0, 0, 0, 1, 2, 3, 4]])
    logits = Decoder(config, values)(ids, mask, positions, [0, 1])
    np.testing.assert_allclose(logits[0], numpy_llama.logits(config, values, IDS[:8]), atol=2e-4)
    np.testing.assert_allclose(logits[1, 3:], numpy_llama.logits(config, values, IDS[20:25]), atol=2e-4)


def test_beam_idx_moves_each_rows_past_with_it():
    config = checkpoints.CONFIGS["qwen3"]
    values = checkpoints.tensors(config)
    decoder = Decoder(config, values)
    rows = np.array([IDS[:6], IDS[10:16]])
    decoder(rows, np.ones((2, 6), np.int64), np.tile(np.arange(6), (2, 1)), [0, 1])
    swapped = decoder(np.array([[7], [9]]), np.ones((2, 7), np.int64), np.full((2, 1), 6), [1, 0])
    np.testing.assert_allclose(swapped[0, 0], numpy_llama.logits(config, values, [*IDS[10:16], 7])[-1], atol=2e-4)
    np.testing.assert_allclose(swapped[1, 0], numpy_llama.logits(config, values, [*IDS[:6], 9])[-1], atol=2e-4)


def test_it_has_the_inputs_outputs_and_variables_that_continuous_batching_looks_for():
    config = checkpoints.CONFIGS["llama_gqa"]
    model = Decoder(config, checkpoints.tensors(config)).model
    assert [i.get_any_name() for i in model.inputs] == ["input_ids", "attention_mask", "position_ids", "beam_idx"]
    assert [o.get_any_name() for o in model.outputs] == ["logits"]
    assert len(model.get_variables()) == 2 * config["num_hidden_layers"]
    assert model.output("logits").get_partial_shape()[2].get_length() == config["vocab_size"]


@pytest.mark.parametrize("name", ["llama_gqa", "qwen3"])
def test_the_plugin_fuses_norms_rotation_and_attention(name):
    config = checkpoints.CONFIGS[name]
    model = Decoder(config, checkpoints.tensors(config)).model
    compiled = ov.Core().compile_model(model, "CPU", EXACT)
    kinds = [str(op.get_rt_info()["layerType"].value) for op in compiled.get_runtime_model().get_ops()]
    layers, norms = config["num_hidden_layers"], 4 if name == "qwen3" else 2
    assert kinds.count("ScaledDotProductAttention") == layers
    assert kinds.count("RoPE") == 2 * layers
    assert kinds.count("RMS") == norms * layers + 1
