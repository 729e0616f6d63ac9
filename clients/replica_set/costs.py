"""Estimate what requests cost a replica, learned from complete responses. No clock, no I/O.

The unit is one token of decoding. A prompt token costs ``prefill_weight`` of it, which is a property of engine,
model, batch and load: about 0.01 to 0.1 on a GPU, near 1 on a small CPU. It is measured, never assumed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import NamedTuple

from contract.generation import GenerationRequest

# How many of the latest observations an average is made of. Times change with the load; lengths vary more, so
# that a mean of few of them would only add noise to the bookings.
_TIMES, _LENGTHS, _PACES = 32, 512, 128
# Beyond these a measurement is an accident, and a reservation made with it would mislead the picks.
_LEAST_WEIGHT, _MOST_WEIGHT = 0.0001, 1000.0


class Observation(NamedTuple):
    """One answered request.

    prefill_s: from being scheduled to the first token. decode_s: from the first token to the last.
    uncached_tokens: prompt tokens that had to be computed. running: requests under way at its replica meanwhile,
    itself included. Tokens are those of this request.
    """

    prefill_s: float
    uncached_tokens: int
    decode_s: float
    output_tokens: int
    running: float

    @property
    def step_s(self) -> float:
        """Seconds from one token to the next; 0 if unknown."""
        return self.decode_s / (self.output_tokens - 1) if self.output_tokens > 1 and self.decode_s > 0 else 0.0


class Cost(NamedTuple):
    """Work in tokens of decoding: the prompt's, which is done at the first token, and the answer's."""

    prefill: float
    decode: float

    @property
    def total(self) -> float:
        return self.prefill + self.decode


class Costs:
    """The running averages of one client over all its replicas."""

    def __init__(self, unmeasured_weight: float = 0.1) -> None:
        self._unmeasured_weight = unmeasured_weight
        self._prefill = _Line(_TIMES)
        self._decode_shares_s: deque[float] = deque(maxlen=_TIMES)
        self._output_tokens = _Mean(_LENGTHS)
        self._bytes_per_token = _Mean(_LENGTHS, 4.0)

    @property
    def prefill_weight(self) -> float:
        """Work of a prompt token in tokens of decoding; 0.1, or what was given, until both were observed."""
        if not (self._prefill.x.value and self._decode_shares_s):
            return self._unmeasured_weight
        # The plain ratio while the prompts differ too little to tell.
        token_s = self._prefill.slope if self._prefill.slope > 0 else self._prefill.y.value / self._prefill.x.value
        # The quicker quarter: those that no other prompt held up, which is prefill's cost and not decoding's.
        quick_s = sorted(self._decode_shares_s)[len(self._decode_shares_s) // 4]
        return min(max(token_s / quick_s, _LEAST_WEIGHT), _MOST_WEIGHT)

    def estimate(self, prompt_bytes: int, max_tokens: int) -> Cost:
        """Estimate from its size; an answer counts with the mean length, as its slot is taken until its end."""
        expected = min(max_tokens, self._output_tokens.value or max_tokens)
        return Cost(prompt_bytes / self._bytes_per_token.value * self.prefill_weight, expected)

    def observe(self, seen: Observation) -> None:
        """Learn what a token takes. A step decodes one token for each running request, so a token's share of it
        is the pace divided by ``running``; prefill has the engine to itself."""
        if seen.uncached_tokens > 0 and seen.prefill_s > 0:
            self._prefill.observe(seen.uncached_tokens, seen.prefill_s)
        if seen.step_s:
            self._decode_shares_s.append(max(seen.step_s / max(1.0, seen.running), 1e-9))
        self._output_tokens.observe(seen.output_tokens)

    def observe_size(self, prompt_bytes: int, input_tokens: int) -> None:
        """Learn how many bytes a token has."""
        if input_tokens > 0 and prompt_bytes > 0:
            self._bytes_per_token.observe(prompt_bytes / input_tokens)


class Pace:
    """How fast one replica decodes, learned from its responses.

    A step decodes one token of every running request and takes a fixed time and a part for each of them: a straight
    line, so that what was seen under light load says what a full replica would do.
    """

    LEAST_SEEN = 16  # responses; fewer say too little

    def __init__(self) -> None:
        self._steps = _Line(_PACES)  # seconds over running requests

    def observe(self, seen: Observation) -> None:
        """Learn from a response of two tokens or more."""
        if seen.step_s:
            self._steps.observe(max(1.0, seen.running), seen.step_s)

    def tokens_per_s(self, slots: int) -> float:
        """The rate with all slots taken; 0 where slots or pace are unknown."""
        if slots <= 0 or self._steps.x.count < self.LEAST_SEEN:
            return 0.0
        running, step_s = self._steps.x.value, self._steps.y.value
        slope = min(max(0.0, self._steps.slope), step_s / running)  # neither part of a step takes less than no time
        return slots / (step_s + slope * (slots - running))


@dataclass
class _Mean:
    """The mean of about the last ``memory`` values; of all of them as long as they are fewer."""

    memory: int
    value: float = 0.0
    count: int = 0

    def observe(self, value: float) -> None:
        self.count = min(self.count + 1, self.memory)
        self.value += (value - self.value) / self.count


class _Line:
    """The line of y over x, by least squares over the recent past.

    A slope, not a ratio: the time to the first token has a part that no prompt token is to blame for, the current step
    and the first decoding, and with short prompts that part is nearly all of it.
    """

    def __init__(self, memory: int) -> None:
        self.x, self.y, self._squares, self._products = (_Mean(memory) for _ in range(4))

    def observe(self, x: float, y: float) -> None:
        for mean, value in ((self.x, x), (self.y, y), (self._squares, x * x), (self._products, x * y)):
            mean.observe(value)

    @property
    def slope(self) -> float:
        """0 while the values of x differ too little to tell."""
        x = self.x.value
        variance = self._squares.value - x * x
        return (self._products.value - x * self.y.value) / variance if variance > (0.2 * x) ** 2 else 0.0


def prompt_bytes(request: GenerationRequest) -> int:
    """The size of a request's prompt in UTF-8, chat roles aside; a token id counts as 4 bytes."""
    if request.input_ids is not None:
        return 4 * len(request.input_ids)
    if request.text_input is not None:
        return len(request.text_input.encode())
    turns = sum(
        len(str(part).encode(errors="replace"))
        for message in request.messages or ()
        for part in (message.get("content"), message.get("tool_calls"))
        if part
    )
    return turns + len((request.tools or "").encode())


def prefix(request: GenerationRequest, size: int = 1024, whole: bool = False) -> str:
    """The beginning of the prompt that later requests may share: its first ``size`` characters.

    Of a chat, its tools and the messages up to the first of the user, which every later turn repeats, or all if
    ``whole``. Prompts of different LoRA adapters share nothing.
    """
    if request.adapter:
        return f"{request.adapter}\0{prefix(replace(request, adapter=''), size, whole)}"
    if request.text_input is not None:
        return request.text_input[:size]
    if request.input_ids is not None:
        return " ".join(map(str, request.input_ids[: size // 4]))
    shared = [request.tools] if request.tools else []
    for message in request.messages or ():
        shared.append(f"{message.get('role')}\0{message.get('content')}")
        if message.get("role") == "user" and not whole:
            break
    return "\0".join(shared)[:size]
