"""Tools find the rows of variables and terms."""

from __future__ import annotations

from pathlib import Path

from examples.rag.tools import Tables


async def test_variables_and_terms_of_a_question_are_found():
    tables = Tables(Path(__file__).resolve().parents[3] / "docs")
    [found] = await tables.look_up("What does TRIDENT_GATEWAY_MAX_IN_FLIGHT set?")
    assert found.page == "environment.md" and "requests in flight" in found.text
    assert [one.heading for one in await tables.look_up("What are permits for?")] == ["permit"]
    assert await tables.look_up("TRIDENT_NOTHING") == []
