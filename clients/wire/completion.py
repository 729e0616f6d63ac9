"""A whole answer: what the deltas of one stream add up to."""

from __future__ import annotations

from dataclasses import dataclass

from contract.generation import FinishReason, Timings, TokenDelta, Usage


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
    )
