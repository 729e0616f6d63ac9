"""What becomes of a chat that is too long for its model: ``[models.NAME.context]``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from gateway.config.rules import Rules


class ContextRules(Rules):
    """What is left out of a chat so that prompt and ``max_tokens`` fit.

    policy: ``drop_oldest``: the oldest turns. ``keep_system``: the oldest turns between the system messages with the
        first turn, and the last one. ``summarise``: those, with a summary in their place.
    prompt_tokens: of a prompt at most; None: as many as fit.
    summary_model: that writes summaries, of this gateway. summary_tokens, summary_timeout_s: bounds of a summary.
    """

    policy: Literal["drop_oldest", "keep_system", "summarise"]
    prompt_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    summary_model: str | None = None
    summary_tokens: Annotated[int, Field(ge=8, le=4096)] = 128
    summary_timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0

    @model_validator(mode="after")
    def _complete(self) -> ContextRules:
        if (self.policy == "summarise") != (self.summary_model is not None):
            raise ValueError("summary_model must be set for policy summarise, and left out of other policies")
        return self
