"""Degradation under pressure: first max_tokens is capped, then requests overflow, then they are refused.

Pure functions of the pressure. Responses name the stage (``x-trident-degraded``), and metrics count it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from contract.generation import GenerationRequest
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


@dataclass(frozen=True)
class Degraded:
    """A request as it may be served.

    target: the overflow target; "" for replicas.
    note: value of ``x-trident-degraded``; "" if the request is not degraded.
    """

    request: GenerationRequest
    target: str = ""
    note: str = ""


def overflow_note(target: str) -> str:
    """Return the value of ``x-trident-degraded`` for an overflow target."""
    return f"overflow={target}"


def degrade(request: GenerationRequest, stage: Stage, rules: DegradationRules, target: str = "") -> Degraded:
    """Return ``request`` as degraded in ``stage``. The caller handles REFUSE, which counts as OVERFLOW here.

    target: the overflow target; by default the first of the rules.
    """
    if stage is Stage.OVERFLOW and rules.overflow:
        target = target or rules.overflow[0]
        return Degraded(request, target, overflow_note(target))
    limit = max(rules.max_tokens, request.sampling.min_tokens)  # min_tokens must be reachable
    if stage is Stage.NONE or request.continue_ids or request.max_tokens <= limit:
        return Degraded(request)
    return Degraded(replace(request, max_tokens=limit), "", f"max_tokens={limit}")
