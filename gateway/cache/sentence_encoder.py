"""A BERT sentence-embedding model, a Hugging Face folder, as an OpenVINO graph: a text becomes a unit vector.

    config.json                     the encoder's shape; model_type bert
    model.safetensors               its weights, in f32, f16 or bf16
    tokenizer.json
    sentence_bert_config.json       the longest text in tokens, if it is there
    1_Pooling/config.json           mean over the tokens (the default) or the first token

The graph is built when the model is loaded, from the weights as they are; neither torch nor a conversion is needed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (safetensors reads bf16 through it)
import numpy as np
import openvino as ov
import openvino.opset13 as ops
from openvino import Node
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from contract.errors import InvalidArgument

SHORTEST_BUCKET = 16  # tokens; texts are padded to 16, 32, 64 …, because every new length costs a compilation
_ACTIVATIONS = {"gelu": "ERF", "gelu_new": "TANH", "gelu_pytorch_tanh": "TANH"}


@dataclass(frozen=True)
class Shape:
    """What config.json says of the encoder."""

    layers: int
    heads: int
    hidden: int
    epsilon: float
    activation: str
    max_tokens: int
    first_token: bool  # pooling: the first token's vector instead of the mean of all

    @classmethod
    def read(cls, folder: Path) -> Shape:
        """Raises InvalidArgument that names the file and what is allowed."""
        config = _table(folder / "config.json")
        for key, allowed in (("model_type", "bert"), ("position_embedding_type", "absolute")):
            if config.get(key, allowed) != allowed:
                raise InvalidArgument("model", f"{folder}/config.json: {key} is {config[key]!r}; allowed is {allowed}")
        act = config.get("hidden_act", "gelu")
        if act not in _ACTIVATIONS:
            allowed = ", ".join(_ACTIVATIONS)
            raise InvalidArgument("model", f"{folder}/config.json: hidden_act is {act!r}; allowed is one of {allowed}")
        pooling = _table(folder / "1_Pooling" / "config.json", optional=True)
        first, mean = pooling.get("pooling_mode_cls_token", False), pooling.get("pooling_mode_mean_tokens", True)
        if first == mean or any(on for name, on in pooling.items() if _other_pooling(name)):
            problem = "allowed is the mean of the tokens or the first token, one of them"
            raise InvalidArgument("model", f"{folder}/1_Pooling/config.json: {problem}")
        try:
            positions = config["max_position_embeddings"]
            longest = _table(folder / "sentence_bert_config.json", optional=True).get("max_seq_length", positions)
            return cls(
                layers=config["num_hidden_layers"],
                heads=config["num_attention_heads"],
                hidden=config["hidden_size"],
                epsilon=config["layer_norm_eps"],
                activation=_ACTIVATIONS[act],
                max_tokens=min(longest, positions),
                first_token=first,
            )
        except KeyError as exc:
            raise InvalidArgument("model", f"{folder}/config.json: {exc.args[0]} is missing") from exc


class SentenceEncoder:
    """A loaded model. One thread at a time may use it."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidArgument that says what the folder lacks."""
        self.shape = Shape.read(folder)
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as exc:  # the library raises nothing more exact
            raise InvalidArgument("model", f"{folder}/tokenizer.json cannot be read: {exc}") from exc
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        graph = encoder(self.shape, Weights(folder / "model.safetensors"))
        properties = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": "1", "NUM_STREAMS": "1"}
        self._request = ov.Core().compile_model(graph, "CPU", properties).create_infer_request()

    @property
    def dimensions(self) -> int:
        return self.shape.hidden

    def token_ids(self, text: str) -> list[int] | None:
        """The text in tokens, special ones included; None if the model cannot read all of it: it is longer than
        ``max_tokens``, or has characters that are unknown to it."""
        encoding = self._tokenizer.encode(text)
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        readable = len(encoding.ids) <= self.shape.max_tokens and unknown not in encoding.tokens
        return encoding.ids if readable else None

    def embed(self, token_ids: list[int]) -> np.ndarray:
        """f32[dimensions], of length 1."""
        size = min(self.shape.max_tokens, max(SHORTEST_BUCKET, 2 ** math.ceil(math.log2(len(token_ids)))))
        ids, mask = np.zeros((1, size), np.int64), np.zeros((1, size), np.int64)
        ids[0, : len(token_ids)], mask[0, : len(token_ids)] = token_ids, 1
        found = self._request.infer({"input_ids": ids, "attention_mask": mask})
        return next(iter(found.values()))[0].copy()


class Weights:
    """The tensors of a safetensors file by name, as f32 constants; a prefix such as ``bert.`` is looked past."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidArgument if there is no such file."""
        try:
            self._file = safe_open(path, "numpy")
        except (OSError, SafetensorError) as exc:
            raise InvalidArgument("model", f"{path} cannot be read: {exc}") from exc
        self._path = path
        self._full = {name.removeprefix("bert."): name for name in self._file.keys()}

    def __call__(self, name: str) -> Node:
        if name not in self._full:
            raise InvalidArgument("model", f"{self._path}: the tensor {name} is missing")
        return ops.constant(self._file.get_tensor(self._full[name]).astype(np.float32))


def encoder(shape: Shape, weights: Weights) -> ov.Model:
    """input_ids, attention_mask i64[B, L] -> f32[B, hidden], each row of length 1."""
    ids, mask = _parameter("input_ids"), _parameter("attention_mask")
    length = ops.gather(ops.shape_of(ids, "i64"), _i64(1), _i64(0))
    all_positions = weights("embeddings.position_embeddings.weight")
    positions = ops.slice(all_positions, _i64([0]), ops.unsqueeze(length, _i64(0)), _i64([1]), _i64([0]))
    words = ops.gather(weights("embeddings.word_embeddings.weight"), ids, _i64(0))  # f32[B, L, hidden]
    sentence = ops.gather(weights("embeddings.token_type_embeddings.weight"), _i64(0), _i64(0))  # f32[hidden]
    hidden = _layer_norm(ops.add(ops.add(words, positions), sentence), "embeddings.LayerNorm", shape, weights)
    present = ops.convert(mask, ov.Type.f32)  # f32[B, L]
    lowest = float(np.finfo(np.float32).min)
    bias = ops.multiply(ops.subtract(_f32(1.0), ops.unsqueeze(present, _i64([1, 2]))), _f32(lowest))  # f32[B, 1, 1, L]
    for layer in range(shape.layers):
        at = f"encoder.layer.{layer}"
        mixed = _attention(hidden, f"{at}.attention.self", bias, shape, weights)
        mixed = _linear(mixed, f"{at}.attention.output.dense", weights)
        hidden = _layer_norm(ops.add(mixed, hidden), f"{at}.attention.output.LayerNorm", shape, weights)
        inner = ops.gelu(_linear(hidden, f"{at}.intermediate.dense", weights), shape.activation)
        inner = _linear(inner, f"{at}.output.dense", weights)
        hidden = _layer_norm(ops.add(inner, hidden), f"{at}.output.LayerNorm", shape, weights)
    if shape.first_token:
        pooled = ops.gather(hidden, _i64(0), _i64(1))
    else:
        each = ops.unsqueeze(present, _i64(2))  # f32[B, L, 1]
        pooled = ops.divide(ops.reduce_sum(ops.multiply(hidden, each), _i64([1])), ops.reduce_sum(each, _i64([1])))
    return ov.Model([ops.result(ops.normalize_l2(pooled, _i64([1]), 1e-12, "max"))], [ids, mask], "sentence_encoder")


def _attention(x: Node, at: str, bias: Node, shape: Shape, weights: Weights) -> Node:
    def heads(what: str) -> Node:
        split = ops.reshape(_linear(x, f"{at}.{what}", weights), _i64([0, 0, shape.heads, -1]), True)
        return ops.transpose(split, _i64([0, 2, 1, 3]))  # f32[B, heads, L, hidden / heads]

    mixed = ops.scaled_dot_product_attention(heads("query"), heads("key"), heads("value"), bias, causal=False)
    return ops.reshape(ops.transpose(mixed, _i64([0, 2, 1, 3])), _i64([0, 0, shape.hidden]), True)


def _linear(x: Node, name: str, weights: Weights) -> Node:
    return ops.add(ops.matmul(x, weights(f"{name}.weight"), False, True), weights(f"{name}.bias"))


def _layer_norm(x: Node, name: str, shape: Shape, weights: Weights) -> Node:
    normed = ops.mvn(x, _i64([-1]), True, shape.epsilon, "inside_sqrt")
    return ops.add(ops.multiply(normed, weights(f"{name}.weight")), weights(f"{name}.bias"))


def _parameter(name: str) -> Node:
    node = ops.parameter(ov.PartialShape([-1, -1]), ov.Type.i64)
    node.output(0).get_tensor().set_names({name})
    return node


def _i64(value: int | list[int]) -> Node:
    return ops.constant(np.asarray(value, np.int64))


def _f32(value: float) -> Node:
    return ops.constant(np.asarray(value, np.float32))


def _other_pooling(name: str) -> bool:
    return name.startswith("pooling_mode_") and name not in ("pooling_mode_cls_token", "pooling_mode_mean_tokens")


def _table(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        table = json.loads(path.read_bytes())
    except (OSError, ValueError) as exc:
        raise InvalidArgument("model", f"{path} cannot be read: {exc}") from exc
    if not isinstance(table, dict):
        raise InvalidArgument("model", f"{path} is not a JSON object")
    return table
