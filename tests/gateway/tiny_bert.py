"""A random BERT sentence model of a few kilobytes, and its forward pass written a second time, in numpy."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"how what is sort list string do make open close the a in".split()]
CONFIG = {
    "model_type": "bert",
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 40,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}
_erf = np.vectorize(math.erf)


def write(
    folder: Path,
    *,
    dtype: Any = np.float32,
    prefix: str = "",
    pooling: dict[str, bool] | None = None,
    longest: int | None = None,
    words: Sequence[str] = WORDS,
    **config: Any,
) -> dict[str, np.ndarray]:
    """Fills ``folder`` and returns the tensors as they were stored, in f32."""
    asked = CONFIG | config
    hidden, inner = asked["hidden_size"], asked["intermediate_size"]
    random = np.random.default_rng(7)
    shapes = {
        "embeddings.word_embeddings.weight": (len(words), hidden),
        "embeddings.position_embeddings.weight": (asked["max_position_embeddings"], hidden),
        "embeddings.token_type_embeddings.weight": (2, hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
    }
    for layer in range(asked["num_hidden_layers"]):
        at = f"encoder.layer.{layer}"
        linear = {f"attention.self.{one}": (hidden, hidden) for one in ("query", "key", "value")}
        linear |= {"attention.output.dense": (hidden, hidden), "intermediate.dense": (inner, hidden)}
        linear |= {"output.dense": (hidden, inner)}
        for name, shape in linear.items():
            shapes |= {f"{at}.{name}.weight": shape, f"{at}.{name}.bias": shape[:1]}
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= {f"{at}.{name}.weight": (hidden,), f"{at}.{name}.bias": (hidden,)}
    tensors = {name: random.normal(0, 0.5, shape).astype(dtype) for name, shape in shapes.items()}
    save_file({prefix + name: value for name, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(asked))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if longest is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": longest}))
    tokenizer = Tokenizer(models.WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(4)  # as published folders do; it must not shorten what is compared
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(folder / "tokenizer.json"))
    return {name: value.astype(np.float32) for name, value in tensors.items()}


def forward(tensors: dict[str, np.ndarray], ids: list[int], config: dict[str, Any], *, first: bool) -> np.ndarray:
    """f64[hidden] of length 1, one sequence without padding."""
    weights = {name: value.astype(np.float64) for name, value in tensors.items()}

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        spread = np.sqrt(x.var(-1, keepdims=True) + config["layer_norm_eps"])
        return (x - x.mean(-1, keepdims=True)) / spread * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def activation(x: np.ndarray) -> np.ndarray:
        if config["hidden_act"] == "gelu":
            return x * (1 + _erf(x / math.sqrt(2))) / 2
        return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2

    x = weights["embeddings.word_embeddings.weight"][ids]
    x = x + weights["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm(x + weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for layer in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{layer}"
        query, key, value = (linear(x, f"{at}.attention.self.{one}") for one in ("query", "key", "value"))
        mixed = []
        for part in np.split(np.arange(x.shape[1]), config["num_attention_heads"]):
            scores = query[:, part] @ key[:, part].T / math.sqrt(len(part))
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(scores / scores.sum(-1, keepdims=True) @ value[:, part])
        x = norm(
            x + linear(np.concatenate(mixed, 1), f"{at}.attention.output.dense"), f"{at}.attention.output.LayerNorm"
        )
        inner = linear(activation(linear(x, f"{at}.intermediate.dense")), f"{at}.output.dense")
        x = norm(x + inner, f"{at}.output.LayerNorm")
    pooled = x[0] if first else x.mean(0)
    return pooled / np.linalg.norm(pooled)
