"""An encoder as an OpenVINO graph: a batch of padded texts in, one vector or one score for each out.

    input_ids i64[B, L], attention_mask i64[B, L] (, token_type_ids i64[B, L])  ->  embedding f32[B, d] or score f32[B]

Padding stands behind a text and changes nothing: no token attends to it and no pooling reads it.
"""

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from openvino import Node

from build.base.encoder_checkpoint import BertArchitecture, EncoderCheckpoint
from build.model import graph
from build.model.graph import f32, i64, parameter
from build.model.weights import Weights
from contract.encoder import RERANK


def encoder(checkpoint: EncoderCheckpoint, weights: Weights, answers: tuple[int, int] | None = None) -> ov.Model:
    """The graph, which shares memory with ``weights`` until it is saved. answers: ids of "no" and "yes", to rerank."""
    arch, spec = checkpoint.architecture, checkpoint.encoder
    ids, mask = parameter("input_ids"), parameter("attention_mask")
    inputs = [ids, mask]
    if isinstance(arch, BertArchitecture):
        types = None
        if spec.token_types:
            types = parameter("token_type_ids")
            inputs.append(types)
        hidden = _bert(arch, ids, mask, types, weights)
    else:
        hidden = graph.last_hidden_states(arch, ids, mask, weights.matrix, weights.vector)
    pooled = _pooled(hidden, mask, spec.pooling)
    if checkpoint.kind == RERANK:
        name, result = "score", _score(checkpoint, pooled, weights, answers)
    else:
        name, result = "embedding", ops.normalize_l2(pooled, i64([1]), 1e-24, "max") if spec.normalize else pooled
    result.set_friendly_name(name)
    out = ops.result(result)
    result.output(0).get_tensor().set_names({name})
    return ov.Model([out], inputs, arch.name)


def _bert(arch: BertArchitecture, ids: Node, mask: Node, types: Node | None, weights: Weights) -> Node:
    """f32[B, L, hidden] after the last layer."""
    length = ops.squeeze(ops.gather(ops.shape_of(ids, "i64"), i64([1]), i64(0)), i64(0))
    first = arch.first_position
    positions = ops.range(i64(first), ops.add(length, i64(first)), i64(1), "i64")
    hidden = ops.gather(weights.matrix("embeddings.word_embeddings.weight"), ids, i64(0))
    at = ops.gather(weights.matrix("embeddings.position_embeddings.weight"), positions, i64(0))
    kinds = weights.matrix("embeddings.token_type_embeddings.weight")
    kind = ops.gather(kinds, i64([0]) if types is None else types, i64(0))
    hidden = _norm(arch, "embeddings.LayerNorm", ops.add(ops.add(hidden, ops.unsqueeze(at, i64(0))), kind), weights)
    present = ops.unsqueeze(ops.convert(mask, ov.Type.boolean), i64([1, 2]))  # [B, 1, 1, L]
    bias = ops.select(present, f32(0.0), f32(float(np.finfo(np.float32).min)))
    for layer in range(arch.num_layers):
        at_layer = f"encoder.layer.{layer}"
        mixed = _attention(arch, f"{at_layer}.attention.self", hidden, bias, weights)
        mixed = _linear(f"{at_layer}.attention.output.dense", mixed, weights)
        hidden = _norm(arch, f"{at_layer}.attention.output.LayerNorm", ops.add(mixed, hidden), weights)
        wide, gelu = _linear(f"{at_layer}.intermediate.dense", hidden, weights), arch.activation == "gelu"
        wide = ops.relu(wide) if arch.activation == "relu" else ops.gelu(wide, "erf" if gelu else "tanh")
        narrow = _linear(f"{at_layer}.output.dense", wide, weights)
        hidden = _norm(arch, f"{at_layer}.output.LayerNorm", ops.add(narrow, hidden), weights)
    return hidden


def _attention(arch: BertArchitecture, at: str, x: Node, bias: Node, weights: Weights) -> Node:
    size = arch.hidden_size // arch.num_heads

    def heads(what: str) -> Node:
        split = ops.reshape(_linear(f"{at}.{what}", x, weights), i64([0, 0, arch.num_heads, size]), True)
        return ops.transpose(split, i64([0, 2, 1, 3]))

    query, key, value = heads("query"), heads("key"), heads("value")
    mixed = ops.scaled_dot_product_attention(query, key, value, bias, f32(size**-0.5), causal=False)
    return ops.reshape(ops.transpose(mixed, i64([0, 2, 1, 3])), i64([0, 0, arch.hidden_size]), True)


def _pooled(hidden: Node, mask: Node, pooling: str) -> Node:
    """f32[B, L, hidden] -> f32[B, hidden]."""
    if pooling == "cls":
        return ops.gather(hidden, i64(0), i64(1))
    lengths = ops.reduce_sum(mask, i64([1]), True)  # [B, 1]
    if pooling == "last":
        last = ops.gather(hidden, ops.subtract(lengths, i64(1)), i64(1), 1)  # [B, 1, hidden]
        return ops.squeeze(last, i64([1]))
    present = ops.unsqueeze(ops.convert(mask, ov.Type.f32), i64([2]))
    total = ops.reduce_sum(ops.multiply(hidden, present), i64([1]), False)
    return ops.divide(total, ops.convert(lengths, ov.Type.f32))


def _score(checkpoint: EncoderCheckpoint, pooled: Node, weights: Weights, answers: tuple[int, int] | None) -> Node:
    """f32[B]: a classifier's logit, through the sigmoid if the model has one; or a decoder's probability of "yes"."""
    arch = checkpoint.architecture
    if isinstance(arch, BertArchitecture):
        first, second = arch.head
        logit = _linear(second, ops.tanh(_linear(first, pooled, weights)), weights)
        logit = ops.squeeze(logit, i64([1]))
        return ops.sigmoid(logit) if checkpoint.sigmoid else logit
    assert answers is not None
    head = weights.matrix("model.embed_tokens.weight" if arch.tied else "lm_head.weight")
    logits = ops.matmul(pooled, ops.gather(head, i64(list(answers)), i64(0)), False, True)  # [B, 2]
    return ops.gather(ops.softmax(logits, 1), i64(1), i64(1))


def _linear(name: str, x: Node, weights: Weights) -> Node:
    return ops.add(ops.matmul(x, weights.matrix(f"{name}.weight"), False, True), weights.vector(f"{name}.bias"))


def _norm(arch: BertArchitecture, name: str, x: Node, weights: Weights) -> Node:
    normed = ops.mvn(x, i64([-1]), True, arch.eps, "inside_sqrt")
    return ops.add(ops.multiply(normed, weights.vector(f"{name}.weight")), weights.vector(f"{name}.bias"))
