"""What is known of one request of a run. Instants are seconds on CLOCK_MONOTONIC, the engine's own clock too."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from contract.generation import Timings


@dataclass
class Record:
    """intended_s: when it was to be sent; latencies count from there, so a generator or a server that falls behind
    does not hide it. messages: (instant, new tokens) of every response with tokens. left: we went away on purpose.
    """

    index: int
    tenant: str
    intended_s: float
    sent_s: float = 0.0
    messages: list[tuple[float, int]] = field(default_factory=list)
    ended_s: float = 0.0
    input_tokens: int = 0
    usage_tokens: int | None = None
    finish_reason: str = ""
    error: str = ""
    left: bool = False
    timings: Timings | None = None

    @property
    def ok(self) -> bool:
        """Answered to the end."""
        return not self.error and not self.left and self.finish_reason in ("stop", "length")

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.messages)

    @property
    def first_s(self) -> float | None:
        return self.messages[0][0] if self.messages else None

    @property
    def ttft_s(self) -> float | None:
        """From the intended instant."""
        return self.messages[0][0] - self.intended_s if self.messages else None

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.intended_s

    @property
    def gaps(self) -> list[tuple[float, int]]:
        """(seconds since the message before, tokens it brought), of all messages but the first."""
        pairs = zip(self.messages, self.messages[1:], strict=False)
        return [(later - earlier, count) for (earlier, _), (later, count) in pairs]

    def to_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, table: dict) -> Record:
        timings = Timings(**table["timings"]) if table["timings"] else None
        return cls(**table | {"messages": [tuple(message) for message in table["messages"]], "timings": timings})
