"""What is asked of a server: which requests, when, how long. Seeded: request n is the same in every run."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from benchmarks.arrivals import Arrival, Arrivals
from benchmarks.lengths import Fixed, Lengths
from benchmarks.prompts import Prompts
from contract.errors import InvalidArgument


@dataclass(frozen=True)
class PlannedRequest:
    """at_s: seconds after the start at which it is to be sent, None in a closed loop (as soon as there is room).

    leave_after_tokens: the caller goes away after so many tokens; None stays.
    """

    index: int
    at_s: float | None
    prompt: str
    max_tokens: int
    tenant: str
    leave_after_tokens: int | None = None


@dataclass(frozen=True)
class Workload:
    """Exactly one of concurrency (closed loop: so many requests are always under way) and arrivals (open loop).

    prefix_groups: prompts share one of so many prefixes of prefix_tokens, which count as input tokens. tenants: name →
    weight; they travel as the header x-tenant-id. cancel_fraction: so many callers go away midway. ignore_eos: answers
    have exactly the drawn length. Decoding is greedy.
    """

    concurrency: int | None = None
    arrivals: Arrivals | None = None
    input_tokens: Lengths = field(default_factory=lambda: Fixed(128))
    output_tokens: Lengths = field(default_factory=lambda: Fixed(64))
    prefix_groups: int = 0
    prefix_tokens: int = 0
    tenants: Mapping[str, float] = field(default_factory=dict)
    cancel_fraction: float = 0.0
    ignore_eos: bool = True
    stream: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.arrivals is None):
            raise InvalidArgument(
                "concurrency", "set exactly one of concurrency (closed loop) and arrivals (open loop)"
            )
        if self.concurrency is not None and self.concurrency < 1:
            raise InvalidArgument("concurrency", f"got {self.concurrency}; allowed is a whole number from 1")
        if not 0 <= self.cancel_fraction <= 1:
            raise InvalidArgument("cancel_fraction", f"got {self.cancel_fraction}; allowed is 0 to 1")
        if (self.prefix_groups > 0) != (self.prefix_tokens > 0) or self.prefix_groups < 0:
            raise InvalidArgument("prefix_groups", "prefix_groups and prefix_tokens go together; set both or neither")
        if any(not weight > 0 for weight in self.tenants.values()):
            raise InvalidArgument("tenants", f"got {dict(self.tenants)}; allowed are weights above 0")

    def schedule(self, duration_s: float) -> Iterator[Arrival]:
        """The open loop's instants."""
        return self.arrivals.instants(random.Random(f"{self.seed} arrivals"), duration_s)

    def request(self, index: int, prompts: Prompts, arrival: Arrival | None = None) -> PlannedRequest:
        """Request number ``index``. What depends on the index alone is the same whoever asks, in whatever order."""
        rng = random.Random(f"{self.seed} request {index}")
        input_tokens = self.input_tokens.draw(rng)
        output_tokens = self.output_tokens.draw(rng)
        tenant = rng.choices(list(self.tenants), list(self.tenants.values()))[0] if self.tenants else ""
        if arrival is not None:
            input_tokens = arrival.input_tokens or input_tokens
            output_tokens = arrival.output_tokens or output_tokens
            tenant = arrival.tenant or tenant
        leaves = rng.random() < self.cancel_fraction
        leave_after = rng.randint(1, max(1, output_tokens - 1)) if leaves else None
        prefix = self._prefix(rng.randrange(self.prefix_groups), prompts) if self.prefix_groups else ""
        prompt = prompts.text(rng, input_tokens, prefix)
        at_s = None if arrival is None else arrival.at_s
        return PlannedRequest(index, at_s, prompt, output_tokens, tenant, leave_after)

    def with_seed(self, seed: int) -> Workload:
        return dataclasses.replace(self, seed=seed)

    def _prefix(self, group: int, prompts: Prompts) -> str:
        return prompts.text(random.Random(f"{self.seed} prefix {group}"), self.prefix_tokens)

    def described(self) -> dict[str, object]:
        """For reports."""
        loop = f"closed, {self.concurrency} under way" if self.concurrency else f"open, {self.arrivals}"
        named = {"input_tokens": str(self.input_tokens), "output_tokens": str(self.output_tokens), "loop": loop}
        rest = {name: getattr(self, name) for name in ("prefix_groups", "prefix_tokens", "cancel_fraction", "seed")}
        return named | rest | {"tenants": dict(self.tenants), "ignore_eos": self.ignore_eos, "stream": self.stream}
