"""What becomes of a chat that is too long: the section's fields."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from gateway.config.context import ContextRules


def test_a_summary_needs_a_model_and_other_policies_have_none():
    assert ContextRules(policy="summarise", summary_model="small").summary_tokens == 128
    for wrong in ({"policy": "summarise"}, {"policy": "keep_system", "summary_model": "small"}):
        with pytest.raises(ValidationError, match="summary_model must be set for policy summarise"):
            ContextRules(**wrong)
