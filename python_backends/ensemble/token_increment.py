"""What one response of an engine adds to a stream: the same type at the engine's and at the detokenizer's end.

A Python engine sends all of it as one tensor, ``stream_state``, because a response costs more with every tensor that it
has and with every output that the ensemble's step names, sent or not (benchmarks/LOG.md).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from python_backends.ensemble.stream_state import FIELDS, StreamState


class TopLogProbs(NamedTuple):
    """The likeliest ids at one position, likeliest first.

    ids: k token ids.
    log_probs: k natural log probabilities, of those ids.
    """

    ids: Sequence[int]
    log_probs: Sequence[float]


class TokenIncrement(NamedTuple):
    """One response of an engine.

    state: the stream it belongs to, and how that stands after this response.
    token_ids: ids since the stream's previous response; an echoed prompt's come first.
    log_probs: one per generated id of ``token_ids``, or empty if not requested.
    top_log_probs: one entry per generated id, or empty if not requested.
    cum_log_prob: sum over all ids generated so far; 0 if the engine does not send it.
    num_output_tokens: ids generated so far; 0 if the engine does not send it.
    options: StreamOptions as JSON, in a stream's first response only.
    error: ``errors.to_text`` of the failure, with the event ERROR only.
    """

    state: StreamState
    token_ids: Sequence[int]
    log_probs: Sequence[float] = ()
    top_log_probs: Sequence[TopLogProbs] = ()
    cum_log_prob: float = 0.0
    num_output_tokens: int = 0
    options: str = ""
    error: str = ""

    def to_array(self) -> np.ndarray:
        """Return INT64[1, n]: the state, the number of ids, the ids; then JSON of the rest, if it says anything."""
        values = np.array([*self.state, len(self.token_ids), *self.token_ids], dtype=np.int64)
        if self.log_probs or self.options or self.error:
            rest = self.log_probs, self.top_log_probs, self.cum_log_prob, self.num_output_tokens
            text = json.dumps((*rest, self.options, self.error)).encode()
            values = np.append(values, np.frombuffer(text + b" " * (-len(text) % 8), dtype=np.int64))
        return values[None]

    @classmethod
    def from_array(cls, array: np.ndarray) -> TokenIncrement:
        """Read what ``to_array`` made."""
        values = array.reshape(-1)
        state, end = StreamState.from_array(values[:FIELDS]), FIELDS + 1 + int(values[FIELDS])
        token_ids = values[FIELDS + 1 : end].tolist()
        if end == values.size:
            return cls(state, token_ids)
        log_probs, top, *others = json.loads(values[end:].tobytes())
        return cls(state, token_ids, log_probs, [TopLogProbs(*entry) for entry in top], *others)
