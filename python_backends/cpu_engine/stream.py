"""One request inside the engine: what it has generated, what was sent of it, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from contract.errors import InvalidArgument, TridentError, to_text
from python_backends.cpu_engine.request import EngineRequest
from python_backends.ensemble.token_increment import StreamEvent, StreamState, TokenIncrement, TopLogProbs
from python_backends.ensemble.worker_messages import StepOutput


class Sink(Protocol):
    """Where a stream's responses go."""

    def send(self, increment: TokenIncrement, request: EngineRequest) -> None:
        """Send a response; one whose event is last ends the stream."""

    def refuse(self, error: TridentError) -> None:
        """Send a Triton error, allowed only before the first response. Later the detokenizer step may be running, and
        an error would leak the ensemble request (docs/decisions/0004)."""

    def close(self) -> None:
        """Complete the request without a response, after its last response could not be sent."""


@dataclass(slots=True)
class Stream:
    """One request's state, guarded by the engine's lock. Times are CLOCK_MONOTONIC ns, 0 if unset.

    epoch, key: see StreamState.
    pending_ids, pending_log_probs, pending_top: generated and not sent yet.
    prompt_log_probs, prompt_top: of the prompt's ids, if requested.
    replay: continued ids that the worker generates again; they are not sent.
    tail: the last generated ids that may begin a stop sequence.
    started_ns: the scheduler gave it a slot and the worker was sent the command to start it.
    last_sent_ids_ns: the last response with generated ids was sent.
    since_last_ns: between the last two responses with generated ids, 0 before the second.
    waited_ns: for how long the oldest id of the last such response had been pending.
    queued: a sender thread will take it, or is sending for it.
    due_again: more became due while it was queued.
    echoed: the prompt's ids were sent.
    responded: a response was handed to Triton.
    closed: the last response was.
    """

    epoch: int
    key: int
    request: EngineRequest
    sink: Sink
    pending_ids: list[int] = field(default_factory=list)
    pending_log_probs: list[float] = field(default_factory=list)
    pending_top: list[TopLogProbs] = field(default_factory=list)
    prompt_log_probs: list[float] = field(default_factory=list)
    prompt_top: list[TopLogProbs] = field(default_factory=list)
    event: StreamEvent = StreamEvent.RUNNING
    stop_id: int = -1
    error: TridentError | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    cum_log_prob: float = 0.0
    replay: list[int] = field(default_factory=list)
    tail: tuple[int, ...] = ()
    submitted_ns: int = 0
    started_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    last_sent_ns: int = 0
    last_sent_ids_ns: int = 0
    since_last_ns: int = 0
    waited_ns: int = 0
    queued: bool = False
    due_again: bool = False
    probe_due: bool = False
    echoed: bool = False
    responded: bool = False
    closed: bool = False
    _prompt_size: int = 0
    _pending_since_ns: int = 0

    def __post_init__(self) -> None:
        self._prompt_size = self.request.prompt_ids.size
        self.num_output_tokens = self.request.continued
        continued = self.request.continued_ids.tolist()
        if self.request.replay:
            self.replay = continued
        longest = max(map(len, self.request.stop_sequences), default=0)
        self.tail = tuple(continued[-longest:]) if longest else ()

    def without_replayed(self, output: StepOutput) -> StepOutput:
        """Return the output without the continued ids in it, which only count in the sum of log probabilities. Raises
        InvalidArgument: the worker generated other ids."""
        count = min(len(self.replay), len(output.token_ids))
        for expected, found in zip(self.replay, output.token_ids, strict=False):
            if expected != found:
                allowed = "what this engine generates, which its penalties count"
                raise InvalidArgument("continue_ids", f"must be {allowed}, got {expected} in place of {found}")
        del self.replay[:count]
        self.cum_log_prob += sum(output.log_probs[:count])
        kept = (output.token_ids[count:], output.log_probs[count:], output.event, output.top_log_probs[count:])
        return StepOutput(output.id, *kept, output.error)

    def add_prompt_log_probs(self, log_probs: list[float], top: list[TopLogProbs]) -> None:
        """Take the values of the prompt's ids, and those of continued ids, which only count in the sum."""
        if self.request.continued:
            self.cum_log_prob += sum(log_probs[len(log_probs) - self.request.continued :])
        else:
            self.prompt_log_probs, self.prompt_top = log_probs, top

    def add_tokens(
        self, token_ids: Sequence[int], log_probs: Sequence[float], top: Sequence[TopLogProbs], now_ns: int
    ) -> None:
        """Append the tokens of one step; ignored once the stream has ended."""
        if not token_ids or self.event.last:
            return
        if not self.first_token_ns:
            self.first_token_ns = now_ns
        self.last_token_ns = now_ns
        self.num_output_tokens += len(token_ids)
        if not self.pending_ids:
            self._pending_since_ns = now_ns
        self.pending_ids += token_ids
        if log_probs:
            self.pending_log_probs += log_probs
            self.pending_top += top
            self.cum_log_prob += sum(log_probs)

    def finish(self, event: StreamEvent, stop_id: int = -1, error: TridentError | None = None) -> None:
        """Set how the stream ended, unless it had ended already."""
        if not self.event.last:
            self.event, self.stop_id, self.error = event, stop_id, error

    def stop_sequence_end(self, token_ids: Sequence[int]) -> int | None:
        """Return how many of the new ids belong to the output because a stop sequence ends there, else None."""
        sequences = self.request.stop_sequences
        if not sequences:
            return None
        longest = max(map(len, sequences))
        seen = self.tail + tuple(token_ids)
        for end in range(len(self.tail) + 1, len(seen) + 1):
            last = seen[end - 1]
            if any(word[-1] == last and seen[max(0, end - len(word)) : end] == word for word in sequences):
                return end - len(self.tail)
        self.tail = seen[-longest:]
        return None

    def due(self, flush: bool) -> bool:
        """Whether to send now: the first tokens and the end immediately, other tokens with a flush."""
        if self.closed:
            return False
        if self.event.last:
            return True
        return bool(self.pending_ids) and (flush or not self.last_sent_ids_ns) and self.request.streaming

    def refusal(self) -> TridentError | None:
        """End a stream that failed before its first response and return its error, else None."""
        if self.responded or self.closed or self.error is None:
            return None
        self.closed = True
        return self.error

    def take(self, now_ns: int) -> TokenIncrement | None:
        """Take everything pending as one response, or None if there is nothing to send."""
        if self.closed:
            return None
        event, last = self.event, self.event.last
        token_ids: list[int] = []
        log_probs: list[float] = []
        top: list[TopLogProbs] = []
        if last or self.request.streaming:
            token_ids, self.pending_ids = self.pending_ids, []
            if self.pending_log_probs:
                log_probs, self.pending_log_probs = self.pending_log_probs, []
                top, self.pending_top = self.pending_top, []
        if not last and not token_ids:
            if not self.probe_due:
                return None
            event = StreamEvent.PROBE
        first = bool(token_ids) and not self.last_sent_ids_ns
        if token_ids:
            self.since_last_ns = 0 if first else now_ns - self.last_sent_ids_ns
            self.last_sent_ids_ns = now_ns
            self.waited_ns = now_ns - self._pending_since_ns
        self.probe_due = False
        self.last_sent_ns = now_ns
        self.closed = last
        options, error = "", ""
        if not self.responded:
            self.responded = True
            options = self.request.stream_options
        if self.error is not None:
            error = to_text(self.error)
        bare = not token_ids and event in (StreamEvent.PROBE, StreamEvent.ERROR)  # its client may send it again
        if self.request.echo and not self.echoed and not bare:
            self.echoed = True
            token_ids = self.request.input_ids.tolist() + token_ids
            log_probs, top = self.prompt_log_probs + log_probs, self.prompt_top + top
        state = StreamState(
            self.epoch,
            self.key,
            event,
            self.stop_id,
            self._prompt_size,
            min(self.num_cached_tokens, self._prompt_size),  # continued ids are no part of the prompt
            self.request.arrival_ns,
            self.first_scheduled_ns,
            self.first_token_ns,
            self.last_token_ns,
            now_ns,
            int(first),
        )
        return TokenIncrement(
            state, token_ids, log_probs, top, self.cum_log_prob, self.num_output_tokens, options, error
        )
