"""Sets of texts: regular expressions with intersection and complement, by derivatives (Brzozowski; Owens et al.).

A text is a sequence of code points. The derivative of a set by a code point is the set of what may follow it, so an
automaton's states are sets, made as they are met. Equal sets are mostly equal terms, which keeps the states finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

Ranges = tuple[tuple[int, int], ...]  # of code points, inclusive, ascending and apart

LAST = 0x10FFFF
# What a text of a model may hold: no surrogates, and nothing that begins like SPECIAL_MARK (vocabulary.py).
ANY_RANGES: Ranges = ((0, 0xD7FF), (0xE000, 0xFFFFF))


class TooLarge(Exception):
    """The automaton would have more states than a grammar should have."""


class Language:
    """A set of texts."""

    def nullable(self) -> bool:
        """Return whether the empty text is in it."""
        raise NotImplementedError

    def after(self, point: int) -> Language:
        """Return the set of what may follow a code point."""
        raise NotImplementedError

    def cuts(self) -> frozenset[int]:
        """Return code points between which ``after`` does not change."""
        raise NotImplementedError

    def __contains__(self, text: str) -> bool:
        language = self
        for character in text:
            language = language.after(ord(character))
        return language.nullable()


@dataclass(frozen=True)
class Characters(Language):
    """All texts of one code point out of ``ranges``; without ranges no text at all."""

    ranges: Ranges

    def nullable(self) -> bool:
        return False

    def after(self, point: int) -> Language:
        return EMPTY_TEXT if any(low <= point <= high for low, high in self.ranges) else NOTHING

    def cuts(self) -> frozenset[int]:
        return frozenset(cut for low, high in self.ranges for cut in (low, high + 1))


@dataclass(frozen=True)
class Sequenced(Language):
    """Texts of ``first`` followed by texts of ``rest``."""

    first: Language
    rest: Language

    def nullable(self) -> bool:
        return self.first.nullable() and self.rest.nullable()

    def after(self, point: int) -> Language:
        here = sequence(self.first.after(point), self.rest)
        return either(here, self.rest.after(point)) if self.first.nullable() else here

    def cuts(self) -> frozenset[int]:
        return self.first.cuts() | self.rest.cuts() if self.first.nullable() else self.first.cuts()


@dataclass(frozen=True)
class Repeated(Language):
    """``least`` to ``most`` texts of ``item`` in a row; most None for any number."""

    item: Language
    least: int
    most: int | None

    def nullable(self) -> bool:
        return self.least == 0 or self.item.nullable()

    def after(self, point: int) -> Language:
        most = None if self.most is None else self.most - 1
        return sequence(self.item.after(point), repeat(self.item, max(0, self.least - 1), most))

    def cuts(self) -> frozenset[int]:
        return self.item.cuts()


@dataclass(frozen=True)
class Either(Language):
    """Texts of any of ``parts``."""

    parts: frozenset[Language]

    def nullable(self) -> bool:
        return any(part.nullable() for part in self.parts)

    def after(self, point: int) -> Language:
        return either(*(part.after(point) for part in self.parts))

    def cuts(self) -> frozenset[int]:
        return frozenset().union(*(part.cuts() for part in self.parts))


@dataclass(frozen=True)
class Complement(Language):
    """Texts that are not of ``part``."""

    part: Language

    def nullable(self) -> bool:
        return not self.part.nullable()

    def after(self, point: int) -> Language:
        return complement(self.part.after(point))

    def cuts(self) -> frozenset[int]:
        return self.part.cuts()


NOTHING = Characters(())
EMPTY_TEXT = Repeated(NOTHING, 0, 0)
ANY_CHARACTER = Characters(ANY_RANGES)
ANYTHING = Repeated(ANY_CHARACTER, 0, None)


def characters(*ranges: tuple[int, int] | str) -> Language:
    """Return the texts of one character; a string stands for each of its characters."""
    points: list[tuple[int, int]] = []
    for entry in ranges:
        points += [(ord(c), ord(c)) for c in entry] if isinstance(entry, str) else [entry]
    return Characters(union(points))


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the ranges joined."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return tuple(joined)


def outside(ranges: Ranges) -> Ranges:
    """Return the code points that a text may hold and that are not in ``ranges``."""
    points = [point for low, high in ANY_RANGES for point in _less(low, high, ranges)]
    return union(points)


def _less(low: int, high: int, ranges: Ranges) -> Iterable[tuple[int, int]]:
    for start, end in ranges:
        if end < low or start > high:
            continue
        if start > low:
            yield low, start - 1
        low = end + 1
    if low <= high:
        yield low, high


def word(text: str) -> Language:
    """Return the set of one text."""
    return sequence(*(characters(character) for character in text))


def sequence(*parts: Language) -> Language:
    """Return texts of each part in a row."""
    result: Language = EMPTY_TEXT
    for part in reversed(parts):
        if part == NOTHING or result == NOTHING:
            return NOTHING
        if part == EMPTY_TEXT:
            continue
        if result == EMPTY_TEXT:
            result = part
        elif isinstance(part, Sequenced):
            result = sequence(part.first, sequence(part.rest, result))
        else:
            result = Sequenced(part, result)
    return result


def repeat(item: Language, least: int, most: int | None) -> Language:
    """Return ``least`` to ``most`` texts of ``item`` in a row."""
    if most == 0 or item == EMPTY_TEXT:
        return EMPTY_TEXT
    if item == NOTHING:
        return EMPTY_TEXT if least == 0 else NOTHING
    if isinstance(item, Repeated) and item.least <= 1:  # (a?){2,3} is a{0,6}: every number of them in between occurs
        all_in_all = None if most is None or item.most is None else most * item.most
        return repeat(item.item, least * item.least, all_in_all)
    return item if (least, most) == (1, 1) else Repeated(item, 0 if item.nullable() else least, most)


def either(*parts: Language) -> Language:
    """Return texts of any part."""
    flat: set[Language] = set()
    for part in parts:
        flat |= part.parts if isinstance(part, Either) else {part}
    flat.discard(NOTHING)
    if ANYTHING in flat or any(complement(part) in flat for part in flat):
        return ANYTHING
    single = [part for part in flat if isinstance(part, Characters)]
    if len(single) > 1:
        flat -= set(single)
        flat.add(Characters(union(pair for part in single for pair in part.ranges)))
    return next(iter(flat), NOTHING) if len(flat) < 2 else Either(frozenset(flat))


def both(*parts: Language) -> Language:
    """Return texts of all parts."""
    return complement(either(*map(complement, parts)))


def complement(part: Language) -> Language:
    """Return the texts that are not in it."""
    if isinstance(part, Complement):
        return part.part
    if part == NOTHING:
        return ANYTHING
    return NOTHING if part == ANYTHING else Complement(part)


@dataclass(frozen=True)
class Automaton:
    """A deterministic automaton; state 0 is its start. edges: of each state (ranges, next state), without states that
    lead nowhere; ends: of each state whether a text may end there."""

    edges: Sequence[Sequence[tuple[Ranges, int]]]
    ends: Sequence[bool]


@lru_cache(maxsize=256)
def automaton(language: Language, most_states: int) -> Automaton | None:
    """Return the automaton of a set, None for a set without texts. Raises TooLarge: it has more than
    ``most_states``."""
    places = {language: 0}
    states = [language]
    steps: list[dict[int, list[tuple[int, int]]]] = []
    for state in states:  # grows while it runs
        by_next: dict[int, list[tuple[int, int]]] = {}
        cuts = sorted({cut for cut in state.cuts() if 0 < cut <= LAST} | {0, LAST + 1})
        for low, after_high in zip(cuts, cuts[1:], strict=False):
            following = state.after(low)
            if following == NOTHING:
                continue
            place = places.setdefault(following, len(states))
            if place == len(states):
                states.append(following)
                if len(states) > most_states:
                    raise TooLarge
            by_next.setdefault(place, []).append((low, after_high - 1))
        steps.append(by_next)
    alive = {place for place, state in enumerate(states) if state.nullable()}
    while more := {p for p, by_next in enumerate(steps) if p not in alive and not alive.isdisjoint(by_next)}:
        alive |= more
    if 0 not in alive:
        return None
    edges = []
    for by_next in steps:
        kept = []
        for place, ranges in by_next.items():
            within = outside(outside(union(ranges)))
            if place in alive and within:
                kept.append((within, place))
        edges.append(kept)
    return Automaton(edges, [state.nullable() for state in states])
