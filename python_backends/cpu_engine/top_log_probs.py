"""The likeliest ids at each position, which OpenVINO GenAI does not give: its logprobs are of the chosen id only.

For the sequences that ask, the same model is run a second time, outside the batch and with a KV cache of its own, over
the ids the engine has chosen. That doubles their compute and, once anybody has asked, the memory of the weights;
sequences that do not ask pay nothing. Both the chosen id's and the top log probabilities then come from this reading,
so that they agree with each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import openvino as ov

# Logits come for every position that is read; in pieces, a long prompt's do not take gigabytes.
_PIECE_TOKENS = 128


@dataclass(frozen=True)
class TopLogProbs:
    """One generated id: its own log probability and the k likeliest ids there with theirs, likeliest first."""

    chosen: float
    ids: list[int]
    log_probs: list[float]


class TopLogProbsModel:
    """``model_xml``: the engine's own graph. ``properties``: what the engine's device is opened with."""

    def __init__(self, model_xml: Path, properties: Mapping[str, str]) -> None:
        self._model_xml = model_xml
        self._properties = dict(properties)
        self._compiled: ov.CompiledModel | None = None
        self._sequences: dict[int, _Sequence] = {}

    def open(self, id: int, prompt_ids: np.ndarray, k: int) -> None:
        if self._compiled is None:
            import openvino as ov  # here, because an engine without OpenVINO uses TopLogProbs too

            self._compiled = ov.Core().compile_model(self._model_xml, "CPU", self._properties)
        self._sequences[id] = _Sequence(self._compiled.create_infer_request(), prompt_ids, k)

    def read(self, id: int, token_ids: Sequence[int]) -> list[TopLogProbs]:
        """One entry per id, or none for a sequence that did not ask."""
        sequence = self._sequences.get(id)
        return sequence.read(token_ids) if sequence and token_ids else []

    def close(self, id: int) -> None:
        self._sequences.pop(id, None)


class _Sequence:
    def __init__(self, request: ov.InferRequest, prompt_ids: np.ndarray, k: int) -> None:
        self._request = request
        self._k = k
        self._past = 0
        self._unread = prompt_ids.astype(np.int64)  # ids whose successors' distribution is still to be computed

    def read(self, token_ids: Sequence[int]) -> list[TopLogProbs]:
        new_ids = np.asarray(token_ids, dtype=np.int64)
        # The distribution of an id comes from reading the one before it, so the last is left for the next call.
        feed = np.concatenate([self._unread, new_ids[:-1]])
        self._unread = new_ids[-1:]
        pieces = [
            self._logits(feed[at : at + _PIECE_TOKENS])[-new_ids.size :] for at in range(0, feed.size, _PIECE_TOKENS)
        ]
        logits = np.concatenate(pieces)[-new_ids.size :]  # f32[new, vocab]
        log_probs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        top = np.argsort(-log_probs, axis=-1, kind="stable")[:, : self._k]
        return [
            TopLogProbs(float(row[chosen]), best.tolist(), row[best].tolist())
            for row, chosen, best in zip(log_probs, new_ids, top, strict=True)
        ]

    def _logits(self, feed: np.ndarray) -> np.ndarray:
        """f32[ids, vocab] behind each of these ids, which follow those fed before."""
        total = self._past + feed.size
        inputs = {
            "input_ids": feed[None],
            "attention_mask": np.ones((1, total), dtype=np.int64),
            "position_ids": np.arange(self._past, total, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        self._past = total
        return self._request.infer(inputs)["logits"][0].copy()  # the next call overwrites it
