"""Regular expressions as JSON schemas write them (ECMA-262), as far as they describe regular sets."""

from __future__ import annotations

from python_backends.grammar.languages import (
    ANY_RANGES,
    ANYTHING,
    EMPTY_TEXT,
    Characters,
    Language,
    Ranges,
    either,
    outside,
    repeat,
    sequence,
    union,
)

_DIGITS: Ranges = ((48, 57),)
_WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE: Ranges = union(
    [(9, 13), (32, 32), (160, 160), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)]
    + [(0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]
)
_NEWLINES: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_MOST_REPEATS = 100_000
_MOST_DEPTH = 100


class BadPattern(Exception):
    """The message says what is wrong, and at which character."""


def search(pattern: str) -> Language:
    """Return the texts in which the pattern is found anywhere, as JSON schema's ``pattern`` means it. Raises
    BadPattern: it is none, or not a regular one (look-around, back-references, word borders)."""
    return _Parser(pattern).parse(ANYTHING)


def whole(pattern: str) -> Language:
    """Return the texts that the pattern matches from their first to their last character. Raises BadPattern: see
    ``search``."""
    return _Parser(pattern).parse(EMPTY_TEXT)


class _Parser:
    """A recursive descent; ``_at`` is the next character."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._at, self._depth = pattern, 0, 0

    def parse(self, around: Language) -> Language:
        """around: what may stand before and after, where no anchor forbids it."""
        language = self._alternatives(around, outermost=True)
        if self._at < len(self._pattern):
            raise self._bad("an unmatched )")
        return language

    def _alternatives(self, around: Language, outermost: bool) -> Language:
        branches = [self._branch(around, outermost)]
        while self._take("|"):
            branches.append(self._branch(around, outermost))
        return either(*branches)

    def _branch(self, around: Language, outermost: bool) -> Language:
        parts: list[Language] = []
        before = after = around if outermost else EMPTY_TEXT
        if outermost and self._take("^"):
            before = EMPTY_TEXT
        while self._at < len(self._pattern) and self._next not in "|)":
            if outermost and self._next == "$" and self._pattern[self._at + 1 : self._at + 2] in ("", "|"):
                self._at += 1
                after = EMPTY_TEXT
                break
            parts.append(self._quantified())
        return sequence(before, *parts, after)

    def _quantified(self) -> Language:
        item = self._atom()
        if self._next in tuple("*+?"):
            item = repeat(item, *{"*": (0, None), "+": (1, None), "?": (0, 1)}[self._pop()])
        elif self._next == "{":
            item = repeat(item, *self._counts())
        else:
            return item
        self._take("?")  # a lazy quantifier matches the same texts
        if self._next in tuple("*+?{"):
            raise self._bad(f"a {self._next} after another quantifier, as possessive ones have it,")
        return item

    def _counts(self) -> tuple[int, int | None]:
        end = self._pattern.find("}", self._at)
        low, comma, high = self._pattern[self._at + 1 : end].partition(",")
        if end < 0 or not (low.isdecimal() and (high.isdecimal() or not high)):
            raise self._bad("a { that begins no {m}, {m,} or {m,n}")
        self._at = end + 1
        least = int(low[:9])
        most = int(high[:9]) if high else None if comma else least
        if max(least, most or 0) > _MOST_REPEATS:
            raise self._bad(f"more than {_MOST_REPEATS} repetitions")
        if most is not None and most < least:
            raise self._bad("a {m,n} with n below m")
        return least, most

    def _atom(self) -> Language:
        character = self._pop()
        if character == "(":
            return self._group()
        if character == "[":
            return Characters(self._bracket())
        if character == ".":
            return Characters(outside(_NEWLINES))
        if character == "\\":
            return Characters(self._escape(in_bracket=False))
        if character in "*+?{":
            raise self._bad(f"a {character} that repeats nothing")
        if character in "^$":
            raise self._bad(f"a {character} that is not at an end of the pattern")
        return Characters(((ord(character), ord(character)),))

    def _group(self) -> Language:
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise self._bad(f"more than {_MOST_DEPTH} groups inside each other")
        if self._take("?"):
            name = self._pattern.find(">", self._at)
            looks = self._pattern.startswith(("<=", "<!"), self._at)
            if self._pattern.startswith(("<", "P<"), self._at) and not looks and name > 0:
                self._at = name + 1
            elif not self._take(":"):
                raise self._bad("look-around, or a flag, which no grammar can express")
        language = self._alternatives(EMPTY_TEXT, outermost=False)
        if not self._take(")"):
            raise self._bad("a ( without its )")
        self._depth -= 1
        return language

    def _bracket(self) -> Ranges:
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        while not self._take("]"):
            low = self._member()
            ranged = self._next == "-" and self._pattern[self._at + 1 : self._at + 2] != "]"
            if ranged and len(low) == 1 and low[0][0] == low[0][1]:
                self._at += 1
                high = self._member()
                if len(high) != 1 or high[0][0] != high[0][1] or high[0][0] < low[0][0]:
                    raise self._bad("a range whose end is below its start")
                low = ((low[0][0], high[0][0]),)
            ranges += low
        joined = union(ranges)
        return outside(joined) if negated else outside(outside(joined))

    def _member(self) -> Ranges:
        if self._at >= len(self._pattern):
            raise self._bad("a [ without its ]")
        character = self._pop()
        return self._escape(in_bracket=True) if character == "\\" else ((ord(character), ord(character)),)

    def _escape(self, in_bracket: bool) -> Ranges:
        if self._at >= len(self._pattern):
            raise self._bad("a \\ at the end")
        character = self._pop()
        if character.lower() in _CLASSES:
            ranges = _CLASSES[character.lower()]
            return ranges if character.islower() else outside(ranges)
        if character == "b" and in_bracket:
            return ((8, 8),)
        if character in _CONTROLS and not (character == "0" and self._next.isdecimal()):
            return ((_CONTROLS[character],) * 2,)
        if character in "xu":
            return ((self._hexadecimal(character),) * 2,)
        if character.isalnum():
            raise self._bad(f"\\{character}, which no grammar can express")
        return ((ord(character), ord(character)),)

    def _hexadecimal(self, kind: str) -> int:
        if kind == "u" and self._take("{"):
            end = self._pattern.find("}", self._at)
            digits, self._at = self._pattern[self._at : max(end, 0)], end + 1
        else:
            length = 4 if kind == "u" else 2
            digits, self._at = self._pattern[self._at : self._at + length], self._at + length
            digits = digits if len(digits) == length else ""
        try:
            point = int(digits, 16)
        except ValueError:
            raise self._bad(f"\\{kind} without its hexadecimal digits") from None
        if not any(low <= point <= high for low, high in ANY_RANGES):
            raise self._bad(f"\\{kind}{digits}, which is no character")
        return point

    @property
    def _next(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _pop(self) -> str:
        self._at += 1
        return self._pattern[self._at - 1]

    def _take(self, character: str) -> bool:
        if self._next != character:
            return False
        self._at += 1
        return True

    def _bad(self, what: str) -> BadPattern:
        return BadPattern(f"has {what} before character {self._at}")
