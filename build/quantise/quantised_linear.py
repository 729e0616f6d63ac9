"""What both formats of quantised checkpoints share: their stored tensors, and a linear layer in the engine's numerics.

The stored tensors mean the same in both; only their names differ (``trtllm_checkpoint.py``, ``hf_quantised.py``).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from build.base import numerics
from build.base.numerics import e4m3_to_f32, round_to_e4m3, round_to_int8
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


def linear(
    algo: str | None,
    weight: np.ndarray,
    *,
    scale: np.ndarray | None = None,
    scale_2: np.ndarray | None = None,
    input_scale: np.ndarray | None = None,
    prequant: np.ndarray | None = None,
    bias: np.ndarray | None = None,
) -> Linear:
    """A layer of its stored tensors. algo: one of QUANT_ALGOS.

    weight: u8[out, in] bits of FP8, i8[out, in] of INT8, i8[out / 2, in] of packed INT4, or f32[out, in].
    scale: f32[1], f32[out] or f32[out, in / block] of the weight; scale_2: f32[1], the FP8 stage of W4A8.
    input_scale: f32[1]. prequant: f32[in], what the input is multiplied by first. bias: f32[out].
    """
    rounding = {"FP8": round_to_e4m3, "W4A8_AWQ": round_to_e4m3, "W8A8_SQ_PER_CHANNEL": round_to_int8}.get(algo or "")
    round_input: Round | None = round_per_token if algo == "FP8_PER_CHANNEL_PER_TOKEN" else None
    if rounding is not None and input_scale is not None:
        round_input = partial(round_scaled, rounding, input_scale)
    return Linear(_weight(algo, weight, scale, scale_2), bias, prequant, round_input)


def _weight(algo: str | None, weight: np.ndarray, scale: np.ndarray | None, scale_2: np.ndarray | None) -> np.ndarray:
    if algo is None:
        return weight
    if algo in WEIGHT_ONLY_BITS:
        return weight_only(weight, WEIGHT_ONLY_BITS[algo])
    assert scale is not None  # its reader checked that the format's tensors are there
    if algo == "FP8":
        return e4m3_to_f32(weight) * scale
    if algo == "FP8_PER_CHANNEL_PER_TOKEN":
        return e4m3_to_f32(weight) * scale[:, None]
    if algo == "W8A8_SQ_PER_CHANNEL":
        return weight * scale[:, None]
    values = numerics.dequantise_blocks(numerics.unpack_int4(weight), scale)
    # W4A8 multiplies FP8 by FP8: the INT4 weights pass through E4M3.
    return values if scale_2 is None else round_scaled(round_to_e4m3, scale_2, values)


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
        return numerics.bf16_to_f32(array)
    return e4m3_to_f32(array) if dtype == "F8_E4M3" else array.astype(np.float32)


def check_tensors(where: str, stored: Mapping[str, StoredTensor], needed: Tensors, optional: Tensors) -> None:
    """Raises BadCheckpoint where a tensor is missing, unexpected, cut off, or of another dtype or shape."""
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


def check_quantization(path: str, quantization: Mapping[str, Any], algos: Sequence[str | None]) -> None:
    """Raises BadCheckpoint for a format whose numerics are not known here. path: of the file that names it. algos:
    those of QUANT_ALGOS that the kind of checkpoint may have."""
    for key, allowed in (("quant_algo", algos), ("kv_cache_quant_algo", KV_CACHE_QUANT_ALGOS)):
        if quantization.get(key) not in allowed:
            problem = f"{key} is {quantization.get(key)!r}; read are {', '.join(map(str, allowed))}"
            raise BadCheckpoint(path, problem)
    size = quantization.get("group_size")
    if quantization.get("quant_algo") in AWQ and not (isinstance(size, int) and size > 0):
        raise BadCheckpoint(path, "group_size is missing; AWQ scales cannot be read without it")
    if set(quantization.get("exclude_modules") or []) - {"lm_head"}:
        raise BadCheckpoint(path, f"exclude_modules is {quantization['exclude_modules']}; only lm_head is read")


def shortened(names: Iterable[str]) -> str:
    """The first four, and how many more there are."""
    first, rest = sorted(names)[:4], sorted(names)[4:]
    return (", ".join(first) or "none") + (f" and {len(rest)} more" if rest else "")


def round_scaled(rounding: Round, scale: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Into units of ``scale``, rounded, and back."""
    return rounding(values / scale) * scale


def round_per_token(x: np.ndarray) -> np.ndarray:
    """f32[tokens, in] through FP8 with a scale of its own per token."""
    scale = np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-12)) / np.float32(numerics.E4M3_MAX)
    return round_to_e4m3(x / scale) * scale


def weight_only(weight: np.ndarray, bits: int) -> np.ndarray:
    """What ``trtllm-build`` makes of a W8A16 or W4A16 checkpoint, which stores whole weights (rule R22).

    Symmetric, one scale per output row: the largest magnitude is 2^(bits - 1) steps. From the builder's source as
    remembered, not checked against a build.
    """
    steps = 2 ** (bits - 1)
    scale = np.maximum(np.abs(weight).max(1, keepdims=True), np.float32(1e-12)) / np.float32(steps)
    return np.clip(np.rint(weight / scale), -steps, steps - 1) * scale
