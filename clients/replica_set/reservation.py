"""Account for the work that running requests mean for a replica: reserved when they are sent, released when done."""

from __future__ import annotations

import asyncio
import time

from clients.replica_set import costs
from clients.replica_set.costs import Costs, Observation, Pace
from clients.wire.response_reader import ResponseReader
from contract.generation import GenerationRequest, Usage

LEAST_DECODE_S = 0.01  # tokens that come closer together were sent together


class Work:
    """A replica's requests, their pending tokens of decoding, its pace, and ``idle``, set while there are none."""

    def __init__(self) -> None:
        self.outstanding = 0
        self.pending_tokens = 0.0
        self.pace = Pace()
        self.idle = asyncio.Event()
        self.idle.set()

    def reserve(self, tokens: float) -> None:
        """Add one request of so much work."""
        self.outstanding += 1
        self.pending_tokens += tokens
        self.idle.clear()

    def subtract(self, tokens: float) -> None:
        """Subtract work that is done."""
        self.pending_tokens = max(0.0, self.pending_tokens - tokens)

    def release(self) -> None:
        """Remove one request, whose work has been subtracted."""
        self.outstanding -= 1
        if not self.outstanding:
            self.pending_tokens = 0.0  # drop rounding errors
            self.idle.set()


class Reservation:
    """One request's part of a replica's work, from when it is sent."""

    def __init__(self, work: Work, known: Costs, request: GenerationRequest) -> None:
        self._work, self._costs = work, known
        self._prompt_bytes = costs.prompt_bytes(request)
        self._cost = known.estimate(self._prompt_bytes, request.max_tokens)
        self._left_tokens = self._cost.total
        work.reserve(self._left_tokens)
        self._running_at_start = work.outstanding
        self._running = self._began_s = 0.0

    def began(self) -> None:
        """Subtract the prompt's work: the first token is here."""
        self._began_s = time.monotonic()
        self._work.subtract(self._cost.prefill)
        self._left_tokens -= self._cost.prefill

    def release(self) -> None:
        """Subtract the rest: the request has ended."""
        self._running = (self._running_at_start + self._work.outstanding) / 2
        self._work.subtract(self._left_tokens)
        self._work.release()

    def learn_seen(self, usage: Usage, decode_s: float) -> None:
        """Learn from a complete response without instants. decode_s: from its first token to its last, as seen here."""
        self._learn(usage, 0.0, 0, decode_s if decode_s > LEAST_DECODE_S else 0.0)

    def learn(self, response: ResponseReader) -> None:
        """Learn from a complete response what its request did cost."""
        last = response.last
        if last is None or last.usage is None:
            return
        usage, timings = last.usage, last.timings
        if timings is None:
            return self.learn_seen(usage, time.monotonic() - self._began_s if self._began_s else 0.0)
        prefill_s = (timings.first_token_ns - timings.first_scheduled_ns) / 1e9
        decode_s = (timings.last_token_ns - timings.first_token_ns) / 1e9
        self._learn(usage, prefill_s, usage.input_tokens - usage.cached_tokens, decode_s)

    def _learn(self, usage: Usage, prefill_s: float, uncached_tokens: int, decode_s: float) -> None:
        self._costs.observe_size(self._prompt_bytes, usage.input_tokens)
        seen = Observation(prefill_s, uncached_tokens, decode_s, usage.output_tokens, self._running)
        self._costs.observe(seen)
        self._work.pace.observe(seen)
