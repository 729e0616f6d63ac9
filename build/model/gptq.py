"""4-bit weights chosen by what they do to the layer's output on real text, and not by themselves alone.

GPTQ (Frantar et al., arXiv 2210.17323): columns are rounded in order, and what a rounding gets wrong is made up for by
the columns not yet rounded, weighted by the inverse of the inputs' second moments. It costs one pass of the reference
over the calibration text and nothing at run time: the format is ``weights.quantize_int4``'s.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from build.base.checkpoint import Checkpoint
from build.base.program import Notify
from build.model import decoder
from build.model.decoder import Linear
from build.model.weights import Int4, fitting_group, group_scales, require_finite

DAMPING = 0.01  # of the mean diagonal, as in the paper: inputs that hardly vary on the texts still count for something

# Where a layer of ``decoder.py`` reads its inputs, and the matrices of the checkpoint that multiply them.
_READERS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "dense": ("self_attn.o_proj",),
    "fc": ("mlp.gate_proj", "mlp.up_proj"),
    "proj": ("mlp.down_proj",),
}


@dataclass(frozen=True)
class _Watched:
    """A linear layer that adds up x xᵀ over its inputs x. moments: f64[in, in]."""

    linear: Linear
    moments: np.ndarray

    def __call__(self, x: np.ndarray) -> np.ndarray:
        self.moments[...] += x.T @ x
        return self.linear(x)


def calibrated(opened: Checkpoint, blocks: np.ndarray, group_size: int, notify: Notify) -> dict[str, Int4]:
    """Every matrix that ``Weights`` stores in four bits, by its Hugging Face name. blocks: i64[n, t] token ids.

    Raises CheckpointError where weights or activations are not finite.
    """
    model, matrices = decoder.from_checkpoint(opened), {}
    hidden = model.embed(blocks)
    for index, make_layer in enumerate(model.layers):
        notify(f"calibrating layer {index + 1} of {len(model.layers)}")
        layer = make_layer()
        watched: dict[str, Any] = {}
        for reader in _READERS:
            linear: Linear = getattr(layer, reader)
            watched[reader] = _Watched(linear, np.zeros((linear.weight.shape[1],) * 2))
        model.advance(hidden, replace(layer, **watched))
        for reader, modules in _READERS.items():
            moments = watched[reader].moments
            require_finite(f"what model.layers.{index} computes", bool(np.isfinite(moments).all()))
            if (group := fitting_group(len(moments), group_size)) is None:
                continue
            influence = influence_of(moments)
            for module in modules:
                name = f"model.layers.{index}.{module}.weight"
                weight = opened.tensors[name].f32()
                require_finite(name, bool(np.isfinite(weight).all()))
                matrices[name] = quantize(weight, influence, group)
    return matrices


def quantize(weight: np.ndarray, influence: np.ndarray, group_size: int) -> Int4:
    """weight: f32[N, K]; influence: ``influence_of`` its inputs, f32[K, K]."""
    rest = np.array(weight, dtype=np.float32)
    columns = weight.shape[1]
    values, zeros, scales = [], [], []
    for start in range(0, columns, group_size):
        end = start + group_size
        scale, zero = group_scales(rest[:, start:end])  # f16[N, 1], u8[N, 1]
        step, offset = scale.astype(np.float32)[:, 0], zero.astype(np.float32)[:, 0]
        missed = np.empty((len(weight), group_size), dtype=np.float32)
        chosen = np.empty((len(weight), group_size), dtype=np.uint8)
        for column in range(start, end):
            rounded = np.clip(np.rint(rest[:, column] / step) + offset, 0, 15)
            chosen[:, column - start] = rounded
            error = (rest[:, column] - (rounded - offset) * step) / influence[column, column]
            rest[:, column + 1 : end] -= np.outer(error, influence[column, column + 1 : end])
            missed[:, column - start] = error
        rest[:, end:] -= missed @ influence[start:end, end:]
        values.append(chosen)
        zeros.append(zero)
        scales.append(scale)
    return Int4(np.stack(values, 1), np.stack(zeros, 1), np.stack(scales, 1))


def influence_of(moments: np.ndarray) -> np.ndarray:
    """f64[K, K] second moments -> f32[K, K] upper triangular: how an error in a column moves those after it."""
    diagonal = np.einsum("ii->i", moments := moments.copy())
    diagonal += DAMPING * diagonal.mean() + np.finfo(np.float32).tiny
    return np.linalg.cholesky(np.linalg.inv(moments)).T.astype(np.float32)
