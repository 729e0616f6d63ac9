"""Translated guides in the library's form."""

import pytest

from contract.generation import Guide
from python_backends.grammar.structured_output import structured_output


@pytest.mark.parametrize(
    ("kind", "field"),
    [("ebnf_grammar", "grammar"), ("structural_tag", "structural_tags_config")],
)
def test_the_text_goes_under_the_librarys_name(kind, field):
    config = structured_output(Guide(kind, "x"))
    assert getattr(config, field) == "x"
    assert config.json_schema is None
