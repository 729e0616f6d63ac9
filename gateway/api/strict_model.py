"""The base of request bodies (no unknown fields, no input in error messages) and their integers."""

from __future__ import annotations

from pydantic import BaseModel, BeforeValidator, ConfigDict

# 3.0 is an integer to JSON Schema.
WHOLE = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)
