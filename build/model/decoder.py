"""A dense Llama-family decoder computed in f32 numpy, layer by layer, with a quantised engine's rounding put in.

It is the reference of the quality gate (a Hugging Face checkpoint in bf16, a GGUF file's dequantised weights) and, fed
by ``trtllm_checkpoint``, the simulation of the engine that TensorRT-LLM would compile from a quantised checkpoint. A
layer is made when its turn comes and dropped after it, so that a model larger than memory can be measured.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from build.base import rope as rotary
from build.base.architecture import Architecture
from build.base.checkpoint import Checkpoint
from build.base.encoder_checkpoint import EncoderCheckpoint
from build.base.gguf_file import GgufTensor
from build.base.numerics import round_to_bf16

Round = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Linear:
    """``y = round_input(x * prequant) @ weight.T + bias``.

    weight: f32[out, in], dequantised. prequant: f32[in], what AWQ and SmoothQuant multiply the input by.
    round_input: how the kernel stores its input (FP8, INT8), or None where it keeps it.
    """

    weight: np.ndarray
    bias: np.ndarray | None = None
    prequant: np.ndarray | None = None
    round_input: Round | None = None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        if self.prequant is not None:
            x = x * self.prequant
        if self.round_input is not None:
            x = self.round_input(x)
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class Layer:
    """One block. qkv: rows [Q; K; V]. fc: the activated branch (gate_proj), gate: the other (up_proj), proj: down.

    q_norm, k_norm: f32[head_dim] or None. round_kv: how keys (after rotation) and values are stored, or None.
    """

    input_norm: np.ndarray
    qkv: Linear
    dense: Linear
    post_norm: np.ndarray
    fc: Linear
    gate: Linear
    proj: Linear
    q_norm: np.ndarray | None = None
    k_norm: np.ndarray | None = None
    round_kv: Round | None = None


@dataclass(frozen=True)
class Decoder:
    """A whole model. ``layers[i]()`` makes layer i; ``embedding``: f32[vocab, hidden]; ``head``: hidden -> vocab."""

    architecture: Architecture
    embedding: np.ndarray
    layers: Sequence[Callable[[], Layer]]
    final_norm: np.ndarray
    head: Linear

    def logits(self, blocks: np.ndarray) -> Iterator[np.ndarray]:
        """i64[n, t] token ids -> n times f32[t, vocab]: logits after each position. Raises as ``embed``."""
        hidden = self.embed(blocks)
        for make_layer in self.layers:
            self.advance(hidden, make_layer())
        for row in hidden:
            yield self.head(rms_norm(row, self.final_norm, self.architecture.rms_norm_eps))

    def embed(self, blocks: np.ndarray) -> np.ndarray:
        """i64[n, t] token ids -> f32[n, t, hidden]. Raises ValueError where an id is outside the embedding."""
        blocks = np.asarray(blocks)
        if blocks.ndim != 2 or not blocks.size:
            raise ValueError(f"blocks must be [n, t] token ids; got shape {list(blocks.shape)}")
        if blocks.min() < 0 or blocks.max() >= len(self.embedding):
            vocab = len(self.embedding)
            raise ValueError(f"token ids go from {blocks.min()} to {blocks.max()}; the vocabulary has {vocab}")
        return self.embedding[blocks]

    def advance(self, hidden: np.ndarray, layer: Layer) -> None:
        """Takes f32[n, t, hidden] through one layer, in place; one sequence at a time bounds the attention matrix."""
        cos, sin = _rotation(self.architecture, hidden.shape[1])
        for row in range(len(hidden)):
            hidden[row] = _block(self.architecture, layer, hidden[row], cos, sin)


def _block(arch: Architecture, layer: Layer, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    x = x + layer.dense(_attention(arch, layer, layer.qkv(rms_norm(x, layer.input_norm, arch.rms_norm_eps)), cos, sin))
    y = rms_norm(x, layer.post_norm, arch.rms_norm_eps)
    wide = layer.fc(y)
    silu = wide / (1 + np.exp(-np.clip(wide, -80, None)))  # exp(80) is still finite in f32
    return x + layer.proj(silu * layer.gate(y))


def _attention(arch: Architecture, layer: Layer, qkv: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """f32[t, (heads + 2 kv_heads) * d] -> f32[t, heads * d]: causal, grouped queries."""
    length, heads, kv_heads, size = len(qkv), arch.num_heads, arch.num_kv_heads, arch.head_dim
    split = qkv.reshape(length, heads + 2 * kv_heads, size).transpose(1, 0, 2)  # [all heads, t, d]
    query, key, value = np.split(split, [heads, heads + kv_heads])
    if layer.q_norm is not None:
        query = rms_norm(query, layer.q_norm, arch.rms_norm_eps)
    if layer.k_norm is not None:
        key = rms_norm(key, layer.k_norm, arch.rms_norm_eps)
    query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
    if layer.round_kv is not None:
        key, value = layer.round_kv(key), layer.round_kv(value)
    query = query.reshape(kv_heads, heads // kv_heads, length, size)
    scores = query @ key[:, None].transpose(0, 1, 3, 2) / np.float32(np.sqrt(size))  # [kv, group, t, t]
    scores += np.triu(np.full((length, length), -np.inf, dtype=np.float32), k=1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = weights @ value[:, None]  # [kv, group, t, d]
    return mixed.reshape(heads, length, size).transpose(1, 0, 2).reshape(length, heads * size)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight


def _rotation(arch: Architecture, length: int) -> tuple[np.ndarray, np.ndarray]:
    """cos, sin: f32[length, head_dim / 2]."""
    frequencies, factor = rotary.inverse_frequencies(arch.rope, arch.head_dim)
    angles = np.arange(length, dtype=np.float32)[:, None] * frequencies
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """The half-split layout: dimension i turns with dimension i + d/2."""
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def assembled(
    arch: Architecture,
    f32: Callable[[str], np.ndarray],
    linear: Callable[..., Linear],
    round_kv: Callable[[str], Round | None] = lambda at: None,
) -> Decoder:
    """A decoder of tensors by their Hugging Face names. f32: a tensor. linear: of one module, or of the rows of
    several. round_kv: of the layer of a name."""

    def layer(index: int) -> Layer:
        at = f"model.layers.{index}"
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        return Layer(
            input_norm=f32(f"{at}.input_layernorm.weight"),
            qkv=linear(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            dense=linear(f"{attention}.o_proj"),
            post_norm=f32(f"{at}.post_attention_layernorm.weight"),
            fc=linear(f"{mlp}.gate_proj"),
            gate=linear(f"{mlp}.up_proj"),
            proj=linear(f"{mlp}.down_proj"),
            q_norm=f32(f"{attention}.q_norm.weight") if arch.qk_norm else None,
            k_norm=f32(f"{attention}.k_norm.weight") if arch.qk_norm else None,
            round_kv=round_kv(at),
        )

    embedding = f32("model.embed_tokens.weight")
    return Decoder(
        architecture=arch,
        embedding=embedding,
        layers=[partial(layer, index) for index in range(arch.num_layers)],
        final_norm=f32("model.norm.weight"),
        head=Linear(embedding if arch.tied else f32("lm_head.weight")),
    )


def from_checkpoint(opened: Checkpoint | EncoderCheckpoint) -> Decoder:
    """The reference: weights rounded to bf16, or as a GGUF file's are dequantised; all arithmetic in f32."""
    stored = opened.tensors

    def f32(name: str) -> np.ndarray:
        values = stored[name].f32()
        return values if isinstance(stored[name], GgufTensor) else round_to_bf16(values)

    def linear(*modules: str) -> Linear:
        has_bias = f"{modules[0]}.bias" in stored
        return Linear(
            np.concatenate([f32(f"{module}.weight") for module in modules]),
            np.concatenate([f32(f"{module}.bias") for module in modules]) if has_bias else None,
        )

    assert isinstance(opened.architecture, Architecture)
    return assembled(opened.architecture, f32, linear)
