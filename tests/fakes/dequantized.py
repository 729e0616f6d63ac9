"""What the quantised weights of ``build/model/weights.py`` stand for."""

from __future__ import annotations

import numpy as np

from build.model.weights import Int4, Int8


def dequantized(weights: Int4 | Int8) -> np.ndarray:
    """f32[N, K]."""
    if isinstance(weights, Int8):
        return weights.values.astype(np.float32) * weights.scales
    centred = weights.values.astype(np.float32) - weights.zeros.astype(np.float32)
    return (centred * weights.scales.astype(np.float32)).reshape(len(weights.values), -1)
