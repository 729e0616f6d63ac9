"""What both formats of quantised checkpoints share: their stored tensors, and a linear layer in the engine's numerics.

The stored tensors mean the same in both; only their names differ (``trtllm_checkpoint.py``, ``hf_quantised.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from build.base.numerics import (
    E4M3_MAX,
    bf16_to_f32,
    dequantise_blocks,
    e4m3_to_f32,
    round_to_e4m3,
    round_to_int8,
    unpack_int4,
)
from build.base.shards import StoredTensor
from build.model.decoder import Linear, Round
from contract.errors import InvalidArgument

AWQ = ("W4A16_AWQ", "W4A8_AWQ")
WEIGHT_ONLY_BITS = {"W8A16": 8, "W4A16": 4}
QUANT_ALGOS = (None, "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "W8A8_SQ_PER_CHANNEL", *AWQ, *WEIGHT_ONLY_BITS)
KV_CACHE_QUANT_ALGOS = (None, "FP8", "INT8")
ARRAY_DTYPES = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "F8_E4M3": "u1", "I8": "i1", "U8": "u1"}
FLOATS = ("BF16", "F16", "F32")
Tensors = dict[str, tuple[str | None, tuple[int, ...]]]  # (safetensors dtype, None for any of FLOATS; shape) by name


class BadCheckpoint(InvalidArgument):
    """A quantised checkpoint is incomplete or contradicts itself. ``field`` is the file at fault."""


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


def stored_array(tensor: StoredTensor) -> np.ndarray:
    """A read-only view of the mapped file: bf16 as u16 bits, FP8 as u8 bits, the rest by value."""
    dtype = np.dtype(ARRAY_DTYPES[tensor.dtype])
    return np.asarray(np.memmap(tensor.path, dtype=dtype, mode="r", offset=tensor.offset, shape=tensor.shape))


def as_f32(array: np.ndarray, dtype: str) -> np.ndarray:
    """The values of a :func:`stored_array` of safetensors' ``dtype``."""
    if dtype == "BF16":
        return bf16_to_f32(array)
    return e4m3_to_f32(array) if dtype == "F8_E4M3" else array.astype(np.float32)


def check_tensors(where: str, stored: Mapping[str, StoredTensor], needed: Tensors, optional: Tensors) -> None:
    """Raises BadCheckpoint where one is missing, unexpected, cut off, or of another dtype or shape.

    where: the file or folder of ``stored``.
    """
    if missing := sorted(needed.keys() - stored.keys()):
        raise BadCheckpoint(where, f"lacks {shortened(missing)}")
    if extra := sorted(stored.keys() - needed.keys() - optional.keys()):
        raise BadCheckpoint(where, f"holds {shortened(extra)}, for which config.json leaves no place")
    for name, tensor in stored.items():
        dtype, shape = (needed | optional)[name]
        if tensor.shape != shape or tensor.dtype not in ((dtype,) if dtype else FLOATS):
            given, expected = f"{tensor.dtype} {list(tensor.shape)}", f"{dtype or 'a float'} {list(shape)}"
            raise BadCheckpoint(str(tensor.path), f"{name} is {given}; config.json asks for {expected}")
        item = np.dtype(ARRAY_DTYPES[tensor.dtype]).itemsize
        if tensor.offset + int(np.prod(tensor.shape)) * item > tensor.path.stat().st_size:
            raise BadCheckpoint(str(tensor.path), f"is truncated inside {name}")


def shortened(names: set[str] | list[str], limit: int = 4) -> str:
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) or "none") + more


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
