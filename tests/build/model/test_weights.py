"""What is stored can be read back, and how far it is from what was meant is bounded."""

import numpy as np
import openvino as ov
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from build.base.checkpoint import CheckpointError, open_checkpoint
from build.model.weights import Weights, fitting_group, pack_u4, quantize_int4, quantize_int8
from tests.fakes import checkpoints
from tests.fakes.dequantized import dequantized

PRECISIONS = ("fp32", "bf16", "fp16", "int8", "int8_sq", "int4")
LLAMA = checkpoints.CONFIGS["llama_gqa"]
NAME = "model.layers.0.mlp.gate_proj.weight"  # [96, 64]

finite = st.floats(-1e4, 1e4, width=32)
matrices = hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.sampled_from([16, 32, 64])), elements=finite)


@given(weight=matrices)
def test_int8_is_within_half_a_step_of_every_weight(weight):
    quantized = quantize_int8(weight)
    assert quantized.values.dtype == np.int8 and quantized.values.min() >= -127
    error = np.abs(dequantized(quantized) - weight)
    assert (error <= quantized.scales / 2 * 1.0001).all()
    assert (quantized.scales <= np.maximum(np.abs(weight).max(1, keepdims=True), 1e-30) / 127 * 1.0001).all()


@given(weight=matrices, group=st.sampled_from([16, 32]))
def test_int4_is_within_a_step_of_every_weight_and_keeps_zero(weight, group):
    group = min(group, weight.shape[1])
    quantized = quantize_int4(weight, group)
    steps = np.repeat(quantized.scales.astype(np.float32)[..., 0], group, axis=1)
    error = np.abs(dequantized(quantized) - weight)
    # Half a step for rounding, half for the rounded zero point, and what rounding the step to f16 moves at 15 steps.
    assert (error <= steps * 1.02 + 2.0**-20).all()
    assert (dequantized(quantized)[weight == 0] == 0).all()
    assert quantized.values.max() <= 15 and quantized.zeros.max() <= 15


@given(st.lists(st.integers(0, 15), min_size=1, max_size=33))
def test_nibbles_unpack_in_order_low_half_first(values):
    packed = pack_u4(np.array(values, np.uint8))
    unpacked = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)[: len(values)]
    assert unpacked.tolist() == values and packed.size == (len(values) + 1) // 2


@pytest.mark.parametrize(
    ("columns", "wanted", "group"), [(4096, 128, 128), (192, 128, 64), (96, 128, 32), (48, 64, 16), (40, 128, None)]
)
def test_the_group_shrinks_until_it_divides_the_columns(columns, wanted, group):
    assert fitting_group(columns, wanted) == group


def saved(tmp_path, precision: str, name: str = NAME, config: dict = LLAMA, **options) -> tuple[dict, np.ndarray]:
    """(constants by element type, as the .bin file holds them; the values the node has when evaluated)."""
    exact = checkpoints.write(tmp_path / "checkpoint", config, **options)[name]
    weights = Weights(open_checkpoint(tmp_path / "checkpoint"), precision, 32)
    model = ov.Model([weights.matrix(name)], [], "weight")
    ov.save_model(model, str(tmp_path / "w.xml"), compress_to_fp16=False)
    loaded = ov.Core().read_model(str(tmp_path / "w.xml"))
    constants = {
        op.get_element_type().get_type_name(): op for op in loaded.get_ops() if op.get_type_name() == "Constant"
    }
    compiled = ov.Core().compile_model(loaded, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return {**constants, "exact": exact}, compiled([])[0]


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "F32"), ("fp32", "BF16"), ("bf16", "BF16"), ("fp16", "F16")])
def test_a_float_precision_that_can_hold_the_checkpoint_holds_it_exactly(tmp_path, precision, dtype):
    found, value = saved(tmp_path, precision, dtype=dtype)
    np.testing.assert_array_equal(value, found["exact"])
    assert {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}[precision] in found


def test_bf16_of_an_f32_checkpoint_is_the_nearest_bf16(tmp_path):
    found, value = saved(tmp_path, "bf16", dtype="F32")
    np.testing.assert_array_equal(value.view(np.uint32) & 0xFFFF, 0)
    assert (np.abs(value - found["exact"]) <= np.abs(found["exact"]) * 2.0**-8).all()


def test_int8_reads_back_from_the_file_as_it_was_quantised(tmp_path):
    found, value = saved(tmp_path, "int8")
    quantized = quantize_int8(found["exact"])
    np.testing.assert_array_equal(found["i8"].data, quantized.values)
    np.testing.assert_allclose(value, dequantized(quantized), rtol=1e-6)


def test_int4_reads_back_from_the_file_as_it_was_quantised(tmp_path):
    found, value = saved(tmp_path, "int4")
    quantized = quantize_int4(found["exact"], 32)
    np.testing.assert_allclose(value, dequantized(quantized), rtol=2e-3, atol=1e-6)
    size = (tmp_path / "w.bin").stat().st_size
    assert size <= 96 * 64 / 2 + 96 * 2 / 2 + 96 * 2 * 2 + 64  # nibbles, zero points, f16 scales, the shape


@pytest.mark.parametrize("precision", PRECISIONS)
def test_embeddings_stay_int8_where_others_are_int4(tmp_path, precision):
    found, _ = saved(tmp_path, precision, "model.embed_tokens.weight")
    assert ("i8" in found) == (precision in ("int8", "int4")) and "u4" not in found


def test_a_matrix_whose_rows_do_not_divide_into_groups_is_int8(tmp_path):
    found, _ = saved(tmp_path, "int4", "model.layers.0.mlp.down_proj.weight", LLAMA | {"intermediate_size": 90})
    assert "i8" in found and "u4" not in found


def test_a_tied_matrix_is_one_node(tmp_path):
    checkpoints.write(tmp_path, LLAMA)
    weights = Weights(open_checkpoint(tmp_path), "int8", 32)
    assert weights.matrix("lm_head.weight") is weights.matrix("lm_head.weight")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_stacked_matrices_have_the_values_that_they_have_alone(tmp_path, precision):
    checkpoints.write(tmp_path, LLAMA)
    weights = Weights(open_checkpoint(tmp_path), precision, 32)
    names = [f"model.layers.0.self_attn.{what}_proj.weight" for what in "qkv"]
    stacked = weights.stacked(names)
    assert (stacked is None) == (precision in ("fp32", "fp16", "int4"))
    if stacked is not None:
        model = ov.Model([stacked, *map(weights.matrix, names)], [], "weights")
        together, *alone = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([]).to_tuple()
        np.testing.assert_array_equal(together, np.concatenate(alone))


def test_fp16_refuses_what_it_cannot_hold(tmp_path):
    values = checkpoints.tensors(LLAMA)
    values[NAME][3, 5] = 70_000
    checkpoints.write(tmp_path, LLAMA)
    checkpoints.write_weights(tmp_path, values)
    with pytest.raises(
        CheckpointError, match=r"gate_proj.weight reaches 70144, beyond fp16's 65504; use precision bf16"
    ):
        Weights(open_checkpoint(tmp_path), "fp16", 32).matrix(NAME)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_that_is_no_number_is_refused(tmp_path, precision, bad):
    values = checkpoints.tensors(LLAMA)
    values[NAME][0, 0] = bad
    values["model.norm.weight"][1] = bad
    checkpoints.write(tmp_path, LLAMA)
    checkpoints.write_weights(tmp_path, values)
    weights = Weights(open_checkpoint(tmp_path), precision, 32)
    with pytest.raises(CheckpointError, match="gate_proj.weight holds NaN or infinity"):
        weights.matrix(NAME)
    with pytest.raises(CheckpointError, match="model.norm.weight holds NaN or infinity"):
        weights.vector("model.norm.weight")


@given(st.integers(0, 2**32 - 1))
def test_more_bits_are_never_worse(seed):
    weight = np.random.default_rng(seed).standard_normal((8, 64)).astype(np.float32)
    rms8 = np.sqrt(np.mean((dequantized(quantize_int8(weight)) - weight) ** 2))
    rms4 = np.sqrt(np.mean((dequantized(quantize_int4(weight, 64)) - weight) ** 2))
    finer = np.sqrt(np.mean((dequantized(quantize_int4(weight, 16)) - weight) ** 2))
    assert rms8 < 0.01 and rms8 < finer < rms4 < 0.12
