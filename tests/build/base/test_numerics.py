"""Number formats against their definitions; against torch's own casts where torch is installed."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from build.base import numerics
from tests.fakes.packed_int4 import pack_int4

f32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
f32_arrays = hnp.arrays(np.float32, hnp.array_shapes(max_dims=2, max_side=9), elements=f32)
small_f32 = st.floats(-600, 600, width=32)


def e4m3_by_hand(byte):
    """The definition: sign, 4 exponent bits with bias 7, 3 mantissa bits; S.1111.111 is NaN."""
    sign, exponent, mantissa = (-1) ** (byte >> 7), (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def test_every_e4m3_byte_has_the_value_of_its_definition():
    values = numerics.e4m3_to_f32(np.arange(256, dtype=np.uint8))
    for byte, value in enumerate(values):
        expected = e4m3_by_hand(byte)
        assert math.isnan(value) if math.isnan(expected) else value == expected


@given(hnp.arrays(np.float32, 20, elements=small_f32))
def test_rounding_to_e4m3_gives_the_nearest_value_and_the_even_one_between_two(values):
    every = np.array([e4m3_by_hand(byte) for byte in range(256)])
    finite, even = np.unique(every[np.isfinite(every)]), set(every[::2])
    for value, rounded in zip(values.astype(np.float64), numerics.round_to_e4m3(values), strict=True):
        distance = np.abs(finite - value)
        nearest = finite[distance == distance.min()]
        assert rounded in nearest
        if len(nearest) == 2 and abs(value) < 448:
            assert rounded.item() in even


@given(f32_arrays)
def test_rounding_to_e4m3_is_idempotent_odd_and_saturates(values):
    rounded = numerics.round_to_e4m3(values)
    assert np.array_equal(numerics.round_to_e4m3(rounded), rounded)
    assert np.array_equal(numerics.round_to_e4m3(-values), -rounded)
    assert np.abs(rounded).max() <= 448


@given(hnp.arrays(np.float32, 20, elements=f32))
def test_rounding_to_bf16_keeps_eight_significant_bits_and_picks_the_nearer_neighbour(values):
    bits = values.view(np.uint32)
    below, above = (bits & 0xFFFF0000).view(np.float32), ((bits & 0xFFFF0000) + 0x10000).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = numerics.round_to_bf16(values).astype(np.float64)
        to_below = np.abs(values.astype(np.float64) - below)
        to_above = np.abs(values.astype(np.float64) - above)
    finite_above = np.isfinite(above)
    assert (rounded[finite_above & (to_below < to_above)] == below[finite_above & (to_below < to_above)]).all()
    assert (rounded[finite_above & (to_above < to_below)] == above[finite_above & (to_above < to_below)]).all()


@given(hnp.arrays(np.uint16, 30))
def test_every_finite_bf16_survives_the_way_through_f32(bits):
    finite = (bits & 0x7F80) != 0x7F80
    assert np.array_equal(numerics.f32_to_bf16(numerics.bf16_to_f32(bits[finite])), bits[finite])


def test_a_nan_stays_a_nan_in_bf16():
    assert np.isnan(numerics.round_to_bf16(np.array([np.nan, -np.nan], dtype=np.float32))).all()


@given(
    st.integers(1, 6).flatmap(
        lambda pairs: hnp.arrays(np.int8, st.tuples(st.just(2 * pairs), st.integers(1, 7)), elements=st.integers(-8, 7))
    )
)
def test_int4_survives_packing(values):
    packed = pack_int4(values)
    assert packed.dtype == np.int8 and packed.shape == (len(values) // 2, values.shape[1])
    assert np.array_equal(numerics.unpack_int4(packed), values)


@given(hnp.arrays(np.int8, hnp.array_shapes(min_dims=2, max_dims=2, max_side=8)))
def test_every_byte_is_two_int4_values_and_comes_back(packed):
    values = numerics.unpack_int4(packed)
    assert values.min() >= -8 and values.max() <= 7
    assert np.array_equal(pack_int4(values), packed)


def test_int4_rows_2j_and_2j_plus_1_are_the_low_and_the_high_nibble_of_byte_j():
    packed = pack_int4(np.array([[1], [-2], [7], [-8]], dtype=np.int8))
    assert packed.view(np.uint8).tolist() == [[0xE1], [0x87]]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros((3, 2), np.int8), "INT4 packs pairs of rows; got 3 rows"),
        (np.full((2, 2), 8, np.int8), "INT4 holds -8 to 7; got 8 to 8"),
    ],
)
def test_what_int4_cannot_hold_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        pack_int4(values)


def test_a_block_of_columns_shares_a_scale():
    values = np.array([[1, 2, 3, 4], [-1, -2, -3, -4]], dtype=np.int8)
    scales = np.array([[10, 100], [1, 0.5]], dtype=np.float32)
    assert numerics.dequantise_blocks(values, scales).tolist() == [[10, 20, 300, 400], [-1, -2, -1.5, -2]]


@pytest.mark.build_env
def test_the_casts_are_torchs():
    import torch

    rng = np.random.default_rng(0)
    values = (rng.standard_normal(20_000) * np.exp(4 * rng.standard_normal(20_000))).astype(np.float32)
    in_range = torch.from_numpy(np.clip(values, -448, 448))
    fp8 = in_range.to(torch.float8_e4m3fn)
    assert np.array_equal(numerics.round_to_e4m3(values), fp8.float().numpy())
    assert np.array_equal(numerics.e4m3_to_f32(fp8.view(torch.uint8).numpy()), fp8.float().numpy())
    assert np.array_equal(numerics.round_to_bf16(values), torch.from_numpy(values).bfloat16().float().numpy())
