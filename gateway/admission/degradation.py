"""What is given up first when there is too much: the length of answers, then the model, then the request.

Pure: a pressure in, a stage out. Each stage is said in the response (``x-trident-degraded``) and can be counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from contract.errors import InvalidArgument
from contract.generation import GenerationRequest


class Stage(str, Enum):
    """In the order of what they cost the caller."""

    NONE = "none"
    SHORTER = "max_tokens"
    OVERFLOW = "overflow"
    REFUSE = "refuse"


@dataclass(frozen=True)
class Ladder:
    """At which pressure each stage begins. Pressure: the fullest bound as a fraction, 1 is full.

    max_tokens: what answers are cut to in the first stage. overflow: the names of the targets that take requests in
    the second, in order of preference; without any that stage is the first one's. They also take the requests of a pool
    without a healthy replica, and those that fail elsewhere before their first token.
    """

    shorter_at: float = 0.7
    overflow_at: float = 0.85
    refuse_at: float = 1.0
    max_tokens: int = 128
    overflow: tuple[str, ...] | str = ()

    def __post_init__(self) -> None:
        if isinstance(self.overflow, str):  # one name stands for a tuple of it
            object.__setattr__(self, "overflow", (self.overflow,) if self.overflow else ())
        if not 0 < self.shorter_at <= self.overflow_at <= self.refuse_at:
            steps = f"{self.shorter_at}, {self.overflow_at}, {self.refuse_at}"
            raise InvalidArgument("shorter_at", f"got the steps {steps}; allowed are rising ones above 0")
        if self.max_tokens < 1:
            raise InvalidArgument("max_tokens", f"got {self.max_tokens}; allowed is 1 or more")

    def stage(self, pressure: float) -> Stage:
        if pressure >= self.refuse_at:
            return Stage.REFUSE
        if pressure >= self.overflow_at and self.overflow:
            return Stage.OVERFLOW
        return Stage.SHORTER if pressure >= self.shorter_at else Stage.NONE


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


def degrade(request: GenerationRequest, stage: Stage, ladder: Ladder, target: str = "") -> Degraded:
    """``request`` under ``stage``; REFUSE is the caller's to raise, and is treated as the stage below it. target: the
    one that takes it in the stage OVERFLOW, the first of the ladder if it is not said."""
    if stage is Stage.OVERFLOW and ladder.overflow:
        target = target or ladder.overflow[0]
        return Degraded(request, target, overflow_note(target))
    limit = max(ladder.max_tokens, request.sampling.min_tokens)  # a promised minimum is kept
    if stage is Stage.NONE or request.max_tokens <= limit:
        return Degraded(request)
    return Degraded(replace(request, max_tokens=limit), "", f"max_tokens={limit}")
