"""One quantised linear layer as a numpy callable: weights dequantised, inputs rounded as the engine's kernel does.

The stored tensors mean the same in both checkpoint formats; only their names differ (``trtllm_checkpoint.py``,
``hf_quantised.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from build.base.numerics import E4M3_MAX, dequantise_blocks, e4m3_to_f32, round_to_e4m3, round_to_int8, unpack_int4
from build.model.decoder import Linear, Round

AWQ = ("W4A16_AWQ", "W4A8_AWQ")
WEIGHT_ONLY_BITS = {"W8A16": 8, "W4A16": 4}
QUANT_ALGOS = (None, "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "W8A8_SQ_PER_CHANNEL", *AWQ, *WEIGHT_ONLY_BITS)
KV_CACHE_QUANT_ALGOS = (None, "FP8", "INT8")


@dataclass(frozen=True)
class Stored:
    """The tensors of one layer.

    weight: u8[out, in] bits of FP8, i8[out, in] of INT8, i8[out / 2, in] of packed INT4, or f32[out, in].
    scale: f32[1], f32[out] or f32[out, in / block] of the weight; scale_2: f32[1], the FP8 stage of W4A8.
    input_scale: f32[1]. prequant: f32[in], what the input is multiplied by first. bias: f32[out].
    """

    weight: np.ndarray
    scale: np.ndarray | None = None
    scale_2: np.ndarray | None = None
    input_scale: np.ndarray | None = None
    prequant: np.ndarray | None = None
    bias: np.ndarray | None = None


def linear(algo: str | None, stored: Stored) -> Linear:
    """``algo``: one of QUANT_ALGOS."""
    return Linear(_weight(algo, stored), stored.bias, stored.prequant, _round_input(algo, stored))


def _weight(algo: str | None, stored: Stored) -> np.ndarray:
    if algo is None:
        return stored.weight
    if algo in WEIGHT_ONLY_BITS:
        return weight_only(stored.weight, WEIGHT_ONLY_BITS[algo])
    assert stored.scale is not None  # its reader checked that the format's tensors are there
    if algo == "FP8":
        return e4m3_to_f32(stored.weight) * stored.scale
    if algo == "FP8_PER_CHANNEL_PER_TOKEN":
        return e4m3_to_f32(stored.weight) * stored.scale[:, None]
    if algo == "W8A8_SQ_PER_CHANNEL":
        return stored.weight * stored.scale[:, None]
    values = dequantise_blocks(unpack_int4(stored.weight), stored.scale)
    # W4A8 multiplies FP8 by FP8: the INT4 weights pass through E4M3.
    if algo != "W4A8_AWQ":
        return values
    assert stored.scale_2 is not None
    return round_scaled(round_to_e4m3, stored.scale_2, values)


def _round_input(algo: str | None, stored: Stored) -> Round | None:
    rounding = {"FP8": round_to_e4m3, "W4A8_AWQ": round_to_e4m3, "W8A8_SQ_PER_CHANNEL": round_to_int8}.get(algo or "")
    if rounding is not None and stored.input_scale is not None:
        return partial(round_scaled, rounding, stored.input_scale)
    return round_per_token if algo == "FP8_PER_CHANNEL_PER_TOKEN" else None


def kv_cache_rounding(algo: str | None, scale: Callable[[], np.ndarray]) -> Round | None:
    """How keys and values are stored; ``algo``: one of KV_CACHE_QUANT_ALGOS."""
    if algo is None:
        return None
    return partial(round_scaled, round_to_e4m3 if algo == "FP8" else round_to_int8, scale())


def round_scaled(rounding: Round, scale: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Into units of ``scale``, rounded, and back."""
    return rounding(values / scale) * scale


def round_per_token(x: np.ndarray) -> np.ndarray:
    """f32[tokens, in] through FP8 with a scale of its own per token."""
    scale = np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-12)) / np.float32(E4M3_MAX)
    return round_to_e4m3(x / scale) * scale


def weight_only(weight: np.ndarray, bits: int) -> np.ndarray:
    """What ``trtllm-build`` makes of a W8A16 or W4A16 checkpoint, which stores whole weights (rule R22).

    Symmetric, one scale per output row: the largest magnitude is 2^(bits - 1) steps. From the builder's source as
    remembered, not checked against a build.
    """
    steps = 2 ** (bits - 1)
    scale = np.maximum(np.abs(weight).max(1, keepdims=True), np.float32(1e-12)) / np.float32(steps)
    return np.clip(np.rint(weight / scale), -steps, steps - 1) * scale
