"""Define the requests of a load: prompts, lengths, arrivals. Seeded: request n is the same in every run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.arrivals import Arrival, Arrivals, Trace
from benchmarks.lengths import Fixed, Lengths
from benchmarks.prompts import PromptSource
from contract.errors import InvalidArgument

MOST_AT_ONCE = 10_000  # requests of a closed loop, each with a task


@dataclass(frozen=True)
class PlannedRequest:
    """Hold one request, ready to be sent.

    index: its number in the workload.
    cancel_after_tokens: the client cancels after so many tokens; None reads the whole answer.
    ignore_eos: generate exactly max_tokens.
    stream: one response per step, else one for the whole answer.
    """

    index: int
    prompt: str
    max_tokens: int
    cancel_after_tokens: int | None = None
    ignore_eos: bool = True
    stream: bool = True


@dataclass(frozen=True)
class Workload:
    """Describe a load. Exactly one of concurrency and arrivals is set. Decoding is greedy.

    concurrency: requests in flight at any time (closed loop). arrivals: instants of an open loop.
    prefix_groups, prefix_tokens: prompts share one of so many prefixes of so many tokens (part of the input tokens).
    cancel_fraction: share of requests that the client cancels midway.
    ignore_eos, stream: as in PlannedRequest.
    stagger_s: seconds over which a closed loop starts its first requests, at random.
    """

    concurrency: int | None = None
    arrivals: Arrivals | None = None
    input_tokens: Lengths = field(default_factory=lambda: Fixed(128))
    output_tokens: Lengths = field(default_factory=lambda: Fixed(64))
    prefix_groups: int = 0
    prefix_tokens: int = 0
    cancel_fraction: float = 0.0
    ignore_eos: bool = True
    stream: bool = True
    stagger_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.arrivals is None):
            problem = "exactly one of concurrency (closed loop) and arrivals (open loop) must be set"
            raise InvalidArgument("concurrency", problem)
        if self.concurrency is not None and not 1 <= self.concurrency <= MOST_AT_ONCE:
            problem = f"must be a whole number from 1 to {MOST_AT_ONCE}, got {self.concurrency}"
            raise InvalidArgument("concurrency", problem)
        if not 0 <= self.cancel_fraction <= 1:
            raise InvalidArgument("cancel_fraction", f"must be between 0 and 1, got {self.cancel_fraction}")
        if (self.prefix_groups > 0) != (self.prefix_tokens > 0) or self.prefix_groups < 0:
            got = f"got {self.prefix_groups} and {self.prefix_tokens}"
            raise InvalidArgument("prefix_groups", f"must be, as prefix_tokens, above 0, or both 0; {got}")
        drawn = None if isinstance(self.arrivals, Trace) else self.input_tokens  # a trace has lengths of its own
        if isinstance(drawn, Fixed) and self.prefix_tokens >= drawn.tokens:
            allowed = f"must be fewer than input_tokens, {drawn.tokens}, which hold them"
            raise InvalidArgument("prefix_tokens", f"{allowed}; got {self.prefix_tokens}")

    def check_fits(self, max_seq_len: int) -> None:
        """Raise InvalidArgument: the fixed lengths leave no request that the engine takes."""
        if isinstance(self.arrivals, Trace):
            return
        sizes = self.input_tokens, self.output_tokens
        prompt, answer = (of.tokens if isinstance(of, Fixed) else 1 for of in sizes)
        both = f"as prompt and answer together may have {max_seq_len} (max_seq_len of the engine)"
        if prompt >= max_seq_len:
            raise InvalidArgument("input", f"must be at most {max_seq_len - 1} tokens, {both}, got {prompt}")
        if prompt + answer > max_seq_len:
            allowed = f"must be at most {max_seq_len - prompt} tokens with {prompt} of input"
            raise InvalidArgument("output", f"{allowed}, {both}, got {answer}")

    def schedule(self, duration_s: float) -> Iterator[Arrival]:
        """Yield the arrivals of an open loop."""
        assert self.arrivals is not None, "an open loop has arrivals"
        return self.arrivals.instants(random.Random(f"{self.seed} arrivals"), duration_s)

    def request(self, index: int, prompts: PromptSource, arrival: Arrival | None = None) -> PlannedRequest:
        """Make request number ``index``. It depends on seed, index and arrival only, not on earlier requests."""
        rng = random.Random(f"{self.seed} request {index}")
        input_tokens, output_tokens = self.input_tokens.draw(rng), self.output_tokens.draw(rng)
        if arrival is not None:
            input_tokens = arrival.input_tokens or input_tokens
            output_tokens = arrival.output_tokens or output_tokens
        cancels = rng.random() < self.cancel_fraction
        cancel_after = rng.randint(1, max(1, output_tokens - 1)) if cancels else None
        prefix = ""
        if self.prefix_groups:
            group = random.Random(f"{self.seed} prefix {rng.randrange(self.prefix_groups)}")
            prefix = prompts.text(group, self.prefix_tokens)
        prompt = prompts.text(rng, input_tokens, prefix)
        return PlannedRequest(index, prompt, output_tokens, cancel_after, self.ignore_eos, self.stream)

    def described(self) -> dict[str, object]:
        """Return the settings for reports."""
        loop = f"closed, concurrency {self.concurrency}" if self.concurrency else f"open, {self.arrivals}"
        named = {"input_tokens": str(self.input_tokens), "output_tokens": str(self.output_tokens), "loop": loop}
        rest = ("prefix_groups", "prefix_tokens", "cancel_fraction", "seed", "ignore_eos", "stream")
        named |= {name: getattr(self, name) for name in rest}
        return named | {"replays_trace": isinstance(self.arrivals, Trace)}
