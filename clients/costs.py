"""What requests cost a replica, learned from those that were answered. No clock, no I/O.

The unit is one token of decoding. A prompt token costs ``prefill_weight`` of it, which is a property of engine,
model and batch: about 0.01 on a large GPU, near 1 on a small CPU. It is measured, never assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

from contract.generation import GenerationRequest

# Each new observation moves an average by this much; about the last twenty count.
_STEP = 0.1


@dataclass(frozen=True)
class Observation:
    """One answered request.

    prefill_s: from being scheduled to the first token. decode_s: from the first token to the last.
    uncached_tokens: prompt tokens that had to be computed. running: requests under way at its replica meanwhile,
    itself included. Tokens are those of this request.
    """

    prefill_s: float
    uncached_tokens: int
    decode_s: float
    output_tokens: int
    running: int


@dataclass
class Costs:
    """The running averages of one client over all its replicas."""

    prefill_s_per_token: float = 0.0
    decode_s_per_token: float = 0.0
    bytes_per_token: float = 4.0
    used_share: float = 1.0  # of max_tokens
    unmeasured_weight: float = 0.1

    @property
    def prefill_weight(self) -> float:
        """Work of a prompt token in tokens of decoding; ``unmeasured_weight`` until both sides were observed."""
        if not (self.prefill_s_per_token and self.decode_s_per_token):
            return self.unmeasured_weight
        return self.prefill_s_per_token / self.decode_s_per_token

    def estimate(self, prompt_bytes: int, max_tokens: int) -> float:
        """What a request will cost, before anything about it is known but its size."""
        return prompt_bytes / self.bytes_per_token * self.prefill_weight + max_tokens * self.used_share

    def observe(self, seen: Observation) -> None:
        """Learns the weight. A step decodes one token for each running request, so a token's share of it is
        the pace divided by ``running``; prefill has the engine to itself."""
        if seen.uncached_tokens > 0 and seen.prefill_s > 0:
            self.prefill_s_per_token = _moved(self.prefill_s_per_token, seen.prefill_s / seen.uncached_tokens)
        if seen.output_tokens > 1 and seen.decode_s > 0:
            pace_s = seen.decode_s / (seen.output_tokens - 1)
            self.decode_s_per_token = _moved(self.decode_s_per_token, pace_s / max(1, seen.running))

    def observe_sizes(self, prompt_bytes: int, input_tokens: int, max_tokens: int, output_tokens: int) -> None:
        """Learns how many bytes a token has here, and how much of max_tokens is used."""
        if input_tokens > 0:
            self.bytes_per_token = max(0.25, _moved(self.bytes_per_token, prompt_bytes / input_tokens))
        self.used_share = _moved(self.used_share, min(1.0, output_tokens / max_tokens))


@dataclass
class Pace:
    """What one replica decodes in all, in tokens per second. 0 until it was seen decoding."""

    tokens_per_s: float = 0.0
    running: float = 0.0

    def observe(self, seen: Observation) -> None:
        """Only what was seen at a comparable load may lower it: a replica is not slow for having little to do."""
        if seen.output_tokens < 2 or seen.decode_s <= 0:
            return
        total = (seen.output_tokens - 1) / seen.decode_s * seen.running
        if total > self.tokens_per_s or seen.running >= self.running / 2:
            self.tokens_per_s = _moved(self.tokens_per_s, total)
            self.running = _moved(self.running, seen.running)


def prompt_bytes(asked: GenerationRequest) -> int:
    """The size of a request's prompt in UTF-8, chat roles aside."""
    if asked.text_input is not None:
        return len(asked.text_input.encode())
    return sum(len(str(message.get("content", "")).encode()) for message in asked.messages or ())


def prefix(asked: GenerationRequest, size: int = 1024) -> str:
    """The beginning of the prompt that later requests may share: its first ``size`` characters.

    Of a chat, the messages up to the first of the user, which every later turn repeats.
    """
    if asked.text_input is not None:
        return asked.text_input[:size]
    shared = []
    for message in asked.messages or ():
        shared.append(f"{message.get('role')}\0{message.get('content')}")
        if message.get("role") == "user":
            break
    return "\0".join(shared)[:size]


def _moved(average: float, value: float) -> float:
    return value if not average else average + _STEP * (value - average)
