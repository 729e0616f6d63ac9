from __future__ import annotations

import pytest
from pydantic import ValidationError

from gateway.api.strict_model import StrictModel


class Body(StrictModel):
    name: str


def test_an_unknown_field_is_refused_without_its_value():
    with pytest.raises(ValidationError, match="other") as caught:
        Body.model_validate({"name": "a", "other": "secret"})
    assert "secret" not in str(caught.value)
