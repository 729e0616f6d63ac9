"""A dense decoder as an OpenVINO graph, in the stateful form that continuous batching turns into paged attention.

    input_ids i64[B, L], attention_mask i64[B, S], position_ids i64[B, L], beam_idx i32[B]  ->  logits f32[B, L, V]

with S = past + L. Keys and values live in variables ``past_key_values.N.{key,value}``, f32[B, kv_heads, past,
head_dim], re-ordered by beam_idx before each use. ``ContinuousBatchingPipeline`` looks for exactly this chain:
ReadValue -> Gather(beam_idx) -> Concat(new) -> head repetition -> ScaledDotProductAttention, and for the four
input names. Written in f32; the device computes in what INFERENCE_PRECISION_HINT says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from openvino import Node, PartialShape

from build.base import rope as rotary
from build.base.architecture import Architecture

if TYPE_CHECKING:
    from build.model.lora_graph import LoraGraph

# (name of a tensor) -> f32 node holding it; weights.py decides how it is stored.
Weight = Callable[[str], Node]
# (names of matrices) -> node of their rows one after another; None for those that are not to share a product.
Stacked = Callable[[Sequence[str]], Node | None]
# (input, names of the matrices that multiply it, products of an input with them) -> products of the rounded input
Rounded = Callable[[Node, Sequence[str], Callable[[Node], list[Node]]], list[Node]]

DYNAMIC = -1


def decoder(
    arch: Architecture,
    matrix: Weight,
    vector: Weight,
    adapters: LoraGraph | None = None,
    stacked: Stacked = lambda names: None,
    rounded: Rounded | None = None,
) -> ov.Model:
    """matrix: linear layers and embeddings, [out, in]. vector: norms and biases, [n]. stacked: of query, key and value.

    rounded: of inputs in 8 bits. Nodes may share memory with the caller's arrays, which are kept until it is saved.
    """
    ids, mask, positions = parameter("input_ids"), parameter("attention_mask"), parameter("position_ids")
    beam_idx = parameter("beam_idx", ov.Type.i32, axes=1)

    cache = _KvCache(arch, _length(ids, 0), beam_idx)
    bias = _attention_bias(mask, _length(ids, 1))
    rows, assigns = ids, []
    if adapters is not None:
        head = dataclasses.replace(arch, num_kv_heads=1, head_dim=adapters.head_size)
        adapter_cache = _KvCache(head, _length(ids, 0), beam_idx)
        rows = adapters.rows(ids, _attend(adapter_cache, arch.num_layers, bias, adapters.head_size))
        assigns = adapter_cache.assigns
    layers = _Layers(arch, matrix, vector, adapters, stacked, rounded)
    hidden = layers.hidden_states(rows, positions, bias, cache)
    head_name = "model.embed_tokens.weight" if arch.tied else "lm_head.weight"
    logits = layers.products(hidden, [head_name])[0]  # f32[B, L, V]
    if adapters is not None:
        logits = adapters.logits(logits)
    logits.set_friendly_name("logits")
    result = ops.result(logits)
    logits.output(0).get_tensor().set_names({"logits"})
    return ov.Model([result], [*cache.assigns, *assigns], [ids, mask, positions, beam_idx], arch.name)


def last_hidden_states(arch: Architecture, ids: Node, mask: Node, matrix: Weight, vector: Weight) -> Node:
    """f32[B, L, hidden] after the last norm, of whole texts without a cache. ids, mask: i64[B, L], padded behind."""
    length = _length(ids, 1)
    positions = ops.unsqueeze(ops.range(i64(0), ops.squeeze(length, i64(0)), i64(1), "i64"), i64(0))
    return _Layers(arch, matrix, vector).hidden_states(ids, positions, _attention_bias(mask, length), None)


class _KvCache:
    """The variables of all layers: ``append`` returns past and new together and writes them back."""

    def __init__(self, arch: Architecture, batch: Node, beam_idx: Node) -> None:
        self._beam_idx = beam_idx
        self._shape = PartialShape([DYNAMIC, arch.num_kv_heads, DYNAMIC, arch.head_dim])
        empty = ops.concat([batch, i64([arch.num_kv_heads, 0, arch.head_dim])], 0)
        self._empty = ops.broadcast(f32(0.0), empty)
        self.assigns: list[Node] = []

    def append(self, layer: int, what: str, new: Node) -> Node:
        """new: f32[B, kv_heads, L, head_dim] -> f32[B, kv_heads, S, head_dim]."""
        variable = f"past_key_values.{layer}.{what}present.{layer}.{what}"
        past = ops.read_value(self._empty, variable, ov.Type.f32, self._shape)
        ordered = ops.gather(past, self._beam_idx, i64(0))
        both = ops.concat([ordered, new], 2)
        self.assigns.append(ops.assign(both, variable))
        return both


class _Layers:
    """The layers of a decoder, and their products with matrices."""

    def __init__(
        self,
        arch: Architecture,
        matrix: Weight,
        vector: Weight,
        adapters: LoraGraph | None = None,
        stacked: Stacked = lambda names: None,
        rounded: Rounded | None = None,
    ) -> None:
        self._arch, self._matrix, self._vector, self._adapters, self._stacked = arch, matrix, vector, adapters, stacked
        self._rounded = rounded or (lambda x, names, products: products(x))

    def hidden_states(self, rows: Node, positions: Node, bias: Node, cache: _KvCache | None) -> Node:
        """f32[B, L, hidden] after the last norm. rows: of the embedding. cache: None for a text read in one piece."""
        rotation = _rotation(self._arch, positions)
        hidden = ops.gather(self._matrix("model.embed_tokens.weight"), rows, i64(0))
        for layer in range(self._arch.num_layers):
            at = f"model.layers.{layer}"
            normed = self._rms_norm(hidden, f"{at}.input_layernorm")
            hidden = ops.add(hidden, self._attention(layer, normed, rotation, bias, cache))
            hidden = ops.add(hidden, self._mlp(at, self._rms_norm(hidden, f"{at}.post_attention_layernorm")))
        return self._rms_norm(hidden, "model.norm")

    def products(self, x: Node, weights: Sequence[str]) -> list[Node]:
        """``x``'s products with the matrices ``weights``, without biases or adapters."""
        matrices = [self._matrix(weight) for weight in weights]
        return self._rounded(x, weights, lambda x: [ops.matmul(x, matrix, False, True) for matrix in matrices])

    def _linears(self, x: Node, names: Sequence[str], bias: bool, rows: Sequence[int] = ()) -> list[Node]:
        """Products of one input. rows: of each matrix, where they may share one: 60 less in a step of 30 layers."""
        weights = [f"{name}.weight" for name in names]

        def plain() -> list[Node]:
            if rows and (stacked := self._stacked(weights)) is not None:
                together = self._rounded(x, weights, lambda x: [ops.matmul(x, stacked, False, True)])[0]
                return list(ops.variadic_split(together, i64(-1), i64(list(rows))).outputs())
            return self.products(x, weights)

        products = plain() if self._adapters is None else self._adapters.products(x, weights, plain)
        if not bias:
            return products
        return [ops.add(y, self._vector(f"{name}.bias")) for y, name in zip(products, names, strict=True)]

    def _attention(self, layer: int, x: Node, rotation: tuple[Node, Node], bias: Node, cache: _KvCache | None) -> Node:
        arch, at = self._arch, f"model.layers.{layer}.self_attn"
        rows = [count * arch.head_dim for count in (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)]
        products = self._linears(x, [f"{at}.{what}_proj" for what in "qkv"], arch.qkv_bias, rows)

        def heads(what: str, count: int) -> Node:
            """f32[B, L, count * head_dim] -> f32[B, count, L, head_dim]."""
            split = ops.reshape(products["qkv".index(what)], i64([0, 0, count, arch.head_dim]), True)
            if arch.qk_norm and what != "v":
                split = self._rms_norm(split, f"{at}.{what}_norm")
            return ops.transpose(split, i64([0, 2, 1, 3]))

        query = _rotate(heads("q", arch.num_heads), *rotation, arch.head_dim)
        key = _rotate(heads("k", arch.num_kv_heads), *rotation, arch.head_dim)
        key = cache.append(layer, "key", key) if cache else key
        value = heads("v", arch.num_kv_heads)
        value = cache.append(layer, "value", value) if cache else value
        repeated, scale = (_repeat_heads(key, arch), _repeat_heads(value, arch)), f32(arch.head_dim**-0.5)
        mixed = ops.scaled_dot_product_attention(query, *repeated, bias, scale, causal=False)
        joined = ops.reshape(ops.transpose(mixed, i64([0, 2, 1, 3])), i64([0, 0, arch.num_heads * arch.head_dim]), True)
        return self._linears(joined, [f"{at}.o_proj"], arch.output_bias)[0]

    def _mlp(self, at: str, x: Node) -> Node:
        gate, up = self._linears(x, [f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"], self._arch.mlp_bias)
        return self._linears(ops.multiply(ops.swish(gate), up), [f"{at}.mlp.down_proj"], self._arch.mlp_bias)[0]

    def _rms_norm(self, x: Node, name: str) -> Node:
        mean_square = ops.reduce_mean(ops.power(x, f32(2.0)), i64([-1]), True)
        inverse = ops.divide(f32(1.0), ops.sqrt(ops.add(mean_square, f32(self._arch.rms_norm_eps))))
        return ops.multiply(self._vector(f"{name}.weight"), ops.multiply(x, inverse))


def _attend(cache: _KvCache, layer: int, bias: Node, size: int) -> Callable[[Node, Node, Node], Node]:
    """Causal attention of one head, unscaled: query, key, value f32[B, 1, L, size] -> f32[B, L, size]."""

    def attend(query: Node, key: Node, value: Node) -> Node:
        keys, values = cache.append(layer, "key", key), cache.append(layer, "value", value)
        mixed = ops.scaled_dot_product_attention(query, keys, values, bias, f32(1.0), causal=False)
        return ops.reshape(ops.transpose(mixed, i64([0, 2, 1, 3])), i64([0, 0, size]), True)

    return attend


def _repeat_heads(x: Node, arch: Architecture) -> Node:
    """f32[B, kv_heads, S, d] -> f32[B, heads, S, d]: head h of the queries reads kv head h // repeat."""
    if (repeat := arch.num_heads // arch.num_kv_heads) == 1:
        return x
    widened = ops.broadcast(ops.unsqueeze(x, i64(2)), i64([1, 1, repeat, 1, 1]), broadcast_spec="BIDIRECTIONAL")
    return ops.reshape(widened, i64([0, arch.num_heads, -1, arch.head_dim]), True)


def _rotation(arch: Architecture, positions: Node) -> tuple[Node, Node]:
    """cos and sin, f32[B, 1, L, head_dim]; both halves of the last axis are equal."""
    frequencies, factor = rotary.inverse_frequencies(arch.rope, arch.head_dim)
    at = ops.convert(ops.unsqueeze(positions, i64(-1)), ov.Type.f32)  # f32[B, L, 1]
    angles = ops.matmul(at, ops.constant(frequencies[None, :]), False, False)  # f32[B, L, head_dim / 2]
    both = ops.unsqueeze(ops.concat([angles, angles], -1), i64(1))
    cos, sin = ops.cos(both), ops.sin(both)
    if factor != 1.0:
        cos, sin = ops.multiply(cos, f32(factor)), ops.multiply(sin, f32(factor))
    return cos, sin


def _rotate(x: Node, cos: Node, sin: Node, head_dim: int) -> Node:
    """x * cos + rotate_half(x) * sin over f32[B, heads, L, head_dim]; the plugin fuses this spelling into RoPE."""
    half, end = i64([head_dim // 2]), i64([np.iinfo(np.int64).max])
    first = ops.slice(x, i64([0]), half, i64([1]), i64([3]))
    second = ops.slice(x, half, end, i64([1]), i64([3]))
    turned = ops.concat([ops.multiply(second, f32(-1.0)), first], -1)
    return ops.add(ops.multiply(x, cos), ops.multiply(turned, sin))


def _attention_bias(mask: Node, new: Node) -> Node:
    """f32[B, 1, L, S]: 0 where query i (at S - L + i) may look at key j, the lowest f32 elsewhere."""
    total = ops.squeeze(_length(mask, 1), i64(0))  # S
    first = ops.subtract(total, ops.squeeze(new, i64(0)))  # S - L
    keys = ops.range(i64(0), total, i64(1), "i64")
    queries = ops.unsqueeze(ops.range(first, total, i64(1), "i64"), i64(1))
    causal = ops.less_equal(ops.unsqueeze(keys, i64(0)), queries)  # [L, S]
    present = ops.unsqueeze(ops.convert(mask, ov.Type.boolean), i64([1, 2]))  # [B, 1, 1, S]
    return ops.select(ops.logical_and(present, causal), f32(0.0), f32(float(np.finfo(np.float32).min)))


def parameter(name: str, dtype: ov.Type = ov.Type.i64, axes: int = 2) -> Node:
    node = ops.parameter(PartialShape([DYNAMIC] * axes), dtype)
    node.set_friendly_name(name)  # the paged-attention conversion looks inputs up by this name as well
    node.output(0).get_tensor().set_names({name})
    return node


def _length(node: Node, axis: int) -> Node:
    return ops.gather(ops.shape_of(node, "i64"), i64([axis]), i64(0))  # i64[1]


def i64(value: int | list[int]) -> Node:
    return ops.constant(np.asarray(value, dtype=np.int64))


def f32(value: float | np.ndarray) -> Node:
    return ops.constant(np.asarray(value, dtype=np.float32))
