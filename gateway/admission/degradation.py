"""Degradation under pressure: first max_tokens is capped, then requests overflow, then they are refused.

Pure functions of the pressure. Responses name the stage (``x-trident-degraded``), and metrics count it.
"""

from __future__ import annotations

from enum import Enum

from contract.generation import GenerationRequest, changed
from gateway.config.policy import DegradationRules


class Stage(str, Enum):
    """Stages in order of severity."""

    NONE = "none"
    SHORTER = "max_tokens"
    OVERFLOW = "overflow"
    REFUSE = "refuse"


def stage_at(pressure: float, rules: DegradationRules) -> Stage:
    """Return the stage of a pressure; 1 is full. Without overflow targets the stage before OVERFLOW continues."""
    if pressure >= rules.refuse_at:
        return Stage.REFUSE
    if pressure >= rules.overflow_at and rules.overflow:
        return Stage.OVERFLOW
    return Stage.SHORTER if pressure >= rules.shorter_at else Stage.NONE


def overflow_note(target: str) -> str:
    """Return the value of ``x-trident-degraded`` for an overflow target."""
    return f"overflow={target}"


def shortened(request: GenerationRequest, most: int) -> GenerationRequest:
    """Return ``request`` with ``max_tokens`` of at most ``most``, or of what it continues if that is more."""
    most = max(most, len(request.continue_ids))
    return request if request.max_tokens <= most else changed(request, max_tokens=most)


def degraded(request: GenerationRequest, rules: DegradationRules) -> GenerationRequest:
    """Return ``request`` as it is served in the stage SHORTER: a continued stream keeps the limit it began with, and
    ``min_tokens`` can be reached."""
    return request if request.continue_ids else shortened(request, max(rules.max_tokens, request.sampling.min_tokens))
