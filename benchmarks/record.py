"""What is known of one request of a run. Instants are seconds on CLOCK_MONOTONIC, which the engine uses too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from contract.generation import Timings


@dataclass
class Record:
    """Hold one request's instants, tokens and outcome.

    index: number of the request in its workload.
    intended_s: when it was due; latencies count from there, so that a slow generator or server does not hide them.
    messages: (instant, new tokens) of every response with tokens.
    transit_s: seconds from a scripted source's write of each token to our read of it; empty for other servers.
    input_tokens, usage_tokens: of prompt and output by the answer's usage; 0 and None if unknown.
    finish_reason: "stop", "length" or "cancelled"; "" if the answer did not end.
    error: ``ErrorType: message`` of a failed request, else "". retry_after: whether it told when to try again.
    cancelled: whether the load generator cancelled it on purpose.
    timings: the engine's own instants, if they were requested.
    """

    index: int
    intended_s: float
    sent_s: float = 0.0
    messages: list[tuple[float, int]] = field(default_factory=list)
    transit_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    input_tokens: int = 0
    usage_tokens: int | None = None
    finish_reason: str = ""
    error: str = ""
    retry_after: bool = False
    cancelled: bool = False
    timings: Timings | None = None

    @property
    def ok(self) -> bool:
        """Whether the answer was read to its end."""
        return not self.error and not self.cancelled and self.finish_reason in ("stop", "length")

    @property
    def error_type(self) -> str:
        return self.error.partition(":")[0]

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.messages)

    @property
    def first_s(self) -> float | None:
        return self.messages[0][0] if self.messages else None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the intended instant to the first token."""
        return self.messages[0][0] - self.intended_s if self.messages else None

    @property
    def ttft_from_send_s(self) -> float | None:
        """Seconds from the actual send to the first token."""
        return self.messages[0][0] - self.sent_s if self.messages else None

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.intended_s

    @property
    def gaps(self) -> list[tuple[float, int]]:
        """(seconds since the previous message, tokens in it) of all messages but the first."""
        pairs = zip(self.messages, self.messages[1:], strict=False)
        return [(later - earlier, count) for (earlier, _), (later, count) in pairs]

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> Record:
        timings = Timings(**table["timings"]) if table["timings"] else None
        return cls(**table | {"messages": [tuple(message) for message in table["messages"]], "timings": timings})
