"""Sets of numbers, against decimal arithmetic."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_backends.grammar.languages import NOTHING, automaton, both
from python_backends.grammar.numbers import INTEGER, NUMBER, at_least, at_most, equal, multiples, short

DECIMALS = st.decimals(-2000, 2000, places=2) | st.integers(-300, 300).map(Decimal)
WRITTEN = DECIMALS.filter(lambda value: value or not value.is_signed()).map(lambda value: f"{value:f}")


@given(DECIMALS, WRITTEN)
def test_bounds_are_those_of_arithmetic(bound, text):
    value = Decimal(text)
    assert text in NUMBER
    assert (text in at_least(bound)) == (value >= bound)
    assert (text in at_least(bound, above=True)) == (value > bound)
    assert (text in at_most(bound)) == (value <= bound)
    assert (text in at_most(bound, below=True)) == (value < bound)
    assert (text in equal(bound)) == (value == bound)


@given(st.sampled_from(["1", "2", "7", "0.5", "0.01", "10", "2.5", "1.1", "300"]).map(Decimal), WRITTEN)
def test_multiples_are_exact(divisor, text):
    assert (text in multiples(divisor)) == (Decimal(text) % divisor == 0)


@pytest.mark.parametrize("divisor", ["13", "25", "63", "0.25", "6.3"])
def test_every_divisor_up_to_63_has_a_small_automaton(divisor):
    limit = multiples(Decimal(divisor))
    assert automaton(both(short(limit.step * (limit.places + 1)), limit), 400)


def test_bounds_beyond_what_is_written_are_none_or_all():
    assert both(at_least(Decimal("1e300")), NUMBER) == NOTHING
    assert "5" in at_least(Decimal("-1e300")) and "5" in at_most(Decimal("1e300"))


def test_numbers_have_no_exponent_and_a_limit():
    assert "1" * 15 in INTEGER and "1" * 16 not in INTEGER and "01" not in INTEGER and "1e5" not in NUMBER
    assert "99" in short(100, whole=True) and "1234" not in short(100, whole=True)
