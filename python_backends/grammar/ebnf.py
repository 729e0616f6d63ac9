"""A grammar under construction, written as the EBNF that xgrammar reads.

What it costs there decided the forms: a state in which almost every token is allowed costs 5 to 10 ms to compile, so a
long repetition is built of blocks that share their states (benchmarks/LOG.md), and no text can be read in two ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contract.errors import InvalidArgument
from python_backends.grammar.languages import (
    ANY_CHARACTER,
    ANY_RANGES,
    Characters,
    Either,
    Language,
    Ranges,
    Repeated,
    Sequenced,
    automaton,
    outside,
    union,
)

_BLOCK = 16  # characters whose states a long repetition of characters shares
_LONGEST_PLAIN = 16  # repetitions written as such
_MOST_STATES = 400
_DEEPEST = 32  # states of an automaton inside each other, in one rule
_MOST_RULES = 20_000
_ESCAPES = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
_UNESCAPED: Ranges = outside(union([(0, 31), (34, 34), (92, 92)]))


class TooManyRules(Exception):
    """The grammar is larger than any that would compile in time."""


@dataclass(frozen=True)
class Class:
    """One character of these ranges."""

    ranges: Ranges


@dataclass(frozen=True)
class Rule:
    """What another rule matches."""

    name: str


@dataclass(frozen=True)
class Row:
    """Its parts, one after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    """One of its parts; without parts it matches nothing."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Repetition:
    """``least`` to ``most`` times ``item``."""

    item: Node
    least: int
    most: int | None


Node = str | Class | Rule | Row | Choice | Repetition  # a part of a rule's right side; a string is exactly this text
END = ""
NEVER = Choice(())


def row(*parts: Node) -> Node:
    """Return the parts in a row."""
    flat = (node for part in parts for node in (part.parts if isinstance(part, Row) else (part,)))
    nodes = [node for node in flat if node != END]
    return nodes[0] if len(nodes) == 1 else Row(tuple(nodes)) if nodes else END


def choice(*parts: Node) -> Node:
    """Return one of the parts."""
    kept = tuple(dict.fromkeys(part for part in parts if part != NEVER))
    return kept[0] if len(kept) == 1 else Choice(kept)


class Grammar:
    """Rules by name."""

    def __init__(self) -> None:
        self._rules: dict[str, Node] = {}
        self._blocks: dict[tuple[Node, str, int], Node] = {}

    def reserve(self, kind: str) -> Rule:
        """Return a new rule, to be defined later: rules may need each other."""
        name = f"{kind}{len(self._rules)}"
        if len(self._rules) >= _MOST_RULES:
            raise TooManyRules
        self._rules[name] = NEVER
        return Rule(name)

    def define(self, rule: Rule, node: Node) -> Rule:
        """Set what a reserved rule matches."""
        self._rules[rule.name] = node
        return rule

    def named(self, kind: str, node: Node) -> Node:
        """Return a new rule for a node; one that is short stays as it is."""
        return node if isinstance(node, Rule | str) or node == NEVER else self.define(self.reserve(kind), node)

    def language(self, language: Language, *, json: bool) -> Node:
        """Return what matches the texts of a set; json: as they are written inside the quotes of a JSON string. Raises
        TooLarge: see automaton."""
        node = self._plain(language, json)
        return self._automaton(language, json) if node is None else node

    def repeated(self, item: Node, least: int, most: int | None, block: int = 1) -> Node:
        """Return ``least`` to ``most`` times ``item``; a long row is made of blocks of ``block`` items."""
        if most is not None and most < least:
            return NEVER
        if most is None:
            rest: Node = Repetition(item, 0, None)
        elif most - least <= _LONGEST_PLAIN:
            rest = Repetition(item, 0, most - least) if most > least else END
        else:
            rest = self._up_to(item, block, *divmod(most - least, block))
        if least <= _LONGEST_PLAIN:
            return row(*[item] * least, rest) if least < 3 else row(Repetition(item, least, least), rest)
        blocks, single = divmod(least, block)
        exact = [self._exactly(item, block, bit) for bit in range(blocks.bit_length()) if blocks >> bit & 1]
        return row(*exact, *([Repetition(item, single, single)] if single else []), rest)

    def _exactly(self, item: Node, block: int, doublings: int) -> Node:
        """Return ``block`` * 2 ** ``doublings`` items."""
        key = (item, f"exactly {block}", doublings)
        if key not in self._blocks:
            half = self._exactly(item, block, doublings - 1) if doublings else item
            self._blocks[key] = self.named("e", row(half, half) if doublings else Repetition(item, block, block))
        return self._blocks[key]

    def _below(self, item: Node, block: int, doublings: int) -> Node:
        """Return fewer than ``block`` * 2 ** ``doublings`` items, in one way only."""
        key = (item, f"below {block}", doublings)
        if key not in self._blocks:
            if doublings:
                half = self._below(item, block, doublings - 1)
                node = choice(row(self._exactly(item, block, doublings - 1), half), half)
            else:
                node = Repetition(item, 0, block - 1) if block > 1 else END
            self._blocks[key] = self.named("u", node)
        return self._blocks[key]

    def _up_to(self, item: Node, block: int, blocks: int, single: int) -> Node:
        if not blocks:
            return Repetition(item, 0, single) if single else END
        bit = blocks.bit_length() - 1
        more = row(self._exactly(item, block, bit), self._up_to(item, block, blocks - (1 << bit), single))
        return choice(self._below(item, block, bit), more)

    def _plain(self, language: Language, json: bool) -> Node | None:
        """Return the node of a set that is made without intersection and complement."""
        if isinstance(language, Characters):
            return self._character(language.ranges, json)
        if isinstance(language, Repeated):
            item = self._plain(language.item, json)
            block = _BLOCK if isinstance(language.item, Characters) else 1
            return None if item is None else self.repeated(item, language.least, language.most, block)
        if isinstance(language, Sequenced):
            return self._all_plain(row, _in_a_row(language), json)
        if isinstance(language, Either):
            return self._all_plain(choice, sorted(language.parts, key=repr), json)
        return None

    def _all_plain(self, join: Callable[..., Node], parts: Sequence[Language], json: bool) -> Node | None:
        nodes = [node for part in parts if (node := self._plain(part, json)) is not None]
        return join(*nodes) if len(nodes) == len(parts) else None

    def _character(self, ranges: Ranges, json: bool) -> Node:
        if not json:
            within = outside(outside(ranges))
            return Class(within) if within else NEVER
        raw = outside(union([*outside(ranges), *outside(_UNESCAPED)]))
        parts: list[Node] = [Class(raw)] if raw else []
        escaped = [p for p in (*range(32), 34, 92) if any(low <= p <= high for low, high in ranges)]
        if letters := "".join(_ESCAPES[point] for point in escaped if point in _ESCAPES):
            parts.append(row("\\", Class(union((ord(letter), ord(letter)) for letter in letters))))
        if ranges != ANY_CHARACTER.ranges:
            parts += [f"\\u{point:04x}" for point in escaped if point not in _ESCAPES]
        return choice(*parts)

    def _automaton(self, language: Language, json: bool) -> Node:
        found = automaton(language, _MOST_STATES)
        if found is None:
            return NEVER
        before, depth = [0] * len(found.ends), [0] * len(found.ends)
        for place, edges in enumerate(found.edges):
            for _, following in edges:
                before[following] += 1
                depth[following] = depth[place] + 1
        before[0] = 2
        own = (place for place, count in enumerate(before) if count > 1 or depth[place] % _DEEPEST == 0)
        rules = {place: self.reserve("s") for place in own}

        def body(place: int) -> Node:
            ways = [
                row(self._character(ranges, json), rules[following] if following in rules else body(following))
                for ranges, following in found.edges[place]
            ]
            return choice(*ways, *([END] if found.ends[place] else []))

        for place, rule in rules.items():
            self.define(rule, body(place))
        return rules[0]

    def write(self, root: Node) -> str:
        """Return the EBNF; empty if no finite text matches ``root``. Parts that match no finite text are left out, and
        rules that nothing needs."""
        finite: set[str] = set()
        size = -1
        while size != len(finite):
            size = len(finite)
            for name, node in self._rules.items():
                if name not in finite and _finite(node, finite):
                    finite.add(name)
        if not _finite(root, finite):
            return ""
        lines: dict[str, str] = {}
        needed: list[tuple[str, Node]] = [("root", root)]
        for name, node in needed:  # grows while it runs
            if name not in lines:
                lines[name] = f"{name} ::= {_written(_pruned(node, finite, needed, self._rules))}"
        return "\n".join(lines.values()) + "\n"


def _finite(node: Node, finite: set[str]) -> bool:
    match node:
        case Rule(name):
            return name in finite
        case Row(parts):
            return all(_finite(part, finite) for part in parts)
        case Choice(parts):
            return any(_finite(part, finite) for part in parts)
        case Repetition(item, least, _):
            return least == 0 or _finite(item, finite)
    return True


def _pruned(node: Node, finite: set[str], needed: list[tuple[str, Node]], rules: dict[str, Node]) -> Node:
    match node:
        case Rule(name):
            needed.append((name, rules[name]))
        case Row(parts):
            return row(*(_pruned(part, finite, needed, rules) for part in parts))
        case Choice(parts):
            return choice(*(_pruned(part, finite, needed, rules) for part in parts if _finite(part, finite)))
        case Repetition(item, least, most):
            return Repetition(_pruned(item, finite, needed, rules), least, most) if _finite(item, finite) else END
    return node


def _written(node: Node, inside: bool = False) -> str:
    match node:
        case str(text):
            if bad := next((c for c in text if not any(low <= ord(c) <= high for low, high in ANY_RANGES)), ""):
                problem = f"must hold no surrogates and no characters from U+100000, got U+{ord(bad):04X}"
                raise InvalidArgument("guided_decoding_guide", problem)
            return '"' + "".join(_point(ord(c), " !#$%&()*+,-./:;<=>?@[]^_`{|}~'") for c in text) + '"'
        case Class(ranges):
            spans = (_point(low) if low == high else f"{_point(low)}-{_point(high)}" for low, high in ranges)
            return f"[{''.join(spans)}]"
        case Rule(name):
            return name
        case Repetition(item, least, most):
            counts = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
            repeated = _written(item, inside=True)
            if isinstance(item, Repetition):  # xgrammar reads one count behind an element
                repeated = f"({repeated})"
            return repeated + (counts or f"{{{least},{'' if most is None else most}}}")
        case Row(parts):
            text = " ".join(_written(part, inside=True) for part in parts)
        case Choice(parts):
            text = " | ".join(_written(part, isinstance(part, Choice)) for part in parts)
    return f"({text})" if inside else text


def _in_a_row(language: Language) -> list[Language]:
    parts: list[Language] = []
    while isinstance(language, Sequenced):
        parts.append(language.first)
        language = language.rest
    return [*parts, language]


def _point(point: int, plain: Sequence[str] = "") -> str:
    character = chr(point)
    if character in plain or (character.isascii() and character.isalnum()):
        return character
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"
