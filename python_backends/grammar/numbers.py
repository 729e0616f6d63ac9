"""Sets of numbers, as JSON writes them without an exponent."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from python_backends.grammar.languages import (
    NOTHING,
    Language,
    both,
    characters,
    complement,
    either,
    repeat,
    sequence,
    word,
)
from python_backends.grammar.patterns import whole as whole_text

MOST_DIGITS = 15  # before and after the point: what a double keeps
_BEYOND = Decimal(10) ** MOST_DIGITS
_DIGIT = characters((48, 57))
_DIGITS = repeat(_DIGIT, 0, None)
_FRACTION = whole_text(r"(\.\d+)?")
_UNSIGNED = whole_text(r"(0|[1-9]\d*)(\.\d+)?")

NUMBER = whole_text(rf"-?(0|[1-9]\d{{0,{MOST_DIGITS - 1}}})(\.\d{{1,{MOST_DIGITS}}})?")
INTEGER = whole_text(rf"-?(0|[1-9]\d{{0,{MOST_DIGITS - 1}}})")
WHOLE_VALUE = whole_text(r"-?\d+(\.0+)?")  # JSON schema's integers: 1.0 is one
NEGATIVE_ZERO = whole_text(r"-0(\.0+)?")


def at_least(bound: Decimal, *, above: bool = False) -> Language:
    """Return the numbers from ``bound``, or those above it."""
    if bound >= _BEYOND:
        return NOTHING
    if bound <= -_BEYOND:
        return complement(NOTHING)
    whole_part, _, fraction = f"{abs(bound):f}".partition(".")
    whole_part, fraction = whole_part.lstrip("0") or "0", fraction.rstrip("0")
    if bound > 0 or (bound == 0 and above):
        return _from(whole_part, fraction, above)
    up_to = both(_UNSIGNED, complement(_from(whole_part, fraction, not above)))
    return either(sequence(_DIGIT, _DIGITS, _FRACTION), sequence(word("-"), up_to))


def at_most(bound: Decimal, *, below: bool = False) -> Language:
    """Return the numbers up to ``bound``, or those below it."""
    return complement(at_least(bound, above=not below))


def equal(value: Decimal) -> Language:
    """Return every way to write a number."""
    return both(at_least(value), at_most(value))


@dataclass(frozen=True)
class Multiples(Language):
    """Multiples of ``step`` / 10 ** ``places``. rest: of the digits so far, modulo ``step``; point: digits after the
    point so far, -1 before it."""

    step: int
    places: int
    rest: int = 0
    point: int = -1

    def nullable(self) -> bool:
        return self.rest * 10 ** (self.places - max(self.point, 0)) % self.step == 0

    def after(self, point: int) -> Language:
        if point == ord("-"):
            return self
        if point == ord(".") and self.point < 0:
            return Multiples(self.step, self.places, self.rest, 0)
        digit = point - 48
        if not 0 <= digit <= 9 or (self.point == self.places and digit):
            return NOTHING
        if self.point == self.places:
            return self
        following = self.point + 1 if self.point >= 0 else -1
        return Multiples(self.step, self.places, (self.rest * 10 + digit) % self.step, following)

    def cuts(self) -> frozenset[int]:
        return frozenset([45, 46, 47, *range(48, 59)])


def multiples(divisor: Decimal) -> Multiples:
    """Return the multiples of a positive number."""
    _, digits, exponent = divisor.normalize().as_tuple()
    assert isinstance(exponent, int)
    step = int("".join(map(str, digits))) * 10 ** max(exponent, 0)
    return Multiples(step, max(-exponent, 0))


def _from(whole_part: str, fraction: str, above: bool) -> Language:
    """Return unsigned numbers from whole_part.fraction."""
    larger: list[Language] = [sequence(characters("123456789"), repeat(_DIGIT, len(whole_part), None))]
    for place, digit in enumerate(whole_part):
        if digit != "9":
            higher = characters((ord(digit) + 1, 57))
            rest = repeat(_DIGIT, len(whole_part) - place - 1, len(whole_part) - place - 1)
            larger.append(sequence(word(whole_part[:place]), higher, rest))
    return either(sequence(either(*larger), _FRACTION), sequence(word(whole_part), _fraction_from(fraction, above)))


def _fraction_from(fraction: str, above: bool) -> Language:
    if not fraction and not above:
        return _FRACTION
    tail = sequence(_DIGITS, characters("123456789"), _DIGITS) if above else _DIGITS
    for digit in reversed(fraction):
        higher = sequence(characters((ord(digit) + 1, 57)), _DIGITS) if digit != "9" else NOTHING
        tail = either(higher, sequence(word(digit), tail))
    return sequence(word("."), tail)


def short(states: int, *, whole: bool = False) -> Language:
    """Return numbers of so few digits that counting them in each of ``states`` states stays cheap."""
    digits = max(3, min(MOST_DIGITS, (200 if whole else 180) // states))
    return whole_text(rf"-?(0|[1-9]\d{{0,{digits - 1}}})" + ("" if whole else rf"(\.\d{{1,{digits}}})?"))
