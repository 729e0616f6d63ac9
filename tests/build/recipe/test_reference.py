"""docs/recipes.md is what the declarations generate, and covers every key."""

from build.base import layout
from build.recipe import reference, schema


def test_the_page_in_docs_is_the_generated_one():
    written = (layout.ROOT / "docs" / "recipes.md").read_text("utf-8")
    assert written == reference.page(), "run: .venv/bin/python -m build.recipe.reference > docs/recipes.md"


def test_every_key_has_a_row_with_its_meaning():
    page = reference.page()
    for key in {*schema.KEYS, *schema.SPECULATIVE_KEYS} - {"kind", "mode"}:
        assert f"| `{key}` | " in page, key
    assert "| None |" not in page and "PydanticUndefined" not in page
