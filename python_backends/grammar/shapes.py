"""What values a JSON schema allows, type by type, in a form that can be intersected.

A formula is a set of literals, (place of a subschema, whether it must hold): all of them together. A shape is one way
to satisfy a formula: for each JSON type the values it may have, or None. Formulas inside a shape are made shapes when
a value of theirs is written, so that a schema may refer to itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from decimal import Decimal

from python_backends.grammar.languages import Language
from python_backends.grammar.numbers import WHOLE_VALUE

Literal = tuple[str, bool]
Formula = frozenset[Literal]
ANY: Formula = frozenset()


@dataclass(frozen=True)
class Numbers:
    """languages: sets that the number's text is in; values: the only ones, None for all."""

    languages: tuple[Language, ...] = ()
    values: tuple[Decimal, ...] | None = None


@dataclass(frozen=True)
class Strings:
    """languages: sets that the text is in; least, most: its length in characters; words: the only ones."""

    languages: tuple[Language, ...] = ()
    least: int = 0
    most: int | None = None
    words: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Arrays:
    """prefix: the first items; rest: the others; contains: (formula, how often at least, at most)."""

    prefix: tuple[Formula, ...] = ()
    rest: Formula = ANY
    least: int = 0
    most: int | None = None
    contains: tuple[tuple[Formula, int, int | None], ...] = ()
    unique: bool = False


@dataclass(frozen=True)
class Others:
    """What every property must satisfy whose name is none of ``names`` and in none of ``patterns``."""

    names: frozenset[str]
    patterns: tuple[Language, ...]
    formula: Formula


@dataclass(frozen=True)
class Objects:
    """members: declared properties in order; names: sets that every name is in; extra: other properties are wanted."""

    members: tuple[tuple[str, Formula], ...] = ()
    required: tuple[str, ...] = ()
    absent: frozenset[str] = frozenset()
    patterns: tuple[tuple[Language, Formula], ...] = ()
    others: tuple[Others, ...] = ()
    names: tuple[Language, ...] = ()
    least: int = 0
    most: int | None = None
    extra: bool = False


@dataclass(frozen=True)
class Shape:
    """Values of each type; None, False or empty for a type that is not allowed."""

    null: bool = False
    booleans: frozenset[bool] = frozenset()
    numbers: Numbers | None = None
    strings: Strings | None = None
    arrays: Arrays | None = None
    objects: Objects | None = None


NONE = Shape()
ALL = Shape(True, frozenset([False, True]), Numbers(), Strings(), Arrays(), Objects())
BY_TYPE = {
    "null": Shape(null=True),
    "boolean": Shape(booleans=frozenset([False, True])),
    "integer": Shape(numbers=Numbers((WHOLE_VALUE,))),
    "number": Shape(numbers=Numbers()),
    "string": Shape(strings=Strings()),
    "array": Shape(arrays=Arrays()),
    "object": Shape(objects=Objects()),
}


def join(shapes: Iterable[Shape]) -> Shape:
    """Return one shape for shapes of different types."""
    joined = NONE
    for shape in shapes:
        given = {name: value for name, value in vars(shape).items() if value not in (None, False, frozenset())}
        joined = replace(joined, **given)
    return joined


def meet(a: Shape, b: Shape) -> Shape:
    """Return the values of both."""
    return Shape(
        a.null and b.null,
        a.booleans & b.booleans,
        _numbers(a.numbers, b.numbers),
        _strings(a.strings, b.strings),
        _arrays(a.arrays, b.arrays),
        _objects(a.objects, b.objects),
    )


def _numbers(a: Numbers | None, b: Numbers | None) -> Numbers | None:
    if a is None or b is None:
        return None
    languages = tuple(dict.fromkeys(a.languages + b.languages))
    values = _common(a.values, b.values)
    if values is not None:
        values = tuple(value for value in values if all(f"{value:f}" in language for language in languages))
    return None if values == () else Numbers(languages, values)


def _strings(a: Strings | None, b: Strings | None) -> Strings | None:
    if a is None or b is None:
        return None
    languages = tuple(dict.fromkeys(a.languages + b.languages))
    least, most, words = max(a.least, b.least), _least(a.most, b.most), _common(a.words, b.words)
    if words is not None:
        fitting = (text for text in words if least <= len(text) and (most is None or len(text) <= most))
        words = tuple(text for text in fitting if all(text in language for language in languages))
    return None if words == () or (most is not None and most < least) else Strings(languages, least, most, words)


def _arrays(a: Arrays | None, b: Arrays | None) -> Arrays | None:
    if a is None or b is None:
        return None
    length = max(len(a.prefix), len(b.prefix))
    first, second = ([*x.prefix, *[x.rest] * (length - len(x.prefix))] for x in (a, b))
    prefix = tuple(x | y for x, y in zip(first, second, strict=True))
    least, most = max(a.least, b.least), _least(a.most, b.most)
    if most is not None and most < least:
        return None
    contains = tuple(dict.fromkeys(a.contains + b.contains))
    return Arrays(prefix, a.rest | b.rest, least, most, contains, a.unique or b.unique)


def _objects(a: Objects | None, b: Objects | None) -> Objects | None:
    if a is None or b is None:
        return None
    members = dict(a.members)
    for name, formula in b.members:
        members[name] = members.get(name, ANY) | formula
    required, absent = tuple(dict.fromkeys(a.required + b.required)), a.absent | b.absent
    least, most = max(a.least, b.least, len(required)), _least(a.most, b.most)
    if not absent.isdisjoint(required) or (most is not None and most < least):
        return None
    return Objects(
        tuple(members.items()),
        required,
        absent,
        tuple(dict.fromkeys(a.patterns + b.patterns)),
        tuple(dict.fromkeys(a.others + b.others)),
        tuple(dict.fromkeys(a.names + b.names)),
        least,
        most,
        a.extra or b.extra,
    )


def of_name(shape: Objects, name: str) -> Formula:
    """Return what patternProperties and additionalProperties require of a property."""
    formula = ANY
    for language, part in shape.patterns:
        if name in language:
            formula |= part
    for others in shape.others:
        if name not in others.names and not any(name in language for language in others.patterns):
            formula |= others.formula
    return formula


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _common(a: tuple | None, b: tuple | None) -> tuple | None:
    return b if a is None else a if b is None else tuple(value for value in a if value in b)
