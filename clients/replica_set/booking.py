"""The work that requests under way mean for a replica: booked when they are sent, settled as it is done, and what
their answers teach about the cost of the next ones."""

from __future__ import annotations

import asyncio

from clients.replica_set import costs
from clients.replica_set.costs import Costs, Observation, Pace
from clients.wire.answer import Answer
from contract.generation import GenerationRequest


class Work:
    """What one replica has under way, and its pace. outstanding: requests. pending_tokens: in tokens of decoding. idle:
    set while there is nothing."""

    def __init__(self) -> None:
        self.outstanding = 0
        self.pending_tokens = 0.0
        self.pace = Pace()
        self.idle = asyncio.Event()
        self.idle.set()

    def book(self, tokens: float) -> None:
        self.outstanding += 1
        self.pending_tokens += tokens
        self.idle.clear()

    def settle(self, tokens: float) -> None:
        """So much of what was booked is done."""
        self.pending_tokens = max(0.0, self.pending_tokens - tokens)

    def release(self) -> None:
        """One request is over, and settled."""
        self.outstanding -= 1
        if not self.outstanding:
            self.pending_tokens = 0.0  # no rounding errors are kept
            self.idle.set()


class Booking:
    """One request's part of a replica's work, from when it is sent."""

    def __init__(self, work: Work, known: Costs, asked: GenerationRequest) -> None:
        self._work, self._costs = work, known
        self._prompt_bytes = costs.prompt_bytes(asked)
        self._cost = known.estimate(self._prompt_bytes, asked.max_tokens)
        self._unsettled = self._cost.total
        work.book(self._unsettled)
        self._running_at_start = work.outstanding
        self._running = 0.0

    def began(self) -> None:
        """Its prompt is done."""
        self._work.settle(self._cost.prefill)
        self._unsettled -= self._cost.prefill

    def release(self) -> None:
        """It is over, whichever way."""
        self._running = (self._running_at_start + self._work.outstanding) / 2
        self._work.settle(self._unsettled)
        self._work.release()

    def learn(self, answer: Answer) -> None:
        """What it really cost, once it is over and went well."""
        last = answer.last
        if last is None or last.usage is None:
            return
        usage, timings = last.usage, last.timings
        self._costs.observe_size(self._prompt_bytes, usage.input_tokens)
        if timings is None:
            return  # seen from here, queueing and prefill cannot be told apart
        prefill_s = (timings.first_token_ns - timings.first_scheduled_ns) / 1e9
        decode_s = (timings.last_token_ns - timings.first_token_ns) / 1e9
        uncached = usage.input_tokens - usage.cached_tokens
        seen = Observation(prefill_s, uncached, decode_s, usage.output_tokens, self._running)
        self._costs.observe(seen)
        self._work.pace.observe(seen)
