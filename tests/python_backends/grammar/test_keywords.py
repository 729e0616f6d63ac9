"""Keywords as shapes."""

from decimal import Decimal
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


@pytest.mark.parametrize("number", ["1e400", "-1e2000000000", "1e-400", "1e-2000000000"])
@pytest.mark.parametrize(
    "keyword", ["const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]
)
def test_numbers_have_so_many_digits(keyword, number):
    value = Decimal(number.removeprefix("-") if keyword == "multipleOf" else number)
    with pytest.raises(InvalidArgument, match=f"#/{keyword} allows numbers of at most 400 digits, written without"):
        Keywords({keyword: [1, value] if keyword == "enum" else value}).shapes(ROOT)


@pytest.mark.parametrize("number", ["1e399", "-1.7976931348623157e308", "4.9406564584124654e-324", "1e-399"])
def test_every_double_is_such_a_number(number):
    assert Keywords({"enum": [Decimal(number)], "minimum": Decimal("-1e399")}).shapes(ROOT)


@pytest.mark.parametrize("keyword", ["minLength", "maxLength", "minItems", "maxItems", "minProperties"])
def test_a_count_is_no_larger_than_a_million(keyword):
    for most in (Decimal("1e2000000000"), 1_000_001):
        with pytest.raises(InvalidArgument, match=f"#/{keyword} must be at most 1000000"):
            Keywords({keyword: most}).shapes(ROOT)
    for part in (Decimal("0.5"), Decimal("1e-2000000000")):
        with pytest.raises(InvalidArgument, match=f"#/{keyword} must be a whole number from 0"):
            Keywords({keyword: part}).shapes(ROOT)
    assert Keywords({keyword: Decimal("2.0")}).shapes(ROOT) == Keywords({keyword: 2}).shapes(ROOT)


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


@pytest.mark.parametrize("other", [{"type": "null"}, {"enum": [1, None]}, {"type": "object"}, {"type": "array"}])
def test_a_format_overlaps_no_part_that_allows_no_strings(other):
    date = {"type": "string", "format": "date"}
    assert len(Keywords({"oneOf": [date, other]}).shapes(ROOT)) == 2
    with pytest.raises(InvalidArgument, match="format cannot be negated"):
        Keywords({"oneOf": [date, other, {"type": "string", "maxLength": 3}]}).shapes(ROOT)


def test_names_of_a_format_overlap_no_part_that_allows_no_objects():
    named = {"type": "object", "propertyNames": {"format": "uuid"}, "minProperties": 1}
    assert len(Keywords({"oneOf": [named, {"type": "null"}]}).shapes(ROOT)) == 2
    required = {"type": "object", "required": ["a"], "properties": {"a": {"const": 1}}}
    with pytest.raises(InvalidArgument, match="cannot be negated"):
        Keywords({"oneOf": [named, required]}).shapes(ROOT)
