"""A whole answer: what the deltas of one stream add up to."""

from __future__ import annotations

from dataclasses import dataclass

from clients.wire.latency import Stopwatch
from contract.errors import Cancelled
from contract.generation import FinishReason, GenerationRequest, Sections, Timings, TokenDelta, ToolCallDelta, Usage


@dataclass(frozen=True)
class Completion:
    """One finished generation. Times are the caller's own, in seconds; ``timings`` the engine's, if requested.

    finish_reason is None only where the stream was left before its end.
    """

    text: str
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: FinishReason | None
    stop_reason: str
    usage: Usage | None
    timings: Timings | None
    request_id: str
    ttft_s: float | None = None
    total_s: float = 0.0
    top_log_probs: tuple[tuple[tuple[int, float], ...], ...] = ()
    sections: Sections | None = None


def join(deltas: list[TokenDelta], request_id: str, ttft_s: float | None = None, total_s: float = 0.0) -> Completion:
    """The completion the deltas of one stream make."""
    last = next((delta for delta in reversed(deltas) if delta.finish_reason), TokenDelta())
    return Completion(
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.token_ids),
        tuple(log_prob for delta in deltas for log_prob in delta.log_probs),
        last.finish_reason,
        last.stop_reason,
        last.usage,
        last.timings,
        request_id,
        ttft_s,
        total_s,
        tuple(likeliest for delta in deltas for likeliest in delta.top_log_probs),
        _sections([delta.sections for delta in deltas if delta.sections is not None]),
    )


class Collector:
    """Collects the deltas of one stream and times them."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request, self._watch, self._deltas = request, Stopwatch(), list[TokenDelta]()

    def add(self, delta: TokenDelta) -> None:
        self._watch.observe(delta)
        self._deltas.append(delta)

    def completion(self, complete: bool) -> Completion:
        """complete: the last delta came. A stream that is closed between two deltas ends without an error."""
        if not complete:
            raise Cancelled(f"request {self._request.request_id} was closed while it was being read")
        ttft_s = self._watch.ttft_s if self._request.stream else None
        return join(self._deltas, self._request.request_id, ttft_s, self._watch.total_s)


def _sections(parts: list[Sections]) -> Sections | None:
    """The sections of a whole output, every tool call as one delta."""
    if not parts:
        return None
    calls: dict[int, list[ToolCallDelta]] = {}
    for call in (call for part in parts for call in part.tool_calls):
        calls.setdefault(call.index, []).append(call)
    whole = (
        ToolCallDelta(index, found[0].id, found[0].name, "".join(call.arguments for call in found))
        for index, found in sorted(calls.items())
    )
    return Sections("".join(part.reasoning for part in parts), tuple(whole))
