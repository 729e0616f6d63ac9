"""Log probabilities that OpenVINO GenAI does not return: of the k likeliest ids at each position (its own are of the
chosen id only), and of the prompt's ids (it has none for those that it found in its prefix cache).

For a sequence that requests them, the same model runs a second time, outside the batch and with its own KV cache, over
the prompt and the ids that the engine chose. This doubles the sequence's compute and, from the first such
request on, the memory of the weights; other sequences pay nothing. The chosen id's log probability is taken from the
same pass, so that the two agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import openvino as ov

from python_backends.ensemble.token_increment import TopLogProbs

# The pass returns logits for every position of its input; a long prompt's at once would take gigabytes.
CHUNK_TOKENS = 128


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
        """Start scoring sequence ``id``: ``k`` entries per id."""
        if self._compiled is None:
            self._compiled = ov.Core().compile_model(self._model_xml, "CPU", self._properties)
        self._sequences[id] = _Sequence(self._compiled.create_infer_request(), prompt_ids, k)

    def score_prompt(self, id: int) -> tuple[list[float], list[TopLogProbs]]:
        """Return the log probability of each id in the prompt's next chunk and the k likeliest there; both empty after
        the last one. The prompt's first id has none. Call it to the end before ``score``, or not at all."""
        return self._sequences[id].score_prompt()

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
            self._logits(feed[at : at + CHUNK_TOKENS])[-new_ids.size :] for at in range(0, feed.size, CHUNK_TOKENS)
        ]
        return self._log_probs(np.concatenate(chunks)[-new_ids.size :], new_ids)

    def score_prompt(self) -> tuple[list[float], list[TopLogProbs]]:
        ids = self._pending[: CHUNK_TOKENS + 1]
        if ids.size < 2:
            return [], []
        self._pending = self._pending[ids.size - 1 :]
        return self._log_probs(self._logits(ids[:-1]), ids[1:])

    def _log_probs(self, logits: np.ndarray, ids: np.ndarray) -> tuple[list[float], list[TopLogProbs]]:
        """logits: f32[ids, vocab], of the distributions that these ids were drawn from."""
        log_probs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        chosen = log_probs[np.arange(ids.size), ids].tolist()
        if not self._k:
            return chosen, []
        best = np.sort(np.argpartition(-log_probs, self._k - 1)[:, : self._k])  # equal values in the order of their ids
        values = np.take_along_axis(log_probs, best, axis=-1)
        order = np.argsort(-values, kind="stable")
        top = zip(*(np.take_along_axis(array, order, axis=-1).tolist() for array in (best, values)), strict=True)
        return chosen, [TopLogProbs(*entry) for entry in top]

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
