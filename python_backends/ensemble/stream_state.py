"""What a Python engine tells the detokenizer in band, beside the ids: ``stream_state`` INT64[1, FIELDS].

The C++ ``tensorrtllm`` backend cannot say any of it; there the detokenizer keys its state by request id.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np


class StreamEvent(IntEnum):
    """PROBE asks whether the client is still there and carries no ids; the rest say how the stream stands."""

    RUNNING = 0
    PROBE = 1
    STOP = 2  # an end or stop id was generated, or a stop request came
    LENGTH = 3
    CANCELLED = 4
    ERROR = 5

    @property
    def last(self) -> bool:
        return self >= StreamEvent.STOP


class StreamState(NamedTuple):
    """epoch: start of this engine process's life in ns; key: the stream's number within it. Together they name
    a stream for ever, whatever request ids clients send. stop_id: the id that ended it, or -1. Times are
    CLOCK_MONOTONIC nanoseconds, 0 while unknown; sent_ns is when this response left the engine;
    first is 1 when it holds the stream's first generated id."""

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

    def to_array(self) -> np.ndarray:
        return np.array([self], dtype=np.int64)

    @classmethod
    def from_array(cls, array: np.ndarray) -> StreamState:
        epoch, key, event, *rest = array.reshape(-1).tolist()
        return cls(epoch, key, StreamEvent(event), *rest)
