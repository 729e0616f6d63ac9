"""The base of request bodies (no unknown fields, no input in error messages) and their integers."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictStr

# 3.0 is an integer to JSON Schema.
WHOLE = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
Metadata = Annotated[
    dict[Annotated[StrictStr, Field(max_length=64)], Annotated[StrictStr, Field(max_length=512)]], Field(max_length=16)
]
MAX_LEVELS = 200  # of a value; orjson writes 254 levels, those around the value included


def check_levels(value: Any) -> Any:
    """Return a value of JSON. Raises: ValueError, where lists and objects are nested too deeply."""
    levels, inner = 0, [value]
    while inner := [part for part in inner if isinstance(part, dict | list)]:
        levels += 1
        if levels > MAX_LEVELS:
            raise ValueError(f"must have at most {MAX_LEVELS} levels")
        inner = [each for part in inner for each in (part.values() if isinstance(part, dict) else part)]
    return value


LevelLimit = AfterValidator(check_levels)


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)
