"""What is given up first when there is too much: the length of answers, then the model, then the request.

Pure: a pressure in, a stage out. Each stage is said in the response (``x-trident-degraded``) and can be counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from contract.generation import GenerationRequest
from gateway.config.policy import DegradationRules


class Stage(str, Enum):
    """In the order of what they cost the caller."""

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
    """A request as it may be served. target: where, empty for the usual replicas. note: for the response's header,
    empty if nothing was given up."""

    request: GenerationRequest
    target: str = ""
    note: str = ""


def overflow_note(target: str) -> str:
    """What the response says of a request that ``target`` serves."""
    return f"overflow={target}"


def degrade(request: GenerationRequest, stage: Stage, rules: DegradationRules, target: str = "") -> Degraded:
    """``request`` under ``stage``; REFUSE is the caller's to raise, and is treated as the stage below it. target: the
    one that takes it in the stage OVERFLOW, the first of the rules if it is not said."""
    if stage is Stage.OVERFLOW and rules.overflow:
        target = target or rules.overflow[0]
        return Degraded(request, target, overflow_note(target))
    limit = max(rules.max_tokens, request.sampling.min_tokens)  # a promised minimum is kept
    if stage is Stage.NONE or request.max_tokens <= limit:
        return Degraded(request)
    return Degraded(replace(request, max_tokens=limit), "", f"max_tokens={limit}")
