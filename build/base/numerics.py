"""The number formats of quantised checkpoints, in numpy: bf16, FP8 E4M3, INT8 and packed INT4.

Weights are read from their stored bits; activations are rounded as the engine's kernels round them (to nearest, ties
to even, saturating), so that an engine's numerics can be computed where no such kernel exists.
"""

import ml_dtypes
import numpy as np

E4M3_MAX = 448.0
_E4M3 = ml_dtypes.float8_e4m3fn


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """u16 bits -> f32 of the same shape, exact."""
    return bits.view(ml_dtypes.bfloat16).astype(np.float32)


def f32_to_bf16(values: np.ndarray) -> np.ndarray:
    """f32 -> u16 bits of the nearest bf16, ties to even. A NaN stays one."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    """f32 -> f32 holding only bf16 values."""
    return bf16_to_f32(f32_to_bf16(values))


def e4m3_to_f32(bits: np.ndarray) -> np.ndarray:
    """u8 bits -> f32 of the same shape, exact."""
    return bits.view(_E4M3).astype(np.float32)


def round_to_e4m3(values: np.ndarray) -> np.ndarray:
    """f32 -> f32 holding only E4M3 values; magnitudes above 448 become 448, as the hardware's saturating cast does."""
    return np.clip(np.asarray(values, dtype=np.float32), -E4M3_MAX, E4M3_MAX).astype(_E4M3).astype(np.float32)


def round_to_int8(values: np.ndarray) -> np.ndarray:
    """f32 -> f32 holding only integers from -128 to 127."""
    return np.clip(np.rint(values), -128, 127)


def unpack_int4(packed: np.ndarray) -> np.ndarray:
    """i8[out / 2, in] -> i8[out, in] of -8 to 7: byte j holds row 2j in its low and row 2j+1 in its high nibble."""
    bits = packed.view(np.uint8)
    rows = np.stack([bits & 0xF, bits >> 4], axis=1).reshape(2 * bits.shape[0], *bits.shape[1:])
    return (rows.astype(np.int8) ^ 8) - 8  # two's complement of a nibble


def dequantise_blocks(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """i8[out, in] and f32[out, in / block] -> f32[out, in]; one scale per row and per block of input columns."""
    rows, blocks = scales.shape
    blocked = values.reshape(rows, blocks, -1).astype(np.float32)
    return (blocked * scales[:, :, None]).reshape(rows, -1)
