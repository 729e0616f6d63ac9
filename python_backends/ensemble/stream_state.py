"""How a stream stands, at the head of the tensor ``stream_state`` of a Python engine's responses (token_increment.py).

The C++ ``tensorrtllm`` backend has no such output; with it the detokenizer identifies streams by request id.
"""

from __future__ import annotations

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

    @classmethod
    def from_array(cls, array: np.ndarray) -> StreamState:
        """Read the first FIELDS values of an INT64 array of one dimension."""
        epoch, key, event, *rest = array[:FIELDS].tolist()
        return cls(epoch, key, StreamEvent(event), *rest)


FIELDS = len(StreamState._fields)
