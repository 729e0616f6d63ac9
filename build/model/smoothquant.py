"""Inputs of matrix products in 8 bits, so that the CPU multiplies 8-bit integers with 8-bit integers (W8A8).

Each product's input gets one range, the largest magnitude on the calibration texts. A few of its columns are far larger
than the others, so part of their size is moved into the weights first (SmoothQuant: Xiao et al., arXiv 2211.10438):
what writes a column (a norm, or rows of the matrix before) is divided by a factor, and the columns that read it are
multiplied by it. Products whose inputs still lose too much are computed in bf16.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino.opset13 as ops
from openvino import Node

from build.base.checkpoint import Checkpoint, StoredTensor
from build.base.program import Notify
from build.model import decoder
from build.model.decoder import Linear
from build.model.weights import EMBEDDING, HEAD, require_finite

# The share of an input's range, in logarithms, that moves into the weights (the paper's alpha); each takes the best.
MIGRATED = (0.3, 0.5, 0.7, 0.8, 0.9)
MOST_MISSED = 0.002  # of a product, squared, in the mean of tokens: an input that loses more stays as it is
SAMPLED_TOKENS = 1024  # that this is measured on; ranges are those of all
_BARRIER = 1e6  # beyond any product

# Where a layer of ``decoder.py`` reads its inputs; what writes their columns; the matrices that multiply them.
_INPUTS = {
    "qkv": ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    "dense": ("self_attn.v_proj", ("self_attn.o_proj",)),
    "fc": ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    "proj": ("mlp.up_proj", ("mlp.down_proj",)),
}


@dataclass(frozen=True)
class _Scaled:
    """A stored matrix or vector times ``factors``, which have its shape or one that is broadcast to it."""

    stored: StoredTensor
    factors: np.ndarray
    dtype = "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def f32(self) -> np.ndarray:
        return self.stored.f32() * self.factors


@dataclass(frozen=True)
class _Seen:
    """A linear layer that keeps its inputs, f32[tokens, in] of each sequence."""

    linear: Linear
    inputs: list[np.ndarray]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        self.inputs.append(x)
        return self.linear(x)


class Smoothed:
    """checkpoint: computes the same with smaller outliers. inputs: how many there are. ranges: the largest magnitude of
    each input that is to be in 8 bits, by the first matrix that reads it."""

    def __init__(self, opened: Checkpoint, blocks: np.ndarray, head: bool, notify: Notify) -> None:
        """blocks: i64[n, t] token ids. head: whether lm_head's input is in 8 bits too.

        Raises CheckpointError where weights or activations are not finite.
        """
        self.ranges: dict[str, float] = {}
        self.inputs = 0
        self._tensors, self._arch = dict[str, Any](opened.tensors), opened.architecture
        model = decoder.from_checkpoint(opened)
        hidden = model.embed(blocks)
        for index, make_layer in enumerate(model.layers):
            notify(f"calibrating layer {index + 1} of {len(model.layers)}")
            layer, at = make_layer(), f"model.layers.{index}"
            seen = {reader: _Seen(getattr(layer, reader), []) for reader in _INPUTS}
            model.advance(hidden, dataclasses.replace(layer, **seen))  # type: ignore[arg-type]
            for reader, (writer, modules) in _INPUTS.items():
                names = [f"{at}.{module}.weight" for module in modules]
                self._smooth(np.concatenate(seen[reader].inputs), f"{at}.{writer}", names)
        if head:
            self._tensors.setdefault(HEAD, opened.tensors[EMBEDDING])  # a tied embedding itself is not smoothed
            epsilon = self._arch.rms_norm_eps
            last = np.concatenate([decoder.rms_norm(row, model.final_norm, epsilon) for row in hidden])
            self._smooth(last, "model.norm", [HEAD])
            self._arch = dataclasses.replace(self._arch, tied=False)
        self.checkpoint = dataclasses.replace(opened, architecture=self._arch, tensors=self._tensors)

    def _smooth(self, inputs: np.ndarray, writer: str, names: Sequence[str]) -> None:
        """inputs: f32[tokens, columns], what the matrices ``names`` multiply."""
        matrix = np.concatenate([self._tensors[name].f32() for name in names])
        largest, read = np.abs(inputs).max(0), np.abs(matrix).max(0)
        require_finite(f"what {names[0]} multiplies", bool(np.isfinite(largest).all()))
        arch = self._arch
        # Columns of one head of values are read once by every query head of its group.
        group = arch.num_heads // arch.num_kv_heads if writer.endswith("v_proj") else 1

        def of_writer(columns: np.ndarray) -> np.ndarray:
            return columns.reshape(-1, group, arch.head_dim).max(1).reshape(-1) if group > 1 else columns

        def of_readers(factors: np.ndarray) -> np.ndarray:
            return np.repeat(factors.reshape(-1, 1, arch.head_dim), group, 1).reshape(-1) if group > 1 else factors

        sample = inputs[:: max(1, len(inputs) // SAMPLED_TOKENS)]
        there = ((sample @ matrix.T) ** 2).sum(1) + np.finfo(np.float32).tiny
        least = MOST_MISSED
        for share in MIGRATED:
            tried = _factors(of_writer(largest), of_writer(read), share)
            wide = of_readers(tried)
            missed = float((_missed(sample / wide, float((largest / wide).max()), matrix * wide) / there).mean())
            if missed < least:
                least, factors, spread = missed, tried, wide
        self.inputs += 1
        if least == MOST_MISSED:
            return
        for name in (f"{writer}.weight", f"{writer}.bias"):
            if (stored := self._tensors.get(name)) is not None:
                self._tensors[name] = _Scaled(stored, 1 / (factors if len(stored.shape) == 1 else factors[:, None]))
        for name in names:
            self._tensors[name] = _Scaled(self._tensors[name], spread)
        self.ranges[names[0]] = float((largest / spread).max())


def _factors(written: np.ndarray, read: np.ndarray, share: float) -> np.ndarray:
    """f32[columns] to divide inputs by; written, read: the largest magnitudes of inputs and of weights."""
    tiny = np.finfo(np.float32).tiny
    factors = np.maximum(written, tiny) ** share / np.maximum(read, tiny) ** (1 - share)
    return np.clip(factors / np.exp(np.log(factors).mean()), 1e-3, 1e3)


def _missed(inputs: np.ndarray, end: float, matrix: np.ndarray) -> np.ndarray:
    """f32[tokens], the square of what rounding inputs and matrix changes of their products.

    inputs: f32[tokens, columns] up to ``end``; matrix: f32[rows, columns]. Columns are taken to err independently.
    """
    steps = np.abs(matrix).max(1, keepdims=True) / 127 + np.finfo(np.float32).tiny
    step = max(end / 127, float(np.finfo(np.float32).tiny))
    of_inputs = (np.rint(inputs / step) * step - inputs) ** 2 @ (matrix**2).sum(0)
    return of_inputs + inputs**2 @ ((np.rint(matrix / steps) * steps - matrix) ** 2).sum(0)


class Rounded:
    """The hook of ``graph.decoder`` around products. Each form below is the one whose nodes the plugin fuses."""

    def __init__(self, ranges: Mapping[str, float]) -> None:
        self._ranges = ranges

    def __call__(self, x: Node, names: Sequence[str], products: Callable[[Node], list[Node]]) -> list[Node]:
        """``x``'s products with the matrices ``names``, of which it has a range or which are left as they are."""
        end = self._ranges.get(names[0])
        if end is None:
            return products(x)
        columns = x.get_output_partial_shape(0)[-1].get_length()
        low, high = np.float32(-end * 128 / 127), np.float32(end)
        # Changes nothing; without an element-wise operation before it, rounding is two passes over f32 values. It takes
        # a bound for each column because a single one would be moved before the attention's reshape, away from here.
        bounded = ops.maximum(x, ops.constant(np.full(columns, low * 1.01, np.float32)))
        limits = [ops.constant(limit) for limit in (low, high, low, high)]
        rounded = products(ops.fake_quantize(bounded, *limits, 256))
        if names[0] == HEAD:  # must be the last operation, else OpenVINO GenAI computes it for every token of a prompt
            return rounded
        # Changes nothing; else the scale is moved behind the next addition or split and is a pass of its own there.
        return [ops.clamp(y, -_BARRIER, _BARRIER) for y in rounded]
