"""One request inside the engine: what it has produced, what has been sent, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from contract.errors import TridentError
from python_backends.cpu_engine.request import EngineRequest
from python_backends.cpu_engine.top_log_probs import TopLogProbs
from python_backends.ensemble.stream_state import StreamEvent, StreamState


class Chunk(NamedTuple):
    """What one response adds. token_ids, log_probs and top are new since the last one; ``error`` goes with ERROR.
    since_last_ns: since the stream's previous response with generated ids, 0 if there was none."""

    state: StreamState
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    top: Sequence[TopLogProbs]
    cum_log_prob: float
    num_output_tokens: int
    options: str
    since_last_ns: int
    error: TridentError | None


class Sink(Protocol):
    """Where a stream's responses go. ``refuse`` is allowed only while nothing was sent: once a detokenizer step
    may be running, a Triton error would leak the whole ensemble request (docs/decisions/0004)."""

    def send(self, chunk: Chunk, request: EngineRequest) -> None: ...

    def refuse(self, error: TridentError) -> None: ...

    def close(self) -> None:
        """Ends the answer without a word, when the last one could not be sent."""


@dataclass
class Stream:
    """Mutable; ``lock`` guards everything a sender thread reads."""

    epoch: int
    key: int
    request: EngineRequest
    sink: Sink
    lock: threading.Lock = field(default_factory=threading.Lock)
    pending_ids: list[int] = field(default_factory=list)
    pending_log_probs: list[float] = field(default_factory=list)
    pending_top: list[TopLogProbs] = field(default_factory=list)
    event: StreamEvent = StreamEvent.RUNNING
    stop_id: int = -1
    error: TridentError | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    cum_log_prob: float = 0.0
    tail: tuple[int, ...] = ()
    submitted_ns: int = 0
    started_ns: int = 0  # admitted and sent to the worker
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    last_sent_ns: int = 0
    last_sent_ids_ns: int = 0  # of the last response with generated ids
    queued: bool = False
    probe_due: bool = False
    echoed: bool = False  # the prompt's ids were sent
    answered: bool = False  # a response was handed to Triton
    closed: bool = False  # the last one was

    def add_tokens(
        self, token_ids: Sequence[int], log_probs: Sequence[float], top: Sequence[TopLogProbs], now_ns: int
    ) -> None:
        if not token_ids or self.event.last:
            return
        if not self.first_token_ns:
            self.first_token_ns = now_ns
        self.last_token_ns = now_ns
        self.num_output_tokens += len(token_ids)
        self.pending_ids += token_ids
        self.pending_log_probs += log_probs
        self.pending_top += top
        self.cum_log_prob += sum(log_probs)

    def finish(self, event: StreamEvent, stop_id: int = -1, error: TridentError | None = None) -> bool:
        """True the first time; a stream ends once, whoever comes first."""
        if self.event.last:
            return False
        self.event, self.stop_id, self.error = event, stop_id, error
        return True

    def stop_sequence_end(self, token_ids: Sequence[int]) -> int | None:
        """How many of the new ids to keep because a stop sequence ends there, or None; remembers the tail."""
        sequences = self.request.stop_sequences
        if not sequences:
            return None
        longest = max(map(len, sequences))
        seen = self.tail + tuple(token_ids)
        for end in range(len(self.tail) + 1, len(seen) + 1):
            if any(seen[max(0, end - len(sequence)) : end] == sequence for sequence in sequences):
                return end - len(self.tail)
        self.tail = seen[-longest:]
        return None

    def due(self, flush: bool) -> bool:
        """Whether a sender should come: for the first tokens and the end at once, for the rest with a flush."""
        if self.closed or self.queued:
            return False
        if self.event.last:
            return True
        if not self.request.streaming:
            return False
        return bool(self.pending_ids) and (flush or not self.last_sent_ids_ns)

    def take(self, now_ns: int) -> Chunk | None:
        """Everything pending as one chunk, or None when there is nothing to say."""
        streaming = self.request.streaming
        last = self.event.last
        token_ids, log_probs, top = [], [], []
        if last or streaming:
            token_ids, self.pending_ids = self.pending_ids, []
            log_probs, self.pending_log_probs = self.pending_log_probs, []
            top, self.pending_top = self.pending_top, []
        event = self.event
        if not last and not token_ids:
            if not self.probe_due:
                return None
            event = StreamEvent.PROBE
        first = bool(token_ids) and not self.last_sent_ids_ns
        since_last_ns = now_ns - self.last_sent_ids_ns if token_ids and not first else 0
        if token_ids:
            self.last_sent_ids_ns = now_ns
        if self.request.echo and not self.echoed and event is not StreamEvent.PROBE:
            self.echoed = True
            token_ids = self.request.input_ids.tolist() + token_ids
        self.probe_due = False
        options = "" if self.answered else self.request.stream_options
        self.last_sent_ns = now_ns
        self.answered = True
        self.closed = last
        state = StreamState(
            self.epoch,
            self.key,
            event,
            self.stop_id,
            self.request.input_ids.size,
            self.num_cached_tokens,
            self.request.arrival_ns,
            self.first_scheduled_ns,
            self.first_token_ns,
            self.last_token_ns,
            now_ns,
            int(first),
        )
        return Chunk(
            state,
            token_ids,
            log_probs,
            top,
            self.cum_log_prob,
            self.num_output_tokens,
            options,
            since_last_ns,
            self.error,
        )
