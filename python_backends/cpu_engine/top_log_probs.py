"""The k likeliest ids at each position, which OpenVINO GenAI does not return: its log_probs are of the chosen id only.

For a sequence that requests them, the same model runs a second time, outside the batch and with its own KV cache, over
the ids that the engine chose. This doubles the sequence's compute and, from the first such request on, the memory of
the weights; other sequences pay nothing. The chosen id's log probability is taken from the same pass, so that the two
agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import openvino as ov

from python_backends.ensemble.token_increment import TopLogProbs

# The pass returns logits for every position of its input; a long prompt's at once would take gigabytes.
_CHUNK_TOKENS = 128


class TopLogProbsModel:
    """Score sequences with the engine's model, compiled at the first request for top log probabilities."""

    def __init__(self, model_xml: Path, properties: Mapping[str, str]) -> None:
        """
        model_xml: the engine's OpenVINO model.
        properties: OpenVINO properties of the engine's device.
        """
        self._model_xml = model_xml
        self._properties = dict(properties)
        self._compiled: ov.CompiledModel | None = None
        self._sequences: dict[int, _Sequence] = {}

    def open(self, id: int, prompt_ids: np.ndarray, k: int) -> None:
        """Start scoring sequence ``id``: ``k`` entries per generated id."""
        if self._compiled is None:
            self._compiled = ov.Core().compile_model(self._model_xml, "CPU", self._properties)
        self._sequences[id] = _Sequence(self._compiled.create_infer_request(), prompt_ids, k)

    def score(self, id: int, token_ids: Sequence[int]) -> tuple[list[float], list[TopLogProbs]]:
        """Return the log probability of each new id and the k likeliest there; both empty for an unopened sequence."""
        sequence = self._sequences.get(id)
        return sequence.score(token_ids) if sequence and token_ids else ([], [])

    def close(self, id: int) -> None:
        """Free the sequence's KV cache; does nothing for an unopened sequence."""
        self._sequences.pop(id, None)


class _Sequence:
    def __init__(self, request: ov.InferRequest, prompt_ids: np.ndarray, k: int) -> None:
        self._request = request
        self._k = k
        self._past = 0
        self._pending = prompt_ids.astype(np.int64)  # not fed yet: the next id's distribution comes from them

    def score(self, token_ids: Sequence[int]) -> tuple[list[float], list[TopLogProbs]]:
        new_ids = np.asarray(token_ids, dtype=np.int64)
        # The distribution of an id is the output for the id before it, so the last one is fed by the next call.
        feed = np.concatenate([self._pending, new_ids[:-1]])
        self._pending = new_ids[-1:]
        chunks = [
            self._logits(feed[at : at + _CHUNK_TOKENS])[-new_ids.size :] for at in range(0, feed.size, _CHUNK_TOKENS)
        ]
        logits = np.concatenate(chunks)[-new_ids.size :]  # f32[new, vocab]
        log_probs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        top = np.argsort(-log_probs, axis=-1, kind="stable")[:, : self._k]
        chosen = log_probs[np.arange(new_ids.size), new_ids].tolist()
        return chosen, [
            TopLogProbs(best.tolist(), row[best].tolist()) for row, best in zip(log_probs, top, strict=True)
        ]

    def _logits(self, feed: np.ndarray) -> np.ndarray:
        """f32[ids, vocab] after each of these ids, which follow those fed before."""
        total = self._past + feed.size
        inputs = {
            "input_ids": feed[None],
            "attention_mask": np.ones((1, total), dtype=np.int64),
            "position_ids": np.arange(self._past, total, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        self._past = total
        return self._request.infer(inputs)["logits"][0].copy()  # the next call overwrites it
