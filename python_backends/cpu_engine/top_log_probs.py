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

# The pass returns logits for every position of its input: a long prompt's at once would take gigabytes. A sequence
# keeps the buffer of its largest pass.
CHUNK_TOKENS = 32


class TopLogProbsModel:
    """The engine's model, compiled a second time at the first request for top log probabilities."""

    def __init__(self, model_xml: Path, properties: Mapping[str, str]) -> None:
        """model_xml: the engine's OpenVINO model. properties: OpenVINO properties of the engine's device."""
        self._model_xml = model_xml
        self._properties = dict(properties)
        self._compiled: ov.CompiledModel | None = None

    def open(self, prompt_ids: np.ndarray, k: int, prompt: bool) -> ScoredSequence:
        """Return a sequence to be scored: ``k`` entries per id. prompt: score the prompt's ids too."""
        if self._compiled is None:
            self._compiled = ov.Core().compile_model(self._model_xml, "CPU", self._properties)
        return ScoredSequence(self._compiled.create_infer_request(), prompt_ids, k, prompt)


class ScoredSequence:
    """A sequence in the second model, with a KV cache of its own."""

    def __init__(self, request: ov.InferRequest, prompt_ids: np.ndarray, k: int, prompt: bool) -> None:
        self._request = request
        self._k = k
        self._of_prompt: tuple[list[float], list[TopLogProbs]] = [], []
        if prompt:
            self._of_prompt = [0.0], [TopLogProbs([-1] * k, [0.0] * k)] * (k > 0)
        self._past = 0
        self._pending = prompt_ids.astype(np.int64)  # not fed yet: the next id's distribution comes from them

    def score(self, token_ids: Sequence[int]) -> tuple[list[float], list[TopLogProbs]]:
        """Return the log probability of each new id, at least one, and the k likeliest there."""
        new_ids = np.asarray(token_ids, dtype=np.int64)
        # The distribution of an id is the output for the id before it, so the last one is fed by the next call.
        feed = np.concatenate([self._pending, new_ids[:-1]])
        self._pending = new_ids[-1:]
        return log_probs(self._logits(feed)[-new_ids.size :], new_ids, self._k)

    def read_prompt(self) -> tuple[list[float], list[TopLogProbs]] | None:
        """Read the prompt's next chunk. After the last one return the log probability of each of the prompt's ids and
        the k likeliest there, of the first 0 and ids of -1, or both empty if the prompt is not scored; else None."""
        ids = self._pending[: CHUNK_TOKENS + 1]
        self._pending = self._pending[ids.size - 1 :]
        logits = self._logits(ids[:-1]) if ids.size > 1 else None
        if logits is not None and self._of_prompt[0]:
            chosen, top = log_probs(logits, ids[1:], self._k)
            self._of_prompt[0].extend(chosen)
            self._of_prompt[1].extend(top)
        return self._of_prompt if self._pending.size == 1 else None

    def _logits(self, feed: np.ndarray) -> np.ndarray:
        """f32[ids, vocab] after each of these ids, which follow those fed before. The next call overwrites it."""
        total = self._past + feed.size
        inputs = {
            "input_ids": feed[None],
            "attention_mask": np.ones((1, total), dtype=np.int64),
            "position_ids": np.arange(self._past, total, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        self._past = total
        return self._request.infer(inputs, share_outputs=True)["logits"][0]


def log_probs(logits: np.ndarray, ids: np.ndarray, k: int) -> tuple[list[float], list[TopLogProbs]]:
    """Return the log probability of each id and the k likeliest there. logits: f32[ids, vocab], of the distributions
    that these ids were drawn from."""
    peak = logits.max(axis=-1, keepdims=True)
    # np.logaddexp.reduce would add one term after the other, in f32: an error of up to 0.006 with 50,000 terms.
    values = logits - (peak + np.log(np.exp(logits - peak).sum(axis=-1, keepdims=True)))
    chosen = values[np.arange(ids.size), ids].tolist()
    if not k:
        return chosen, []
    best = np.sort(np.argpartition(values, -k)[:, -k:])  # equal values in the order of their ids
    values = np.take_along_axis(values, best, axis=-1)
    order = np.argsort(-values, kind="stable")
    top = zip(*(np.take_along_axis(array, order, axis=-1).tolist() for array in (best, values)), strict=True)
    return chosen, [TopLogProbs(*entry) for entry in top]
