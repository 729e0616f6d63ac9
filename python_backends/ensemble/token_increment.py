"""What one response of an engine adds to a stream, and how that then stands: the same types at the engine's and at the
detokenizer's end.

A Python engine sends all of it as one tensor, ``stream_state``, because a response costs more with every tensor that it
has and with every output that the ensemble's step names, sent or not (benchmarks/LOG.md). The C++ ``tensorrtllm``
backend has no such output; with it the detokenizer identifies streams by request id.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np


class StreamEvent(IntEnum):
    """The state of a stream; PROBE is a response without ids, sent to learn whether the client has disconnected."""

    RUNNING = 0
    PROBE = 1
    STOP = 2  # an end or stop id was generated, or a stop request came
    LENGTH = 3
    CANCELLED = 4
    ERROR = 5

    def __init__(self, value: int) -> None:
        """last: whether the stream has ended. Not a property: it is read several times for each token."""
        self.last = value >= 2  # from STOP on


class StreamState(NamedTuple):
    """One response's stream and its state. Times are CLOCK_MONOTONIC nanoseconds, 0 while unknown.

    epoch: when the engine model was loaded, ns.
    key: the stream's number since then; epoch and key identify a stream, whatever request ids clients send.
    stop_id: the id that ended the stream, or -1.
    sent_ns: this response left the engine.
    first: 1 if it holds the stream's first generated id, else 0.
    """

    epoch: int
    key: int
    event: StreamEvent
    stop_id: int = -1
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    arrival_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    sent_ns: int = 0
    first: int = 0


_FIELDS = len(StreamState._fields)
# The instants of it that TensorRT-LLM's engines return too, and their tensors.
INSTANTS = {f"{name}_ns": f"{name}_time_ns" for name in ("arrival", "first_scheduled", "first_token", "last_token")}


class TopLogProbs(NamedTuple):
    """The likeliest k ids at one position, likeliest first, and their natural log probabilities."""

    ids: Sequence[int]
    log_probs: Sequence[float]


class TokenIncrement(NamedTuple):
    """One response of an engine.

    state: the stream it belongs to, and how that stands after this response.
    token_ids: ids since the stream's previous response; an echoed prompt's come first.
    log_probs, top_log_probs: one per generated id of ``token_ids``, or empty if not requested.
    cum_log_prob, num_output_tokens: of all ids generated so far; 0 if the engine does not send it.
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
        epoch, key, event, *others, count = values[: _FIELDS + 1].tolist()
        state, end = StreamState(epoch, key, StreamEvent(event), *others), _FIELDS + 1 + count
        token_ids = values[_FIELDS + 1 : end].tolist()
        if end == values.size:
            return cls(state, token_ids)
        log_probs, top, *rest = json.loads(values[end:].tobytes())
        return cls(state, token_ids, log_probs, [TopLogProbs(*entry) for entry in top], *rest)
