from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from gateway.api.strict_model import MAX_LEVELS, StrictModel, check_levels


class Body(StrictModel):
    name: str


def test_an_unknown_field_is_refused_without_its_value():
    with pytest.raises(ValidationError, match="other") as caught:
        Body.model_validate({"name": "a", "other": "secret"})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("open_, close", ["[]", ('{"a":', "}")])
def test_levels_are_lists_and_objects_in_each_other(open_, close):
    def nested(levels: int) -> object:
        return [1, json.loads(open_ * levels + (close == "}") * "{}" + close * levels)]

    most = MAX_LEVELS - 1 - (close == "}")
    assert check_levels(nested(most)) == nested(most)
    with pytest.raises(ValueError, match="must have at most 200 levels"):
        check_levels(nested(most + 1))
    assert check_levels("[[") == "[["
