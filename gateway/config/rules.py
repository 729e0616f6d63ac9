"""What every table of rules has: no field that is not known, no conversion between types, no change once it is read."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0, le=86_400)]
PoolName = Annotated[str, Field(max_length=64, pattern=r"^[^=;,\s]*$")]


class Rules(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, strict=True)
