"""How each precision stores a weight in the graph: constants that the CPU plugin computes with as they are.

    fp32   f32                                  the plugin converts to what it computes in
    fp16   f16 -> Convert                       a bf16 checkpoint loses its smallest values
    bf16   bf16 -> Convert                      a bf16 checkpoint exactly
    int8   i8[N, K] -> Convert * f32[N, 1]      one scale per output row, symmetric
    int8_sq   the same, and products' inputs in 8 bits too (smoothquant.py)
    int4   u4[N, K/g, g] -> (Convert - zero) * f16[N, K/g, 1] -> [N, K]   groups of g columns, asymmetric

The plugin fuses these chains into the matrix product (and into Gather for the embedding), so no widened copy exists at
run time. With int4 the embedding and lm_head stay int8: they read out single rows and the final logits, are a quarter
of a small model, and four bits cost most there. With ``head_precision`` bf16 they are bf16, under int8 weights too. The
embedding of int8_sq is bf16: the plugin would widen it to f32 there. A matrix whose rows do not divide into groups of
at least 16 stays int8. Norms and biases are f32. A tied lm_head is the embedding's own node.

Scales come from the weights alone. Values are rounded to nearest, or as ``gptq.py`` finds them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from openvino import Node

from build.base.checkpoint import Checkpoint
from build.base.encoder_checkpoint import EncoderCheckpoint
from build.base.json_fields import CheckpointError
from build.base.numerics import f32_to_bf16

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SMALLEST_GROUP = 16
_SMALLEST_SCALE = 2.0**-24  # the smallest f16 above zero: an all-zero group still divides


@dataclass(frozen=True)
class Int8:
    """w ≈ values * scales. values: i8[N, K] in -127..127. scales: f32[N, 1]."""

    values: np.ndarray
    scales: np.ndarray


@dataclass(frozen=True)
class Int4:
    """w ≈ (values - zeros) * scales, per group. values: u8[N, K/g, g] in 0..15; zeros: u8[N, K/g, 1]; scales: f16."""

    values: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray


def quantize_int8(weight: np.ndarray) -> Int8:
    """weight: f32[..., K]."""
    scales = np.maximum(np.abs(weight).max(axis=-1, keepdims=True) / 127, np.finfo(np.float32).tiny)
    return Int8(np.clip(np.rint(weight / scales), -127, 127).astype(np.int8), scales.astype(np.float32))


def quantize_int4(weight: np.ndarray, group_size: int) -> Int4:
    """weight: f32[N, K], K a multiple of group_size. Zero is always exact: it lies in every group's range."""
    groups = weight.reshape(len(weight), -1, group_size)
    scales, zeros = group_scales(groups)
    values = np.clip(np.rint(groups / scales.astype(np.float32)) + zeros, 0, 15)
    return Int4(values.astype(np.uint8), zeros, scales)


def group_scales(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f32[..., g] -> (scales f16[..., 1], zeros u8[..., 1]) that cover every group's range, zero included."""
    low = np.minimum(groups.min(axis=-1, keepdims=True), 0)
    high = np.maximum(groups.max(axis=-1, keepdims=True), 0)
    scales = np.maximum((high - low) / 15, _SMALLEST_SCALE).astype(np.float16)
    step = scales.astype(np.float32)  # quantise with the rounded scale, so that rounding it costs nothing twice
    return scales, np.clip(np.rint(-low / step), 0, 15).astype(np.uint8)


def pack_u4(values: np.ndarray) -> np.ndarray:
    """u8 in 0..15 -> u8[ceil(n / 2)], the even element in the low half of its byte."""
    flat = values.reshape(-1)
    flat = np.append(flat, np.uint8(0)) if flat.size % 2 else flat
    return flat[0::2] | (flat[1::2] << 4)


def fitting_group(columns: int, group_size: int) -> int | None:
    """The largest group, halving from group_size down to 16, that divides the columns; None if none does."""
    while group_size >= _SMALLEST_GROUP:
        if columns % group_size == 0:
            return group_size
        group_size //= 2
    return None


class Weights:
    """The callables of ``graph.decoder`` over a checkpoint. Owns arrays that the graph shares: keep it until then."""

    def __init__(
        self,
        checkpoint: Checkpoint | EncoderCheckpoint,
        precision: str,
        group_size: int,
        calibrated: Mapping[str, Int4] | None = None,
        head_precision: str = "int8",
    ) -> None:
        """calibrated: matrices that ``gptq.py`` has rounded already, by name. head_precision: of embedding and lm_head
        where precision is int8 or int4."""
        self._checkpoint = checkpoint
        self._calibrated = calibrated or {}
        self.precision = precision
        head = head_precision if precision in ("int8", "int8_sq", "int4") else precision
        self._read_out = {EMBEDDING: "bf16" if precision == "int8_sq" else head, HEAD: head}
        self._group_size = group_size
        self._shared: list[object] = []
        self._nodes: dict[str, Node] = {}

    def matrix(self, name: str) -> Node:
        """f32[N, K] node of a linear layer or embedding; a tied weight is one node."""
        if name not in self._nodes:
            self._nodes[name] = self._compressed(name)
            self._nodes[name].set_friendly_name(name)
        return self._nodes[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.tensors[name].shape

    def can_fold(self) -> bool:
        """Whether ``folded`` has a form for linear layers of this precision."""
        return self.precision in ("bf16", "int8", "int8_sq")

    def folded(self, names: Sequence[str], columns: np.ndarray) -> tuple[Node, np.ndarray]:
        """f32[N, K + R] node of linear layers above each other with further ``columns``, f32[N, R], at their right, and
        f32[R], what each of those was divided by: in int8 they take each row's scale as it is, and the division makes
        the most of it. The layers' own values are those of ``matrix``."""
        if self.precision == "bf16":
            bits = [f32_to_bf16(self._values(name)) for name in names]
            stacked = np.concatenate([np.concatenate(bits), f32_to_bf16(columns)], axis=1)
            wide = self._constant(stacked, ov.Type.bf16, stacked.shape)
            return ops.convert(wide, ov.Type.f32), np.ones(columns.shape[1], np.float32)
        quantized = quantize_int8(np.concatenate([self._values(name) for name in names]))
        in_rows = columns / quantized.scales
        divisors = np.maximum(np.abs(in_rows).max(axis=0) / 127, np.finfo(np.float32).tiny)
        further = np.clip(np.rint(in_rows / divisors), -127, 127).astype(np.int8)
        stacked = np.concatenate([quantized.values, further], axis=1)
        return self.int8(Int8(stacked, quantized.scales)), divisors

    def stacked(self, names: Sequence[str]) -> Node | None:
        """f32[N, K] node of linear layers above each other, their values those of ``matrix``; None without a form."""
        if not self.can_fold():
            return None
        return self.folded(names, np.empty((sum(self.shape(name)[0] for name in names), 0), np.float32))[0]

    def vector(self, name: str) -> Node:
        """f32[N] node of a norm or bias."""
        return ops.constant(self._values(name))

    def _compressed(self, name: str) -> Node:
        if name in self._calibrated:
            return self._int4(self._calibrated[name], self._checkpoint.tensors[name].shape)
        stored = self._read_out.get(name, self.precision)
        if stored in ("bf16", "fp16", "fp32"):
            return self._float(name, stored)
        weight = self._values(name)
        group = fitting_group(weight.shape[-1], self._group_size) if weight.ndim == 2 else None  # experts are [E, N, K]
        if self.precision == "int4" and name not in self._read_out and group is not None:
            return self._int4(quantize_int4(weight, group), weight.shape)
        return self.int8(quantize_int8(weight))

    def int8(self, quantized: Int8) -> Node:
        """f32[N, K] node."""
        wide = ops.convert(self._constant(quantized.values, ov.Type.i8, quantized.values.shape), ov.Type.f32)
        return ops.multiply(wide, ops.constant(quantized.scales))

    def _float(self, name: str, stored: str) -> Node:
        tensor = self._checkpoint.tensors[name]
        if stored == "fp32":
            return ops.constant(self._values(name))
        if stored == "bf16":
            # The file's own bytes where it is bf16 already: mapped, not copied.
            bits = tensor.raw() if tensor.dtype == "BF16" else f32_to_bf16(self._values(name))
            require_finite(name, not ((bits & 0x7F80) == 0x7F80).any())  # all exponent bits set: NaN or infinity
            return ops.convert(self._constant(np.ascontiguousarray(bits), ov.Type.bf16, tensor.shape), ov.Type.f32)
        exact = self._values(name)
        with np.errstate(over="ignore"):
            narrow = exact.astype(np.float16)
        if not np.isfinite(narrow).all():
            largest = float(np.abs(exact).max())
            raise CheckpointError(f"{name} reaches {largest:g}, beyond fp16's 65504; use precision bf16 or int8")
        return ops.convert(self._constant(narrow, ov.Type.f16, tensor.shape), ov.Type.f32)

    def _int4(self, quantized: Int4, shape: tuple[int, ...]) -> Node:
        values = self._constant(pack_u4(quantized.values), ov.Type.u4, quantized.values.shape)
        zeros = self._constant(pack_u4(quantized.zeros), ov.Type.u4, quantized.zeros.shape)
        centred = ops.subtract(ops.convert(values, ov.Type.f16), ops.convert(zeros, ov.Type.f16))
        scaled = ops.multiply(centred, ops.constant(quantized.scales))
        flat = ops.reshape(scaled, ops.constant(np.asarray(shape, np.int64)), False)
        return ops.convert(flat, ov.Type.f32)

    def _constant(self, array: np.ndarray, dtype: ov.Type, shape: tuple[int, ...]) -> Node:
        tensor = ov.Tensor(array, ov.Shape(shape), dtype)  # shares the array without holding it
        self._shared += [array, tensor]
        return ops.constant(tensor, shared_memory=True)

    def _values(self, name: str) -> np.ndarray:
        values = self._checkpoint.tensors[name].f32()
        require_finite(name, bool(np.isfinite(values).all()))
        return np.ascontiguousarray(values)


def require_finite(name: str, finite: bool) -> None:
    """Raises CheckpointError for a tensor that is not ``finite``."""
    if not finite:
        raise CheckpointError(f"{name} holds NaN or infinity; the checkpoint is damaged or its training diverged")
