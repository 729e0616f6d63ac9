"""The section ``[samples]`` of the configuration file: what is kept of requests, and what is checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ImportString, ValidationError, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from contract.redaction import PATTERNS
from gateway.config.rules import Fraction, Rules, Seconds

Reason = Literal["failure", "refused", "length", "refusal", "empty", "schema", "loop", "drift", "up", "down", "pair"]
REFUSALS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"\bI(?:'m| am)? ?(?:sorry|afraid)\b.{0,80}\b(?:can(?:'t|not)|unable|won't)\b",
        r"^\W*I (?:can(?:'t|not)|am unable to|'m unable to|won't) (?:help|assist|answer|provide|comply|fulfil|do that)",
        r"\bas an AI(?: language model)?\b.{0,60}\b(?:can(?:'t|not)|unable|not able)\b",
    )
)
_Bytes = Annotated[int, Field(ge=64 * 1024, lt=2**48)]
MAX_WINDOWS = 168


def _guarded(allowed: str) -> WrapValidator:
    """Return what makes a ValueError of all that pydantic lets through from the code that it calls for a value."""

    def check(value: Any, validated: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validated(value)
        except ValidationError:
            raise
        except (Exception, SystemExit) as exc:
            raise ValueError(f"must be {allowed}, got {value!r:.200}: {type(exc).__name__}: {exc}") from exc

    return WrapValidator(check)


_Pattern = Annotated[re.Pattern[str], _guarded("a regular expression")]
_Function = Annotated[ImportString[Callable[[str], str]], _guarded("MODULE:FUNCTION of a module that can be imported")]


class CheckRules(Rules):
    """Checks of answers, of which only counts are kept. drift: the population stability index that counts as drift."""

    fraction: Fraction = 1.0
    window_s: Annotated[float, Field(ge=1, le=86_400)] = 3600.0
    windows: Annotated[int, Field(ge=1, le=MAX_WINDOWS)] = 24
    min_answers: Annotated[int, Field(ge=10, le=1_000_000)] = 100
    drift: Annotated[float, Field(gt=0, le=10)] = 0.2
    refusals: Annotated[Sequence[_Pattern], Field(min_length=1, max_length=50)] = REFUSALS


class SampleRules(Rules):
    """Which requests of the tenants with ``samples = true`` are kept, and for how long (docs/samples.md)."""

    keyless: bool = False
    fraction: Fraction = 0.0
    keep: Sequence[Reason] = ()
    ttft_s: Seconds | None = None
    duration_s: Seconds | None = None
    per_minute: Annotated[int, Field(ge=1, le=1_000_000)] = 60
    sample_characters: Annotated[int, Field(ge=256, le=4 * 1024 * 1024)] = 64 * 1024
    days: Annotated[float, Field(ge=1, le=3650)] = 30.0
    bytes: _Bytes = 256 * 1024 * 1024
    hold_s: Annotated[float, Field(ge=60, le=30 * 86_400)] = 86_400.0
    hold_bytes: _Bytes = 64 * 1024 * 1024
    patterns: Mapping[Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]{0,31}$")], _Pattern] = {}
    redact: _Function | None = None
    checks: CheckRules | None = None

    @model_validator(mode="after")
    def _together(self) -> SampleRules:
        if "drift" in self.keep and self.checks is None:
            raise ValueError("keep with drift must have [samples.checks] beside it: nothing else measures drift")
        if self.sample_characters > min(self.bytes, self.hold_bytes) // 8:
            raise ValueError("sample_characters must be at most an eighth of bytes and of hold_bytes")
        if taken := PATTERNS.keys() & self.patterns.keys():
            raise ValueError(f"patterns must have other names than the built-in ones, got {', '.join(sorted(taken))}")
        return self

    @property
    def keeps(self) -> bool:
        """Whether any text is kept."""
        return bool(self.keep or self.fraction or self.ttft_s or self.duration_s)
