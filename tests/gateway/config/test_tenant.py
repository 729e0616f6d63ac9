"""A scope covers its model, with all adapters or one of them, and its endpoint."""

from __future__ import annotations

import pytest

from gateway.config.tenant import Level, Limits, Quota, Scope, applying


@pytest.mark.parametrize(
    ("model", "endpoint", "covered"),
    [
        ("large", "", {"large chat", "large:sql chat", "large embeddings"}),
        ("large:sql", "", {"large:sql chat"}),
        ("", "chat", {"large chat", "large:sql chat", "small chat"}),
        ("large", "chat", {"large chat", "large:sql chat"}),
    ],
)
def test_a_scope_covers_its_model_and_its_endpoint(model: str, endpoint: str, covered: set[str]) -> None:
    scope = Scope(model, endpoint, Limits())
    asked = ["large chat", "large:sql chat", "large embeddings", "small chat", "largest batch"]
    assert {one for one in asked if scope.covers(*one.split())} == covered


def test_scopes_are_levels_of_their_own_for_the_requests_they_cover() -> None:
    limits = Limits(quotas=(Quota("day", False, 5, soft=True),))
    levels = (Level("a"), Level("a/b", scopes=(Scope("large", "chat", limits),)))
    assert applying(levels, "large", "chat") == (*levels, Level("a/b model=large endpoint=chat", limits))
    assert applying(levels, "large", "batch") == levels
    assert levels[1].quotas and not levels[0].quotas and limits.quotas[0].name == "soft_tokens_per_day"
