"""Keywords as shapes."""

from pathlib import Path

import pytest

from contract.errors import InvalidArgument
from python_backends.grammar.keywords import _KNOWN, ANNOTATIONS, FORMATS, Keywords
from python_backends.grammar.patterns import whole
from python_backends.grammar.shapes import ALL, Shape, Strings

ROOT = frozenset([("#", True)])


def test_annotations_allow_everything():
    assert Keywords({"title": "x", "discriminator": {"propertyName": "y"}, "x-own": 1}).shapes(ROOT) == [ALL]


def test_a_negation_is_the_other_types():
    assert Keywords({"not": {"type": ["object", "array", "number", "null", "boolean"]}}).shapes(ROOT) == [
        Shape(strings=Strings())
    ]


def test_alternatives_have_a_limit():
    parts = [{"pattern": f"{n}"} for n in range(20)]
    with pytest.raises(InvalidArgument, match="combinations of alternatives"):
        Keywords({"allOf": [{"anyOf": parts}, {"anyOf": parts}, {"anyOf": parts}]}).shapes(ROOT)


def test_every_keyword_is_documented():
    page = (Path(__file__).parents[3] / "docs" / "structured-output.md").read_text("utf-8")
    missing = [keyword for keyword in [*_KNOWN, *FORMATS] if f"`{keyword}`" not in page]
    assert not missing and not _KNOWN & ANNOTATIONS


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_a_regular_expression(name):
    whole(FORMATS[name])


def test_closed_objects_exclude_each_other_by_what_one_requires_and_the_other_does_not_declare():
    def closed(name):
        return {"properties": {name: {}}, "required": [name], "additionalProperties": False, "type": "object"}

    assert len(Keywords({"oneOf": [closed("a"), closed("b"), closed("c")]}).shapes(ROOT)) == 3
    with pytest.raises(InvalidArgument, match="additionalProperties cannot be negated"):
        Keywords({"oneOf": [closed("a"), closed("a") | {"minProperties": 1}]}).shapes(ROOT)
