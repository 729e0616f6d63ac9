"""INT4 as quantised checkpoints store it: what ``numerics.unpack_int4`` reads back."""

from __future__ import annotations

import numpy as np


def pack_int4(values: np.ndarray) -> np.ndarray:
    """i8[out, in] of -8 to 7 -> i8[out / 2, in]: byte j holds row 2j in its low and row 2j+1 in its high nibble."""
    if values.shape[0] % 2:
        raise ValueError(f"INT4 packs pairs of rows; got {values.shape[0]} rows")
    if values.size and (values.min() < -8 or values.max() > 7):
        raise ValueError(f"INT4 holds -8 to 7; got {values.min()} to {values.max()}")
    nibbles = values.astype(np.uint8) & 0xF
    return (nibbles[0::2] | (nibbles[1::2] << 4)).view(np.int8)
