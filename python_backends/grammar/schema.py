"""A JSON schema as a grammar of compact JSON: no blanks, properties in the schema's order, no exponents.

Every text of the grammar is a value of the schema. Of the schema's values some are left out: other orders and
spellings, properties that an object with declared ones does not mention, numbers of more than 15 digits before or
after the point (docs/structured-output.md).
"""

from __future__ import annotations

import json
from decimal import Decimal, InvalidOperation

from contract.errors import InvalidArgument
from python_backends.grammar import numbers
from python_backends.grammar.ebnf import END, NEVER, Grammar, Node, Rule, TooManyRules, choice, row
from python_backends.grammar.keywords import Keywords, negations, refuse, text_language
from python_backends.grammar.languages import (
    ANYTHING,
    Language,
    TooLarge,
    both,
    characters,
    complement,
    either,
    outside,
    sequence,
    union,
    word,
)
from python_backends.grammar.shapes import ALL, ANY, Arrays, Formula, Numbers, Objects, Shape, Strings, of_name

_ANY_DEPTH = 4  # of a value about which the schema says nothing
_MOST_COUNTED = 2000  # states that count properties or items
_UNORDERED = 6  # unique values that may come in any order
_EXACT_NAMES = 24  # characters of declared names that other names are told from exactly


def grammar_of(text: str) -> str:
    """Return the EBNF of a JSON schema. Raises InvalidArgument: it is no schema, cannot be followed exactly, or allows
    no value; names the place."""
    try:
        schema = json.loads(text, parse_float=_decimal, parse_constant=_no_number)
        return _SchemaGrammar(Keywords(schema)).write()
    except (ValueError, RecursionError) as exc:
        problem = "its parts lie too deep inside each other" if isinstance(exc, RecursionError) else str(exc)
        raise InvalidArgument("guided_decoding_guide", f"must be a JSON schema: {problem[:200]}") from exc
    except (TooManyRules, TooLarge) as exc:
        problem = "must be a smaller schema: it needs more rules or states than compile in time"
        raise InvalidArgument("guided_decoding_guide", problem) from exc


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        raise ValueError(f"{text[:50]} has too large an exponent") from None


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class _SchemaGrammar:
    """Rules for the formulas of one schema, each made once."""

    def __init__(self, keywords: Keywords) -> None:
        self._keywords = keywords
        self._grammar = Grammar()
        self._values: dict[Formula, Rule] = {}
        self._any: dict[int, Node] = {}
        self._scalars: dict[Numbers | Strings, Node] = {}

    def write(self) -> str:
        """Return the EBNF of the whole schema."""
        text = self._grammar.write(self._value(frozenset([("#", True)])))
        if not text:
            problem = "allows no value that ends, or only some that are never generated (docs/structured-output.md)"
            raise refuse("#", "", problem)
        return text

    def _value(self, formula: Formula) -> Node:
        if formula in self._values:
            return self._values[formula]
        shapes = self._keywords.shapes(formula)
        if ALL in shapes:
            return self._anything(0)
        rule = self._values[formula] = self._grammar.reserve("v")
        self._grammar.define(rule, choice(*(self._shape(shape, formula) for shape in shapes)))
        return rule

    def _shape(self, shape: Shape, formula: Formula) -> Node:
        at = min((place for place, _ in formula), default="#")
        return choice(
            NEVER if shape.objects is None else self._objects(shape.objects, at),
            NEVER if shape.arrays is None else self._arrays(shape.arrays, at),
            NEVER if shape.strings is None else self._scalar(shape.strings),
            NEVER if shape.numbers is None else self._scalar(shape.numbers),
            *(json.dumps(value) for value in sorted(shape.booleans, reverse=True)),
            "null" if shape.null else NEVER,
        )

    def _anything(self, depth: int) -> Node:
        if depth not in self._any:
            rule = self._grammar.reserve("any")
            self._any[depth] = rule
            nested: list[Node] = []
            if depth < _ANY_DEPTH:
                inner = self._anything(depth + 1)
                member = self._grammar.named("m", row(self._scalar(Strings()), ":", inner))
                nested = [row("{", self._listed(member, 0, None), "}"), row("[", self._listed(inner, 0, None), "]")]
            scalars = self._scalar(Strings()), self._scalar(Numbers()), "true", "false", "null"
            self._grammar.define(rule, choice(*nested, *scalars))
        return self._any[depth]

    def _listed(self, item: Node, least: int, most: int | None) -> Node:
        """Return ``least`` to ``most`` items with commas between them."""
        if most == 0:
            return END if least == 0 else NEVER
        more = self._grammar.repeated(row(",", item), max(0, least - 1), None if most is None else most - 1)
        return choice(row(item, more), END) if least == 0 else row(item, more)

    def _scalar(self, shape: Numbers | Strings) -> Node:
        """Return the rule of a shape, the same wherever it occurs."""
        if shape not in self._scalars:
            node = self._numbers(shape) if isinstance(shape, Numbers) else self._strings(shape)
            self._scalars[shape] = self._grammar.named("x", node)
        return self._scalars[shape]

    def _numbers(self, shape: Numbers) -> Node:
        if shape.values is not None:
            return choice(*(f"{value:f}" for value in shape.values))
        whole = numbers.WHOLE_VALUE in shape.languages
        written = numbers.INTEGER if whole else numbers.NUMBER
        limits = [language for language in shape.languages if language != numbers.WHOLE_VALUE]
        if not limits:
            return self._grammar.language(written, json=False)
        multiples = [language for language in limits if isinstance(language, numbers.Multiples)]
        steps = [language.step * (language.places + 1) for language in multiples]
        if steps and not whole:
            written = both(written, numbers.short(max(steps)))
        elif steps:
            written = numbers.short(max(steps), whole=True)
        return self._grammar.language(both(written, complement(numbers.NEGATIVE_ZERO), *limits), json=False)

    def _strings(self, shape: Strings) -> Node:
        if shape.words is not None:
            return choice(*(json.dumps(text, ensure_ascii=False) for text in shape.words))
        return row('"', self._grammar.language(text_language(shape), json=True), '"')

    def _arrays(self, shape: Arrays, at: str) -> Node:
        if shape.unique and (shape.most is None or shape.most > 1):
            return row("[", self._unique(shape, at), "]")
        if shape.contains:
            return row("[", self._containing(shape, at), "]")
        count = len(shape.prefix)
        most = None if shape.most is None else max(0, shape.most - count)
        if not count:
            return row("[", self._listed(self._value(shape.rest), shape.least, shape.most), "]")
        least = max(0, shape.least - count)
        after = self._grammar.repeated(row(",", self._value(shape.rest)), least, most)
        for place in reversed(range(count)):
            if shape.most is not None and place >= shape.most:
                after = END
                continue
            item = row("," if place else "", self._value(shape.prefix[place]), after)
            after = self._grammar.named("i", item if place < shape.least else choice(item, END))
        return row("[", after, "]")

    def _containing(self, shape: Arrays, at: str) -> Node:
        if len(shape.contains) > 1 or shape.prefix:
            what = "cannot be combined with another contains" if len(shape.contains) > 1 else "beside prefixItems"
            raise refuse(at, "contains", f"{what}, which is not supported")
        (formula, least, most) = shape.contains[0]
        if most is not None and len(formula) > 1:
            raise refuse(at, "maxContains", "is not supported here")
        found = self._value(shape.rest | formula)
        # Beyond the least number it does not matter what an item is, unless there is a most.
        other = self._value(shape.rest if most is None else shape.rest | negations(formula)[0])
        last_length = max(shape.least, 1) if shape.most is None else shape.most  # longer ones are all alike
        last_found = least if most is None else most + 1
        if (last_length + 1) * (last_found + 1) > _MOST_COUNTED:
            raise refuse(at, "contains", f"is not supported with so large limits: {_MOST_COUNTED} states at most")
        rules = {
            (length, count): self._grammar.reserve("c")
            for length in range(last_length + 1)
            for count in range(last_found + 1)
        }
        for (length, count), rule in rules.items():
            ways: list[Node] = []
            comma = "," if length else ""
            following = min(length + 1, last_length) if shape.most is None else length + 1
            if following <= last_length:
                if most is None:
                    ways.append(row(comma, found, rules[following, min(count + 1, last_found)]))
                elif count < most:
                    ways.append(row(comma, found, rules[following, count + 1]))
                ways.append(row(comma, other, rules[following, count]))
            if length >= shape.least and count >= least:
                ways.append(END)
            self._grammar.define(rule, choice(*ways))
        return rules[0, 0]

    def _unique(self, shape: Arrays, at: str) -> Node:
        if shape.contains or shape.prefix:
            raise refuse(at, "uniqueItems", "is not supported beside prefixItems or contains")
        values = self._enumerated(shape.rest)
        if values is None:
            raise refuse(at, "uniqueItems", "is supported for items of an enumeration, or for at most one item")
        count = len(values)
        most = count if shape.most is None else min(shape.most, count)
        rules: dict[tuple[frozenset[int] | int, int], Rule] = {}
        ordered = count > _UNORDERED
        if ordered and (count + 1) * (most + 1) > _MOST_COUNTED:
            raise refuse(at, "uniqueItems", f"is not supported with so many values: {_MOST_COUNTED} states at most")

        def items(used: frozenset[int] | int, length: int) -> Node:
            """used: the values taken, or, in order, how many of the values are past."""
            if (used, length) not in rules:
                rule = rules[used, length] = self._grammar.reserve("q")
                ways: list[Node] = [END] if length >= shape.least else []
                if length < most:
                    for place, text in enumerate(values):
                        if place >= used if isinstance(used, int) else place not in used:
                            after = place + 1 if isinstance(used, int) else used | {place}
                            ways.append(row(("," if length else "") + text, items(after, length + 1)))
                self._grammar.define(rule, choice(*ways))
            return rules[used, length]

        return items(0 if ordered else frozenset(), 0)

    def _enumerated(self, formula: Formula) -> list[str] | None:
        """Return all values of a formula as JSON, None if they cannot be listed."""
        values: list[str] = []
        for shape in self._keywords.shapes(formula):
            if shape.arrays is not None or shape.objects is not None:
                return None
            if shape.strings is not None:
                if shape.strings.words is None:
                    return None
                values += [json.dumps(text, ensure_ascii=False) for text in shape.strings.words]
            if shape.numbers is not None:
                if shape.numbers.values is None:
                    return None
                values += [f"{value:f}" for value in shape.numbers.values]
            values += [json.dumps(value) for value in shape.booleans] + (["null"] if shape.null else [])
        return list(dict.fromkeys(values))

    def _objects(self, shape: Objects, at: str) -> Node:
        members = dict(shape.members) | {name: ANY for name in shape.required if name not in dict(shape.members)}
        pairs: list[tuple[Node, bool]] = []
        for name in members:
            if name in shape.absent or any(name not in language for language in shape.names):
                if name in shape.required:
                    return NEVER
                continue
            value = self._value(members[name] | of_name(shape, name))
            member = self._grammar.named("p", row(json.dumps(name, ensure_ascii=False) + ":", value))
            pairs.append((member, name in shape.required))
        extra = self._extra(shape, frozenset(members))
        required = sum(needed for _, needed in pairs)
        if shape.most is not None and required > shape.most:
            return NEVER
        counted = shape.least > required or (shape.most is not None and (extra != NEVER or len(pairs) > shape.most))
        body = self._counted(pairs, extra, shape, at) if counted else self._chain(pairs, extra)
        return row("{", body, "}")

    def _chain(self, pairs: list[tuple[Node, bool]], extra: Node) -> Node:
        """Return members in order: a chain, because all subsets of optional ones would be too many."""
        more = self._grammar.repeated(row(",", extra), 0, None)
        after: Node = more  # once a member was written
        first: Node = choice(row(extra, more), END)
        for place, (member, needed) in enumerate(reversed(pairs)):
            if place:
                after = self._grammar.named("t", after)
            first = row(member, after) if needed else choice(row(member, after), self._grammar.named("h", first))
            after = row(",", member, after) if needed else choice(row(",", member, after), after)
        return first

    def _counted(self, pairs: list[tuple[Node, bool]], extra: Node, shape: Objects, at: str) -> Node:
        """Return members in order whose number is within the limits. Names that are not declared may repeat, and a
        reader keeps one of them: towards the least they count once."""
        highest = shape.most if shape.most is not None else shape.least
        if (len(pairs) + 2) * (highest + 1) > _MOST_COUNTED:
            raise refuse(at, "minProperties" if shape.least else "maxProperties", "is too large to be counted")
        rules: dict[tuple[int, int, bool], Rule] = {}

        def members(place: int, count: int, repeated: bool) -> Node:
            """place: of the next pair; count: members so far; repeated: an undeclared one was among them."""
            key = (place, count, repeated)
            if key in rules:
                return rules[key]
            rule = rules[key] = self._grammar.reserve("n")
            ways: list[Node] = []
            comma = "," if count else ""
            room = shape.most is None or count < shape.most
            following = min(count + 1, highest) if shape.most is None else count + 1
            if place < len(pairs):
                member, needed = pairs[place]
                if room:
                    ways.append(row(comma, member, members(place + 1, following, False)))
                if not needed:
                    ways.append(members(place + 1, count, False))
            else:
                if room and extra != NEVER and not (repeated and count < shape.least):
                    ways.append(row(comma, extra, members(place, following, True)))
                if count >= shape.least:
                    ways.append(END)
            return self._grammar.define(rule, choice(*ways))

        return members(0, 0, False)

    def _extra(self, shape: Objects, declared: frozenset[str]) -> Node:
        """Return a property whose name is not declared."""
        if not shape.extra and declared:
            return NEVER
        plain = not declared and not shape.absent and not shape.patterns and not shape.names
        ways = []
        for chosen in _subsets(shape.patterns):
            inside = [language for language, _ in chosen]
            outside_of = [complement(language) for language, _ in shape.patterns if language not in inside]
            formula: Formula = frozenset().union(*(part for _, part in chosen))
            for others in shape.others:
                if not any(language in others.patterns for language in inside):
                    formula |= others.formula
            if plain:
                name = self._scalar(Strings())
            else:
                unlike = _unlike(declared | shape.absent)
                names = both(*inside, *outside_of, *shape.names, unlike)
                name = row('"', self._grammar.language(names, json=True), '"')
            if name != NEVER:
                ways.append(row(name, ":", self._value(formula)))
        return self._grammar.named("o", choice(*ways)) if ways else NEVER


def _subsets(patterns: tuple[tuple[Language, Formula], ...]) -> list[list[tuple[Language, Formula]]]:
    if len(patterns) > 4:
        raise InvalidArgument("guided_decoding_guide", "must have at most 4 patternProperties for one object")
    return [[p for place, p in enumerate(patterns) if bits >> place & 1] for bits in range(2 ** len(patterns))]


def _unlike(names: frozenset[str]) -> Language:
    """Return names other than these. To tell many apart costs too much: then those with another first character."""
    if sum(map(len, names)) <= _EXACT_NAMES:
        return complement(either(*map(word, names)))
    first = union((ord(name[0]), ord(name[0])) for name in names if name)
    return sequence(characters(*outside(first)), ANYTHING)
