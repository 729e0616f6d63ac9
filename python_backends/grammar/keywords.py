"""The keywords of JSON schema (draft 2020-12): each as the shapes that satisfy it, and those that violate it.

What cannot be said exactly is refused by keyword and place; nothing is ignored but annotations.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from contract.errors import InvalidArgument
from python_backends.grammar import numbers, patterns
from python_backends.grammar.languages import ANY_CHARACTER, Language, both, complement, either, repeat, word
from python_backends.grammar.shapes import (
    ALL,
    ANY,
    BY_TYPE,
    NONE,
    Arrays,
    Formula,
    Numbers,
    Objects,
    Others,
    Shape,
    Strings,
    join,
    meet,
)

ANNOTATIONS = frozenset(
    "$schema $id $comment $defs definitions title description default examples example deprecated readOnly writeOnly"
    " discriminator contentMediaType contentEncoding contentSchema then else minContains maxContains".split()
)
_MOST_SHAPES = 256
_FALSE = "false"
_MONTH_DAY = r"((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_OCTET = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LABEL = r"[a-z0-9]([a-z0-9-]{0,14}[a-z0-9])?"
_PATH = r"(/[A-Za-z0-9_.~-]{1,16}){0,8}/?"
# Each allows only texts that are of the format, not every one of them.
FORMATS = {
    "date": rf"[1-9]\d{{3}}-{_MONTH_DAY}",
    "time": _TIME,
    "date-time": rf"[1-9]\d{{3}}-{_MONTH_DAY}T{_TIME}",
    "duration": r"P(\d{1,4}D(T\d{1,4}H)?|T\d{1,4}[HMS]|\d{1,4}[WMY])",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": r"([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
    "email": rf"[a-z0-9]{{1,16}}([._-][a-z0-9]{{1,16}}){{0,3}}@{_LABEL}(\.{_LABEL}){{0,2}}\.[a-z]{{2,8}}",
    "uri": rf"https?://{_LABEL}(\.{_LABEL}){{1,3}}{_PATH}",
}


def refuse(at: str, keyword: str, problem: str) -> InvalidArgument:
    """Return the error about a keyword of the subschema at ``at``, a JSON pointer."""
    where = f"{at}/{keyword}" if keyword else at
    return InvalidArgument("guided_decoding_guide", f"must be a schema that can be followed exactly: {where} {problem}")


class Keywords:
    """One schema, and the shapes of its parts."""

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self._schemas: dict[str, Any] = {"#": schema, _FALSE: False}
        self._shapes: dict[tuple[str, bool], list[Shape]] = {}
        self._open: set[tuple[str, bool]] = set()
        self._impossible: dict[Formula, bool] = {}

    def shapes(self, formula: Formula) -> list[Shape]:
        """Return the ways to satisfy a formula; none if there are none.

        Raises:
            InvalidArgument: a part cannot be expressed exactly.
        """
        result = [ALL]
        for literal in sorted(formula):
            result = self._together(result, self._literal(*literal), literal[0])
        return result

    def language(self, formula: Formula) -> Language | None:
        """Return the strings that satisfy a formula, None for all."""
        shapes = [shape for shape in self.shapes(formula) if shape.strings is not None]
        found: list[Language] = []
        for strings in (shape.strings for shape in shapes if shape.strings is not None):
            if strings == Strings():
                return None
            found.append(text_language(strings))
        return either(*found)

    def impossible(self, formula: Formula) -> bool:
        """Return whether it is certain that no value satisfies a formula."""
        if formula not in self._impossible:
            self._impossible[formula] = False  # what refers to itself is not certain
            opened, self._open = self._open, set()
            self._impossible[formula] = all(self._dead(shape) for shape in self.shapes(formula))
            self._open = opened
        return self._impossible[formula]

    def _dead(self, shape: Shape) -> bool:
        if shape.null or shape.booleans or shape.numbers is not None or shape.strings is not None:
            return False
        if shape.arrays is not None:
            return False
        if shape.objects is None:
            return True
        members = dict(shape.objects.members)
        return any(self.impossible(members.get(name, ANY)) for name in shape.objects.required)

    # --- formulas -------------------------------------------------------------------------------------------------

    def _at(self, at: str, *steps: object) -> str:
        """Return the place of a subschema, known from now on."""
        schema = self._schemas[at]
        for step in steps:
            schema = schema[step]
            at += "/" + str(step).replace("~", "~0").replace("/", "~1")
        self._schemas[at] = schema
        return at

    def _must(self, at: str, *steps: object, hold: bool = True) -> Formula:
        return frozenset([(self._at(at, *steps), hold)])

    def _given(self, at: str, name: str, schema: Any, hold: bool = True) -> Formula:
        """Return the formula of a schema that is not written in the document."""
        self._schemas[f"{at}/{name}"] = schema
        return frozenset([(f"{at}/{name}", hold)])

    def _together(self, a: list[Shape], b: list[Shape], at: str) -> list[Shape]:
        met = dict.fromkeys(meet(x, y) for x in a for y in b)
        met.pop(NONE, None)
        return self._bounded(list(met), at)

    def _bounded(self, shapes: list[Shape], at: str) -> list[Shape]:
        if len(shapes) > _MOST_SHAPES:
            raise refuse(at, "", f"has more than {_MOST_SHAPES} combinations of alternatives")
        return shapes

    def _literal(self, at: str, hold: bool) -> list[Shape]:
        literal = (at, hold)
        if literal in self._shapes:
            return self._shapes[literal]
        if literal in self._open:
            raise refuse(at, "", "refers to itself without a value in between")
        schema = self._schemas[at]
        if isinstance(schema, bool):
            return [ALL] if schema == hold else []
        if not isinstance(schema, dict):
            raise refuse(at, "", f"must be an object or a boolean, got {json.dumps(schema, default=str)[:50]}")
        self._open.add(literal)
        result = [ALL] if hold else []
        for keywords, shapes_of in _KEYWORDS:
            if any(keyword in schema for keyword in keywords):
                found = shapes_of(self, schema, at, hold)
                result = self._together(result, found, at) if hold else self._bounded(result + found, at)
        for keyword in schema:
            if keyword not in _KNOWN and keyword not in ANNOTATIONS and not keyword.startswith("x-"):
                raise refuse(at, keyword, "is not supported")
            if keyword == "$id" and at != "#":
                raise refuse(at, keyword, "is not supported below the root")
        self._open.discard(literal)
        self._shapes[literal] = result
        return result

    # --- any type -------------------------------------------------------------------------------------------------

    def _type(self, schema: dict[str, Any], at: str, hold: bool) -> list[Shape]:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        allowed = NONE
        for name in names:
            if name == "integer":
                if "number" not in names:
                    allowed = replace(allowed, numbers=Numbers((numbers.WHOLE_VALUE,)))
            elif isinstance(name, str) and name in BY_TYPE:
                allowed = join([allowed, BY_TYPE[name]])
            else:
                raise refuse(at, "type", f"must hold {', '.join([*BY_TYPE, 'integer'])}, got {name!r:.50}")
        if hold:
            return [allowed]
        rest = join(shape for name, shape in BY_TYPE.items() if name not in names)
        if "integer" in names and "number" not in names:
            rest = replace(rest, numbers=Numbers((complement(numbers.WHOLE_VALUE),)))
        return [rest]

    def _values(self, schema: dict[str, Any], at: str, hold: bool) -> list[Shape]:
        result = [ALL] if hold else []
        for keyword in ("enum", "const"):
            if keyword not in schema:
                continue
            values = schema[keyword] if keyword == "enum" else [schema[keyword]]
            if not isinstance(values, list):
                raise refuse(at, keyword, "must be a list")
            found = self._one_of_values(values, at, keyword) if hold else self._other_values(values, at, keyword)
            result = self._together(result, found, at) if hold else result + found
        return result

    def _one_of_values(self, values: list[Any], at: str, keyword: str) -> list[Shape]:
        plain = Shape(
            null=any(value is None for value in values),
            booleans=frozenset(value for value in values if isinstance(value, bool)),
            numbers=Numbers(values=found) if (found := _decimals(values)) else None,
            strings=Strings(words=words)
            if (words := tuple(dict.fromkeys(value for value in values if isinstance(value, str))))
            else None,
        )
        shapes = [plain] if plain != NONE else []
        for place, value in enumerate(values):
            if isinstance(value, list | dict):
                shapes += self.shapes(self._given(at, f"{keyword}/{place}", _exactly(value)))
        return self._bounded(shapes, at)

    def _other_values(self, values: list[Any], at: str, keyword: str) -> list[Shape]:
        result = ALL
        for value in values:
            if value is None:
                result = replace(result, null=False)
            elif isinstance(value, bool):
                result = replace(result, booleans=result.booleans - {value})
        words = tuple(complement(word(value)) for value in values if isinstance(value, str))
        different = tuple(complement(numbers.equal(value)) for value in _decimals(values))
        result = replace(result, strings=Strings(words), numbers=Numbers(different))
        shapes = [result]
        for place, value in enumerate(values):
            if isinstance(value, list | dict):
                others = self.shapes(self._given(at, f"{keyword}/{place}", _exactly(value), hold=False))
                shapes = self._together(shapes, others, at)
        return shapes

    def _ref(self, schema: dict[str, Any], at: str, hold: bool) -> list[Shape]:
        ref = schema["$ref"]
        base = self._root.get("$id", "") if isinstance(self._root, dict) else ""
        if isinstance(ref, str) and isinstance(base, str) and base and ref.startswith(base.rstrip("#") + "#"):
            ref = ref[len(base.rstrip("#")) :]
        if not isinstance(ref, str) or (ref != "#" and not ref.startswith("#/")):
            raise refuse(at, "$ref", f"must point into this schema, as #/$defs/name, got {ref!r:.100}")
        target, found = "#", self._root
        for step in ref.split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            key: object = int(name) if isinstance(found, list) and name.isdecimal() else name
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError):
                raise refuse(at, "$ref", f"points to nothing: {ref[:100]}") from None
            target += "/" + name.replace("~", "~0").replace("/", "~1")
        self._schemas[target] = found
        return self._literal(target, hold)

    def _parts(self, schema: dict[str, Any], at: str, keyword: str) -> list[str]:
        parts = schema[keyword]
        if not isinstance(parts, list) or not parts:
            raise refuse(at, keyword, "must be a list of at least one schema")
        return [self._at(at, keyword, place) for place in range(len(parts))]

    def _all_of(self, schema: dict[str, Any], at: str, hold: bool) -> list[Shape]:
        parts = self._parts(schema, at, "allOf")
        if hold:
            return self.shapes(frozenset((part, True) for part in parts))
        return [shape for part in parts for shape in self._literal(part, False)]

    def _any_of(self, schema: dict[str, Any], at: str, hold: bool) -> list[Shape]:
        parts = self._parts(schema, at, "anyOf")
        if hold:
            return self._bounded([shape for part in parts for shape in self._literal(part, True)], at)
        return self.shapes(frozenset((part, False) for part in parts))

    def _one_of(self, schema: dict[str, Any], at: str, hold: bool) -> list[Shape]:
        parts = self._parts(schema, at, "oneOf")
        if hold:
            shapes = []
            for part in parts:
                # What excludes this part anyway need not be negated.
                overlapping = [
                    p for p in parts if p != part and not self.impossible(frozenset([(part, True), (p, True)]))
                ]
                shapes += self.shapes(frozenset([(part, True), *((other, False) for other in overlapping)]))
            return self._bounded(shapes, at)
        none = self.shapes(frozenset((part, False) for part in parts))
        pairs = [self.shapes(frozenset([(a, True), (b, True)])) for a, b in combinations(parts, 2)]
        return self._bounded([*none, *(shape for pair in pairs for shape in pair)], at)

    def _not(self, schema: dict[str, Any], at: str, hold: bool) -> list[Shape]:
        return self._literal(self._at(at, "not"), not hold)

    def _if(self, schema: dict[str, Any], at: str, hold: bool) -> list[Shape]:
        if "then" not in schema and "else" not in schema:
            return [ALL] if hold else []
        condition = self._at(at, "if")
        shapes = []
        for keyword, met in (("then", True), ("else", False)):
            formula: Formula = frozenset([(condition, met)])
            if keyword in schema:
                formula |= self._must(at, keyword, hold=hold)
            elif not hold:
                continue
            shapes += self.shapes(formula)
        return self._bounded(shapes, at)

    # --- numbers and strings --------------------------------------------------------------------------------------

    def _number(self, schema: dict[str, Any], at: str, hold: bool) -> list[Shape]:
        found: list[Language] = []
        for keyword, language_of in _BOUNDS.items():
            if keyword not in schema:
                continue
            bound = schema[keyword]
            if isinstance(bound, bool) or not isinstance(bound, int | Decimal):
                raise refuse(at, keyword, f"must be a number, got {bound!r:.50}")
            if keyword == "multipleOf" and not 0 < bound:
                raise refuse(at, keyword, f"must be above 0, got {bound}")
            found.append(language_of(Decimal(bound)))
        if hold:
            return [replace(ALL, numbers=Numbers(tuple(found)))]
        return [Shape(numbers=Numbers((complement(language),))) for language in found]

    def _length(self, schema: dict[str, Any], at: str, hold: bool) -> list[Shape]:
        return _counted(schema, at, hold, "Length", lambda least, most: Shape(strings=Strings((), least, most)))

    def _pattern(self, schema: dict[str, Any], at: str, hold: bool) -> list[Shape]:
        language = self._search(schema["pattern"], at, "pattern")
        if hold:
            return [replace(ALL, strings=Strings((language,)))]
        return [Shape(strings=Strings((complement(language),)))]

    def _search(self, pattern: object, at: str, keyword: str) -> Language:
        if not isinstance(pattern, str):
            raise refuse(at, keyword, f"must be a regular expression, got {pattern!r:.50}")
        try:
            return patterns.search(pattern)
        except patterns.BadPattern as exc:
            raise refuse(at, keyword, str(exc)) from exc

    def _format(self, schema: dict[str, Any], at: str, hold: bool) -> list[Shape]:
        name = schema["format"]
        if not isinstance(name, str) or name not in FORMATS:
            raise refuse(at, "format", f"must be one of {', '.join(FORMATS)}, got {name!r:.50}")
        if not hold:
            raise refuse(at, "format", "cannot be negated")
        return [replace(ALL, strings=Strings((patterns.whole(FORMATS[name]),)))]

    # --- arrays ---------------------------------------------------------------------------------------------------

    def _items(self, schema: dict[str, Any], at: str, hold: bool) -> list[Shape]:
        count = len(self._parts(schema, at, "prefixItems")) if "prefixItems" in schema else 0
        prefix = [self._must(at, "prefixItems", place, hold=hold) for place in range(count)]
        if isinstance(schema.get("items"), list):
            raise refuse(at, "items", "must be a schema; the first items' own are prefixItems")
        if hold:
            rest = self._must(at, "items") if "items" in schema else ANY
            return [replace(ALL, arrays=Arrays(tuple(prefix), rest))]
        shapes = [
            Shape(arrays=Arrays((*[ANY] * place, formula), least=place + 1)) for place, formula in enumerate(prefix)
        ]
        if schema.get("items") is False:
            shapes.append(Shape(arrays=Arrays(least=count + 1)))
        elif schema.get("items", True) not in (True, {}):
            if count:
                raise refuse(at, "items", "cannot be negated beside prefixItems")
            shapes.append(Shape(arrays=Arrays(contains=((self._must(at, "items", hold=False), 1, None),))))
        return shapes

    def _array_length(self, schema: dict[str, Any], at: str, hold: bool) -> list[Shape]:
        return _counted(schema, at, hold, "Items", lambda least, most: Shape(arrays=Arrays(least=least, most=most)))

    def _contains(self, schema: dict[str, Any], at: str, hold: bool) -> list[Shape]:
        least = _count(schema, at, "minContains") if "minContains" in schema else 1
        most = _count(schema, at, "maxContains") if "maxContains" in schema else None
        formula = self._must(at, "contains")

        def arrays(low: int, high: int | None) -> Arrays:
            return Arrays(contains=((formula, low, high),) if low or high is not None else ())

        if hold:
            return (
                [replace(ALL, arrays=arrays(least, most))]
                if most is None or least <= most
                else [replace(ALL, arrays=None)]
            )
        fewer = [Shape(arrays=arrays(0, least - 1))] if least else []
        return fewer if most is None else [*fewer, Shape(arrays=arrays(most + 1, None))]

    def _unique(self, schema: dict[str, Any], at: str, hold: bool) -> list[Shape]:
        if schema["uniqueItems"] is not True:
            return [ALL] if hold else []
        if not hold:
            raise refuse(at, "uniqueItems", "cannot be negated")
        return [replace(ALL, arrays=Arrays(unique=True))]

    # --- objects --------------------------------------------------------------------------------------------------

    def _properties(self, schema: dict[str, Any], at: str, hold: bool) -> list[Shape]:
        for keyword in ("properties", "patternProperties"):
            if not isinstance(schema.get(keyword, {}), dict):
                raise refuse(at, keyword, "must be an object of schemas")
        members = [(name, self._must(at, "properties", name, hold=hold)) for name in schema.get("properties", {})]
        matching = [
            (self._search(pattern, at, "patternProperties"), self._must(at, "patternProperties", pattern))
            for pattern in schema.get("patternProperties", {})
        ]
        rest = schema.get("additionalProperties", True)
        if not hold:
            if any(formula for _, formula in matching):
                raise refuse(at, "patternProperties", "cannot be negated")
            if rest not in (True, {}):
                raise refuse(at, "additionalProperties", "cannot be negated")
            return [Shape(objects=Objects((member,), (member[0],), least=1)) for member in members]
        others: tuple[Others, ...] = ()
        if rest is not True:
            names = frozenset(name for name, _ in members)
            others = (Others(names, tuple(found for found, _ in matching), self._must(at, "additionalProperties")),)
        extra = ("additionalProperties" in schema and rest is not False) or bool(matching)
        return [replace(ALL, objects=Objects(tuple(members), (), frozenset(), tuple(matching), others, extra=extra))]

    def _required(self, schema: dict[str, Any], at: str, hold: bool) -> list[Shape]:
        names = _names(schema["required"], at, "required")
        if hold:
            return [replace(ALL, objects=Objects(required=names, least=len(names)))]
        return [Shape(objects=Objects(absent=frozenset([name]))) for name in names]

    def _object_size(self, schema: dict[str, Any], at: str, hold: bool) -> list[Shape]:
        def shape(least: int, most: int | None) -> Shape:
            return Shape(objects=Objects(least=least, most=most))

        return _counted(schema, at, hold, "Properties", shape)

    def _property_names(self, schema: dict[str, Any], at: str, hold: bool) -> list[Shape]:
        if not hold:
            raise refuse(at, "propertyNames", "cannot be negated")
        language = self.language(self._must(at, "propertyNames"))
        return [ALL if language is None else replace(ALL, objects=Objects(names=(language,)))]

    def _dependent(self, schema: dict[str, Any], at: str, hold: bool) -> list[Shape]:
        result = [ALL] if hold else []
        for keyword in ("dependentRequired", "dependentSchemas"):
            if not isinstance(schema.get(keyword, {}), dict):
                raise refuse(at, keyword, "must be an object")
            for name, needed in schema.get(keyword, {}).items():
                present = Shape(objects=Objects(required=(name,), least=1))
                if keyword == "dependentRequired":
                    formula = self._given(
                        at, f"{keyword}/{name}", {"required": list(_names(needed, at, keyword))}, hold
                    )
                else:
                    formula = self._must(at, keyword, name, hold=hold)
                consequence = self._together([present], self.shapes(formula), at)
                if hold:
                    without = replace(ALL, objects=Objects(absent=frozenset([name])))
                    result = self._together(result, [without, *consequence], at)
                else:
                    result += consequence
        return result


def text_language(strings: Strings) -> Language:
    """Return the texts of a shape's strings as one set."""
    if strings.words is not None:
        return either(*(word(text) for text in strings.words))
    lengths = [repeat(ANY_CHARACTER, strings.least, strings.most)] if strings.least or strings.most is not None else []
    return both(*strings.languages, *lengths)


def _counted(
    schema: dict[str, Any], at: str, hold: bool, what: str, shape: Callable[[int, int | None], Shape]
) -> list[Shape]:
    """Return the shapes of a pair of keywords min… and max…; ``shape`` makes the one of a range, of one type."""
    least = _count(schema, at, f"min{what}") if f"min{what}" in schema else 0
    most = _count(schema, at, f"max{what}") if f"max{what}" in schema else None
    if not hold:
        return [shape(0, least - 1)] * bool(least) + ([] if most is None else [shape(most + 1, None)])
    limited = shape(least, most)
    if most is not None and most < least:
        limited = NONE
    rest = join(kind for kind in BY_TYPE.values() if meet(kind, shape(0, None)) == NONE)
    return [join([rest, limited])]


def _count(schema: dict[str, Any], at: str, keyword: str) -> int:
    value = schema[keyword]
    if isinstance(value, bool) or not isinstance(value, int | Decimal) or value < 0 or value != int(value):
        raise refuse(at, keyword, f"must be a whole number from 0, got {value!r:.50}")
    if value > 1_000_000:
        raise refuse(at, keyword, f"must be at most 1000000, got {value!r:.50}")
    return int(value)


def _names(names: object, at: str, keyword: str) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise refuse(at, keyword, "must be a list of names")
    return tuple(dict.fromkeys(names))


def _decimals(values: list[Any]) -> tuple[Decimal, ...]:
    found = (Decimal(value) for value in values if isinstance(value, int | Decimal) and not isinstance(value, bool))
    return tuple(dict.fromkeys(found))


def _exactly(value: list[Any] | dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one array or object."""
    if isinstance(value, list):
        prefix = {"prefixItems": [{"const": item} for item in value]} if value else {}
        return {"type": "array", "items": False, "minItems": len(value), **prefix}
    members = {name: {"const": item} for name, item in value.items()}
    return {"type": "object", "properties": members, "required": list(value), "additionalProperties": False}


_BOUNDS: dict[str, Callable[[Decimal], Language]] = {
    "minimum": numbers.at_least,
    "maximum": numbers.at_most,
    "exclusiveMinimum": lambda bound: numbers.at_least(bound, above=True),
    "exclusiveMaximum": lambda bound: numbers.at_most(bound, below=True),
    "multipleOf": numbers.multiples,
}
_Handler = Callable[[Keywords, dict[str, Any], str, bool], list[Shape]]
_KEYWORDS: tuple[tuple[tuple[str, ...], _Handler], ...] = (
    (("type",), Keywords._type),
    (("enum", "const"), Keywords._values),
    (("$ref",), Keywords._ref),
    (("properties", "patternProperties", "additionalProperties"), Keywords._properties),
    (("required",), Keywords._required),
    (("minProperties", "maxProperties"), Keywords._object_size),
    (("propertyNames",), Keywords._property_names),
    (("prefixItems", "items"), Keywords._items),
    (("minItems", "maxItems"), Keywords._array_length),
    (("contains",), Keywords._contains),
    (("uniqueItems",), Keywords._unique),
    (tuple(_BOUNDS), Keywords._number),
    (("minLength", "maxLength"), Keywords._length),
    (("pattern",), Keywords._pattern),
    (("format",), Keywords._format),
    (("allOf",), Keywords._all_of),
    (("anyOf",), Keywords._any_of),
    (("oneOf",), Keywords._one_of),
    (("not",), Keywords._not),
    (("if",), Keywords._if),
    (("dependentRequired", "dependentSchemas"), Keywords._dependent),
)
_KNOWN = frozenset(keyword for keywords, _ in _KEYWORDS for keyword in keywords)
