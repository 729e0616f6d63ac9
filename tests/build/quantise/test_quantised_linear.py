"""The arithmetic of quantised layers, small enough to follow by hand."""

import numpy as np
import pytest

from build.quantise import quantised_linear
from build.quantise.quantised_linear import linear
from tests.fakes.packed_int4 import pack_int4

INPUT = np.array([[1.0, -0.3, 0.02, 700.0], [0.0, 0.0, 0.0, 0.0]], dtype=np.float32)
ONE = 0x38  # 1.0 in E4M3
EVERY_ROW = np.arange(1, 5, dtype=np.float32)


def f32(*values):
    return np.array(values, dtype=np.float32)


def test_whole_weights_are_multiplied_as_they_are():
    layer = linear(None, np.eye(4, dtype=np.float32), bias=f32(1, 2, 3, 4))
    assert np.array_equal(layer(INPUT), INPUT + f32(1, 2, 3, 4))


def test_fp8_rounds_inputs_in_units_of_the_activation_scale_and_saturates():
    weight = np.full((4, 4), ONE, np.uint8)
    weight[1] |= 0x80  # -1.0
    layer = linear("FP8", weight, scale=f32(0.25), input_scale=f32(0.5))
    assert layer.weight.tolist() == [[0.25] * 4, [-0.25] * 4, [0.25] * 4, [0.25] * 4]
    # In units of 0.5: 2, -0.6 -> -0.625, 0.04 -> 0.0390625, 1400 -> 448.
    expected = 0.5 * (2 - 0.625 + 0.0390625 + 448) * 0.25
    assert layer(INPUT).tolist() == [[expected, -expected, expected, expected], [0, 0, 0, 0]]


def test_int8_rounds_smoothed_inputs_to_integers_and_saturates():
    scales = {"scale": EVERY_ROW, "input_scale": f32(0.1), "prequant": f32(2, 1, 1, 1)}
    layer = linear("W8A8_SQ_PER_CHANNEL", np.ones((4, 4), np.int8), **scales)
    total = 0.1 * (20 - 3 + 0 + 127)
    np.testing.assert_allclose(layer(INPUT)[0], total * EVERY_ROW, rtol=1e-6)


def test_fp8_per_token_scales_each_token_by_its_own_largest_input():
    layer = linear("FP8_PER_CHANNEL_PER_TOKEN", np.full((4, 4), ONE, np.uint8), scale=EVERY_ROW)
    x = f32([448, 1, 0, 0], [44.8, 0.1, 0, 0])  # the same token at two volumes
    np.testing.assert_allclose(layer(x), [449 * EVERY_ROW, 44.9 * EVERY_ROW], rtol=1e-6)
    assert not layer(INPUT)[1].any()


def test_int4_multiplies_each_block_of_columns_by_its_scale_and_rounds_no_input():
    packed = pack_int4(np.array([[1, 2, 3, 4], [-8, 7, 0, 1]], dtype=np.int8))
    layer = linear("W4A16_AWQ", packed, scale=f32([10, 1], [1, 2]), prequant=f32(1, 1, 0.5, 1))
    assert layer.weight.tolist() == [[10, 20, 3, 4], [-8, 7, 0, 2]]
    np.testing.assert_allclose(layer(INPUT)[0], [10 - 6 + 0.03 + 2800, -8 - 2.1 + 1400], rtol=1e-6)


def test_w4a8_weights_pass_through_fp8_in_units_of_their_second_scale():
    packed = pack_int4(np.full((4, 4), 7, np.int8))
    scale = np.full((4, 1), 0.31, np.float32)
    layer = linear("W4A8_AWQ", packed, scale=scale, scale_2=f32(0.01), input_scale=f32(1))
    np.testing.assert_allclose(layer.weight, 2.24, rtol=1e-6)  # 7 * 0.31 / 0.01 = 217 is nearest to E4M3's 224
    assert layer(f32([500, 0, 0, 0]))[0, 0] == layer(f32([448, 0, 0, 0]))[0, 0]


@pytest.mark.parametrize(("algo", "steps"), [("W8A16", 128), ("W4A16", 8)])
def test_weight_only_formats_are_rounded_as_the_builder_would(algo, steps):
    row = f32(1.0, -1.0, 0.5, 0.013)
    layer = linear(algo, np.stack([row, 10 * row, 0 * row]))
    scale = 1 / steps
    expected = f32(1 - scale, -1.0, 0.5, np.rint(row[3] / scale) * scale)  # the positive end has one step less
    np.testing.assert_allclose(layer.weight, [expected, 10 * expected, 0 * expected], rtol=1e-6)


@pytest.mark.parametrize(
    ("algo", "scale", "expected"), [("FP8", 1, [0.5, -0.3125, 448]), ("INT8", 0.5, [0.5, -0.5, 63.5])]
)
def test_a_kv_cache_is_rounded_in_units_of_its_scale(algo, scale, expected):
    rounding = quantised_linear.kv_cache_rounding(algo, lambda: f32(scale))
    assert rounding(f32(0.5, -0.3, 500)).tolist() == expected


def test_a_whole_kv_cache_is_not_rounded_and_has_no_scale():
    assert quantised_linear.kv_cache_rounding(None, lambda: pytest.fail("no scale is there")) is None
