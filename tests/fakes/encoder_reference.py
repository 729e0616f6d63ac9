"""Encoders computed in f32 numpy, one text at a time: what a built engine is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from build.base.encoder_checkpoint import BertArchitecture, EncoderCheckpoint
from build.model import decoder
from contract.encoder import RERANK


class Reference:
    """``vector`` of one text after another. answers: ids of "no" and "yes", of a decoder that reranks."""

    def __init__(self, checkpoint: EncoderCheckpoint, answers: tuple[int, int] | None = None) -> None:
        self._checkpoint, self._answers = checkpoint, answers
        arch = checkpoint.architecture
        self._decoder = None
        if isinstance(arch, BertArchitecture):
            self._weights = {name: tensor.f32() for name, tensor in checkpoint.tensors.items()}
        else:
            self._decoder = decoder.from_checkpoint(checkpoint)

    def vector(self, ids: Sequence[int], types: Sequence[int]) -> np.ndarray:
        """f32[d], the embedding of a text, or f32[1], the score of a pair. ids, types: of its tokens."""
        arch, spec = self._checkpoint.architecture, self._checkpoint.encoder
        if self._decoder is not None:
            states = self._decoder.embed(np.asarray([ids]))
            for make_layer in self._decoder.layers:
                self._decoder.advance(states, make_layer())
            hidden = decoder.rms_norm(states[0], self._decoder.final_norm, self._decoder.architecture.rms_norm_eps)
        else:
            assert isinstance(arch, BertArchitecture)
            hidden = self._bert(arch, np.asarray(ids), np.asarray(types))
        pooled = {"mean": hidden.mean(axis=0), "cls": hidden[0], "last": hidden[-1]}[spec.pooling]
        if self._checkpoint.kind == RERANK:
            return self._score(pooled)
        return pooled / max(float(np.linalg.norm(pooled)), 1e-12) if spec.normalize else pooled

    def _bert(self, arch: BertArchitecture, ids: np.ndarray, types: np.ndarray) -> np.ndarray:
        """f32[t, hidden] after the last layer."""
        weights, places = self._weights, arch.first_position + np.arange(len(ids))
        hidden = weights["embeddings.word_embeddings.weight"][ids]
        hidden = hidden + weights["embeddings.position_embeddings.weight"][places]
        hidden = hidden + weights["embeddings.token_type_embeddings.weight"][types]
        hidden = self._norm(arch, "embeddings.LayerNorm", hidden)
        for layer in range(arch.num_layers):
            at = f"encoder.layer.{layer}"
            heads = [self._heads(arch, f"{at}.attention.self.{what}", hidden) for what in ("query", "key", "value")]
            scores = heads[0] @ heads[1].transpose(0, 2, 1) / np.float32(np.sqrt(heads[0].shape[-1]))
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            mixed = (shares @ heads[2]).transpose(1, 0, 2).reshape(len(ids), -1)
            hidden = hidden + self._linear(f"{at}.attention.output.dense", mixed)
            hidden = self._norm(arch, f"{at}.attention.output.LayerNorm", hidden)
            wide = _activated(arch.activation, self._linear(f"{at}.intermediate.dense", hidden))
            hidden = self._norm(arch, f"{at}.output.LayerNorm", hidden + self._linear(f"{at}.output.dense", wide))
        return hidden

    def _heads(self, arch: BertArchitecture, name: str, x: np.ndarray) -> np.ndarray:
        """f32[heads, t, d]."""
        return self._linear(name, x).reshape(len(x), arch.num_heads, -1).transpose(1, 0, 2)

    def _score(self, pooled: np.ndarray) -> np.ndarray:
        if self._decoder is not None:
            assert self._answers is not None
            no, yes = self._decoder.head.weight[list(self._answers)] @ pooled
            return np.asarray([1 / (1 + np.exp(no - yes))], np.float32)
        arch = self._checkpoint.architecture
        assert isinstance(arch, BertArchitecture)
        first, second = arch.head
        logit = self._linear(second, np.tanh(self._linear(first, pooled)))
        return 1 / (1 + np.exp(-logit)) if self._checkpoint.sigmoid else logit

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]

    def _norm(self, arch: BertArchitecture, name: str, x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + np.float32(arch.eps))
        return scaled * self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]


def _activated(name: str, x: np.ndarray) -> np.ndarray:
    if name == "relu":
        return np.maximum(x, 0)
    if name == "gelu":
        return x * (1 + _erf(x / np.float32(np.sqrt(2)))) / 2
    return x * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3))) / 2


def _erf(x: np.ndarray) -> np.ndarray:
    """The error function within 1.5e-7: Abramowitz and Stegun, 7.1.26."""
    t = 1 / (1 + 0.3275911 * np.abs(x.astype(np.float64)))
    factors = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
    series = np.zeros_like(t)
    for factor in factors:
        series = (series + factor) * t
    return (np.sign(x) * (1 - series * np.exp(-np.square(x, dtype=np.float64)))).astype(np.float32)
