"""The keywords of JSON schema (draft 2020-12): each as the shapes that satisfy it, and those that violate it.

What cannot be said exactly is refused by keyword and place; nothing is ignored but annotations.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any, TypeVar
from urllib.parse import unquote

from contract.errors import InvalidArgument
from python_backends.grammar import numbers, patterns
from python_backends.grammar.languages import (
    ANY_CHARACTER,
    ANYTHING,
    NOTHING,
    Characters,
    Language,
    Repeated,
    both,
    complement,
    either,
    repeat,
    word,
)
from python_backends.grammar.shapes import (
    ALL,
    ANY,
    BY_TYPE,
    NONE,
    Arrays,
    Formula,
    Literal,
    Numbers,
    Objects,
    Others,
    Shape,
    Strings,
    join,
    meet,
    of_name,
)

ANNOTATIONS = frozenset(
    "$schema $id $comment $defs definitions title description default examples example deprecated readOnly writeOnly"
    " discriminator contentMediaType contentEncoding contentSchema then else minContains maxContains".split()
)
_MOST_SHAPES = 256
_MOST_DIGITS = 400  # of a number, written without an exponent as the grammar writes it; no double has more
_Kind = TypeVar("_Kind", Strings, Arrays, Objects)
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
        self._schemas: dict[str, Any] = {"#": schema}
        self._shapes: dict[Literal, list[Shape]] = {}
        self._open: set[Literal] = set()
        # Types of which a literal's shapes leave out values: such a literal cannot be negated.
        self._narrow: defaultdict[Literal, set[str]] = defaultdict(set)
        self._impossible: dict[Formula, bool] = {}

    def shapes(self, formula: Formula) -> list[Shape]:
        """Return the ways to satisfy a formula; none if there are none. Raises InvalidArgument: a part cannot be
        expressed exactly."""
        result = [ALL]
        for literal in sorted(formula):
            result = self._together(result, self._literal(literal), literal[0])
        return result

    def _impossible_together(self, formula: Formula) -> bool:
        """Return whether it is certain that no value satisfies a formula."""
        if formula not in self._impossible:
            self._impossible[formula] = False  # what refers to itself is not certain
            opened, self._open = self._open, set()
            dead = all(self._dead(shape) for shape in self.shapes(formula))
            self._impossible[formula] = dead and all(
                any(kind not in self._narrow[other] and self._lacks(other, kind) for other in formula)
                for literal in formula
                for kind in self._narrow[literal]
            )
            self._open = opened
        return self._impossible[formula]

    def _lacks(self, literal: Literal, kind: str) -> bool:
        return all(getattr(shape, kind) is None for shape in self._literal(literal))

    def _leaves_out(self, kinds: set[str]) -> None:
        """Take note that the shapes of the open literals leave out values of these types."""
        for literal in self._open:
            self._narrow[literal] |= kinds

    def _dead(self, shape: Shape) -> bool:
        if shape.objects is None or replace(shape, objects=None) != NONE:
            return False
        objects, members = shape.objects, dict(shape.objects.members)
        formulas = (members.get(name, ANY) | of_name(objects, name) for name in objects.required)
        return any(map(self._impossible_together, formulas))

    def _at(self, at: str, *steps: object) -> str:
        """Return the place of a subschema, known from now on."""
        schema = self._schemas[at]
        for step in steps:
            schema = schema[step]
            at += "/" + str(step).replace("~", "~0").replace("/", "~1")
        self._schemas[at] = schema
        return at

    def _must(self, at: str, *steps: object) -> Formula:
        return frozenset([(self._at(at, *steps), True)])

    def _together(self, a: list[Shape], b: list[Shape], at: str) -> list[Shape]:
        met = dict.fromkeys(meet(x, y) for x in a for y in b)
        met.pop(NONE, None)
        return self._bounded(list(met), at)

    def _bounded(self, shapes: list[Shape], at: str) -> list[Shape]:
        if len(shapes) > _MOST_SHAPES:
            raise refuse(at, "", f"has more than {_MOST_SHAPES} combinations of alternatives")
        return shapes

    def _literal(self, literal: Literal) -> list[Shape]:
        if literal not in self._shapes:
            if literal in self._open:
                raise refuse(literal[0], "", "refers to itself without a value in between")
            self._open.add(literal)
            self._shapes[literal] = self._schema(literal[0]) if literal[1] else self._negated(literal[0])
            self._open.discard(literal)
        self._leaves_out(self._narrow[literal])
        return self._shapes[literal]

    def _schema(self, at: str) -> list[Shape]:
        schema = self._schemas[at]
        if isinstance(schema, bool):
            return [ALL] if schema else []
        if not isinstance(schema, dict):
            raise refuse(at, "", f"must be an object or a boolean, got {json.dumps(schema, default=str)[:50]}")
        result = [ALL]
        for keywords, shapes_of in _KEYWORDS:
            if any(keyword in schema for keyword in keywords):
                result = self._together(result, shapes_of(self, schema, at), at)
        for keyword in schema:
            if keyword not in _KNOWN and keyword not in ANNOTATIONS and not keyword.startswith("x-"):
                raise refuse(at, keyword, "is not supported")
            if keyword == "$id" and at != "#":
                raise refuse(at, keyword, "is not supported below the root")
        return result

    def _negated(self, at: str) -> list[Shape]:
        """Return the shapes of all values that do not satisfy a subschema."""
        result, shapes = [ALL], self._literal((at, True))
        if self._narrow[at, True]:
            raise refuse(at, "format", "cannot be negated")
        for shape in shapes:
            rest = Shape(
                not shape.null,
                ALL.booleans - shape.booleans,
                _other_numbers(shape.numbers),
                _other_strings(shape.strings),
                Arrays() if shape.arrays is None else None,
                Objects() if shape.objects is None else None,
            )
            arrays = [] if shape.arrays is None else self._other_arrays(shape.arrays, at)
            objects = [] if shape.objects is None else self._other_objects(shape.objects, at)
            others = [rest, *(Shape(arrays=other) for other in arrays), *(Shape(objects=other) for other in objects)]
            result = self._together(result, others, at)
        return result

    @staticmethod
    def _other_arrays(arrays: Arrays, at: str) -> list[Arrays]:
        if arrays.unique:
            raise refuse(at, "uniqueItems", "cannot be negated")
        if arrays.rest and arrays.prefix:
            raise refuse(at, "items", "cannot be negated beside prefixItems")
        others = [Arrays(most=arrays.least - 1)] if arrays.least else []
        if arrays.most is not None:
            others.append(Arrays(least=arrays.most + 1))
        for place, formula in enumerate(arrays.prefix):
            others += [Arrays((*[ANY] * place, other), least=place + 1) for other in negations(formula)]
        others += [Arrays(contains=((other, 1, None),)) for other in negations(arrays.rest)]
        for formula, least, most in arrays.contains:
            others += [Arrays(contains=((formula, 0, least - 1),))] if least else []
            others += [Arrays(contains=((formula, most + 1, None),))] if most is not None else []
        return others

    @staticmethod
    def _other_objects(objects: Objects, at: str) -> list[Objects]:
        for keyword, given in (
            ("patternProperties", any(formula for _, formula in objects.patterns)),
            ("additionalProperties", any(others.formula for others in objects.others)),
            ("propertyNames", objects.names),
        ):
            if given:
                raise refuse(at, keyword, "cannot be negated")
        others = [Objects(most=objects.least - 1)] if objects.least > len(objects.required) else []
        if objects.most is not None:
            others.append(Objects(least=objects.most + 1))
        others += [Objects(absent=frozenset([name])) for name in objects.required]
        others += [Objects(required=(name,), least=1) for name in objects.absent]
        for name, formula in objects.members:
            others += [Objects(((name, other),), (name,), least=1) for other in negations(formula)]
        return others

    def _type(self, schema: dict[str, Any], at: str) -> list[Shape]:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        for name in names:
            if not isinstance(name, str) or name not in BY_TYPE:
                raise refuse(at, "type", f"must hold {', '.join(BY_TYPE)}, got {name!r:.50}")
        return [join(shape for name, shape in BY_TYPE.items() if name in names)]

    def _enum(self, schema: dict[str, Any], at: str) -> list[Shape]:
        if not isinstance(schema["enum"], list):
            raise refuse(at, "enum", "must be a list")
        return self._one_of_values(schema["enum"], at, "enum")

    def _one_of_values(self, values: list[Any], at: str, keyword: str) -> list[Shape]:
        words = tuple(dict.fromkeys(value for value in values if isinstance(value, str)))
        given = (value for value in values if isinstance(value, int | Decimal) and not isinstance(value, bool))
        found = tuple(dict.fromkeys(_decimal(value, at, keyword) for value in given))
        plain = Shape(
            null=any(value is None for value in values),
            booleans=frozenset(value for value in values if isinstance(value, bool)),
            numbers=Numbers(values=found) if found else None,
            strings=Strings(words=words) if words else None,
        )
        shapes = [plain]
        for place, value in enumerate(values):
            if isinstance(value, list | dict):
                own = f"{at}/{keyword}/{place}"
                self._schemas[own] = _exactly(value)
                shapes += self._literal((own, True))
        return self._bounded(shapes, at)

    def _ref(self, schema: dict[str, Any], at: str) -> list[Shape]:
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
        return self._literal((target, True))

    def _parts(self, schema: dict[str, Any], at: str, keyword: str) -> list[Literal]:
        parts = schema[keyword]
        if not isinstance(parts, list) or not parts:
            raise refuse(at, keyword, "must be a list of at least one schema")
        return [(self._at(at, keyword, place), True) for place in range(len(parts))]

    def _any_of(self, schema: dict[str, Any], at: str) -> list[Shape]:
        return self._bounded([s for part in self._parts(schema, at, "anyOf") for s in self._literal(part)], at)

    def _one_of(self, schema: dict[str, Any], at: str) -> list[Shape]:
        parts, shapes = self._parts(schema, at, "oneOf"), []
        for part in parts:
            # What excludes this part anyway need not be negated.
            overlapping = [p for p in parts if p != part and not self._impossible_together(frozenset([part, p]))]
            shapes += self.shapes(frozenset([part, *((place, False) for place, _ in overlapping)]))
        return self._bounded(shapes, at)

    def _if(self, schema: dict[str, Any], at: str) -> list[Shape]:
        if "then" not in schema and "else" not in schema:
            return [ALL]
        condition, shapes = self._at(at, "if"), []
        for keyword, met in (("then", True), ("else", False)):
            consequence = self._must(at, keyword) if keyword in schema else ANY
            shapes += self.shapes(consequence | {(condition, met)})
        return self._bounded(shapes, at)

    def _number(self, schema: dict[str, Any], at: str) -> list[Shape]:
        found: list[Language] = []
        for keyword, language_of in _BOUNDS.items():
            if keyword not in schema:
                continue
            bound = schema[keyword]
            if isinstance(bound, bool) or not isinstance(bound, int | Decimal):
                raise refuse(at, keyword, f"must be a number, got {bound!r:.50}")
            if keyword == "multipleOf" and not 0 < bound:
                raise refuse(at, keyword, f"must be above 0, got {bound}")
            found.append(language_of(_decimal(bound, at, keyword)))
        return _where(numbers=Numbers(tuple(found)))

    def _search(self, pattern: object, at: str, keyword: str) -> Language:
        if not isinstance(pattern, str):
            raise refuse(at, keyword, f"must be a regular expression, got {pattern!r:.50}")
        try:
            return patterns.search(pattern)
        except patterns.BadPattern as exc:
            raise refuse(at, keyword, str(exc)) from exc

    def _format(self, schema: dict[str, Any], at: str) -> list[Shape]:
        name = schema["format"]
        if not isinstance(name, str) or name not in FORMATS:
            raise refuse(at, "format", f"must be one of {', '.join(FORMATS)}, got {name!r:.50}")
        self._leaves_out({"strings"})
        return _where(strings=Strings((patterns.whole(FORMATS[name]),)))

    def _items(self, schema: dict[str, Any], at: str) -> list[Shape]:
        if isinstance(schema.get("items"), list):
            raise refuse(at, "items", "must be a schema; the first items' own are prefixItems")
        prefix = self._parts(schema, at, "prefixItems") if "prefixItems" in schema else []
        rest = ANY if schema.get("items", True) is True else self._must(at, "items")
        return _where(arrays=Arrays(tuple(frozenset([part]) for part in prefix), rest))

    def _contains(self, schema: dict[str, Any], at: str) -> list[Shape]:
        least = _count(schema, at, "minContains") if "minContains" in schema else 1
        most = _count(schema, at, "maxContains") if "maxContains" in schema else None
        if most is not None and most < least:
            return _where(arrays=None)
        counted = ((self._must(at, "contains"), least, most),) if least or most is not None else ()
        return _where(arrays=Arrays(contains=counted))

    def _properties(self, schema: dict[str, Any], at: str) -> list[Shape]:
        for keyword in ("properties", "patternProperties"):
            if not isinstance(schema.get(keyword, {}), dict):
                raise refuse(at, keyword, "must be an object of schemas")
        members = tuple((name, self._must(at, "properties", name)) for name in schema.get("properties", {}))
        matching = tuple(
            (self._search(pattern, at, "patternProperties"), self._must(at, "patternProperties", pattern))
            for pattern in schema.get("patternProperties", {})
        )
        rest = schema.get("additionalProperties", True)
        others: tuple[Others, ...] = ()
        if rest is not True:
            names = frozenset(name for name, _ in members)
            others = (Others(names, tuple(found for found, _ in matching), self._must(at, "additionalProperties")),)
        extra = ("additionalProperties" in schema and rest is not False) or bool(matching)
        return _where(objects=Objects(members, patterns=matching, others=others, extra=extra))

    def _property_names(self, schema: dict[str, Any], at: str) -> list[Shape]:
        formula = self._must(at, "propertyNames")
        shapes = self.shapes(formula)
        if any(self._narrow[literal] for literal in formula):
            self._leaves_out({"objects"})
        language = either(*(text_language(shape.strings) for shape in shapes if shape.strings is not None))
        return [ALL if language == ANYTHING else replace(ALL, objects=Objects(names=(language,)))]

    def _dependent(self, schema: dict[str, Any], at: str) -> list[Shape]:
        result = [ALL]
        for keyword in ("dependentRequired", "dependentSchemas"):
            if not isinstance(schema.get(keyword, {}), dict):
                raise refuse(at, keyword, "must be an object")
            for name, needed in schema.get(keyword, {}).items():
                if keyword == "dependentRequired":
                    present = [Shape(objects=_requiring((name, *_names(needed, at, keyword))))]
                else:
                    consequence = self.shapes(self._must(at, keyword, name))
                    present = self._together([Shape(objects=_requiring((name,)))], consequence, at)
                without = replace(ALL, objects=Objects(absent=frozenset([name])))
                result = self._together(result, [without, *present], at)
        return result


def negations(formula: Formula) -> list[Formula]:
    """Return formulas of which a value satisfies one if it does not satisfy ``formula``."""
    return [frozenset([(place, not hold)]) for place, hold in sorted(formula)]


def text_language(strings: Strings) -> Language:
    """Return the texts of a shape's strings as one set."""
    if strings.words is not None:
        return either(*(word(text) for text in strings.words))
    least, most = strings.least, strings.most
    match strings.languages or (ANYTHING,):
        case (Repeated(Characters() as item, fewest, limit),):  # an automaton would count the characters
            least, most = max(least, fewest), min((n for n in (most, limit) if n is not None), default=None)
            return NOTHING if most is not None and most < least else repeat(item, least, most)
    return both(*strings.languages, repeat(ANY_CHARACTER, least, most))


def _other_strings(strings: Strings | None) -> Strings | None:
    if strings is None:
        return Strings()
    return None if strings == Strings() else Strings((complement(text_language(strings)),))


def _other_numbers(given: Numbers | None) -> Numbers | None:
    if given is None:
        return Numbers()
    if given.values is not None:
        return Numbers(tuple(complement(numbers.equal(value)) for value in given.values))
    return Numbers((complement(both(*given.languages)),)) if given.languages else None


def _where(**kinds: Any) -> list[Shape]:
    """Return all values, of the given kinds only these."""
    return [replace(ALL, **kinds)]


def _requiring(names: tuple[str, ...]) -> Objects:
    names = tuple(dict.fromkeys(names))
    return Objects(required=names, least=len(names))


def _limited(kind: type[_Kind], schema: dict[str, Any], at: str, what: str) -> _Kind | None:
    """Return the values of one type within a pair of keywords min… and max…; None if there are none."""
    least = _count(schema, at, f"min{what}") if f"min{what}" in schema else 0
    most = _count(schema, at, f"max{what}") if f"max{what}" in schema else None
    return None if most is not None and most < least else kind(least=least, most=most)


def _count(schema: dict[str, Any], at: str, keyword: str) -> int:
    value = schema[keyword]
    whole = isinstance(value, int | Decimal) and value == Decimal(value).to_integral_value()
    if isinstance(value, bool) or not whole or value < 0:
        raise refuse(at, keyword, f"must be a whole number from 0, got {value!r:.50}")
    if value > 1_000_000:
        raise refuse(at, keyword, f"must be at most 1000000, got {value!r:.50}")
    return int(value)


def _names(names: object, at: str, keyword: str) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise refuse(at, keyword, "must be a list of names")
    return tuple(names)


def _decimal(value: int | Decimal, at: str, keyword: str) -> Decimal:
    number = Decimal(value)
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    if max(number.adjusted(), 0) + 1 - min(exponent, 0) > _MOST_DIGITS:
        allowed = f"allows numbers of at most {_MOST_DIGITS} digits, written without an exponent"
        raise refuse(at, keyword, f"{allowed}, got {number!s:.50}")
    return number


def _exactly(value: list[Any] | dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one array or object."""
    if isinstance(value, list):
        prefix = {"prefixItems": [{"const": item} for item in value]} if value else {}
        return {"type": "array", "minItems": len(value), "maxItems": len(value), **prefix}
    members = {name: {"const": item} for name, item in value.items()}
    return {"type": "object", "properties": members, "required": list(value), "maxProperties": len(value)}


_BOUNDS: dict[str, Callable[[Decimal], Language]] = {
    "minimum": numbers.at_least,
    "maximum": numbers.at_most,
    "exclusiveMinimum": lambda bound: numbers.at_least(bound, above=True),
    "exclusiveMaximum": lambda bound: numbers.at_most(bound, below=True),
    "multipleOf": numbers.multiples,
}
_Handler = Callable[[Keywords, dict[str, Any], str], list[Shape]]
_KEYWORDS: tuple[tuple[tuple[str, ...], _Handler], ...] = (
    (("type",), Keywords._type),
    (("enum",), Keywords._enum),
    (("const",), lambda self, schema, at: self._one_of_values([schema["const"]], at, "const")),
    (("$ref",), Keywords._ref),
    (("properties", "patternProperties", "additionalProperties"), Keywords._properties),
    (("required",), lambda self, schema, at: _where(objects=_requiring(_names(schema["required"], at, "required")))),
    (
        ("minProperties", "maxProperties"),
        lambda self, schema, at: _where(objects=_limited(Objects, schema, at, "Properties")),
    ),
    (("propertyNames",), Keywords._property_names),
    (("prefixItems", "items"), Keywords._items),
    (("minItems", "maxItems"), lambda self, schema, at: _where(arrays=_limited(Arrays, schema, at, "Items"))),
    (("contains",), Keywords._contains),
    (("uniqueItems",), lambda self, schema, at: _where(arrays=Arrays(unique=schema["uniqueItems"] is True))),
    (tuple(_BOUNDS), Keywords._number),
    (("minLength", "maxLength"), lambda self, schema, at: _where(strings=_limited(Strings, schema, at, "Length"))),
    (("pattern",), lambda self, schema, at: _where(strings=Strings((self._search(schema["pattern"], at, "pattern"),)))),
    (("format",), Keywords._format),
    (("allOf",), lambda self, schema, at: self.shapes(frozenset(self._parts(schema, at, "allOf")))),
    (("anyOf",), Keywords._any_of),
    (("oneOf",), Keywords._one_of),
    (("not",), lambda self, schema, at: self._literal((self._at(at, "not"), False))),
    (("if",), Keywords._if),
    (("dependentRequired", "dependentSchemas"), Keywords._dependent),
)
_KNOWN = frozenset(keyword for keywords, _ in _KEYWORDS for keyword in keywords)
