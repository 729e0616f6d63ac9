"""Shapes: the values of both."""

from decimal import Decimal

from python_backends.grammar.patterns import search
from python_backends.grammar.shapes import ALL, NONE, Arrays, Numbers, Objects, Shape, Strings, join, meet

A, B = frozenset([("#/a", True)]), frozenset([("#/b", True)])


def test_everything_changes_nothing():
    shape = Shape(null=True, strings=Strings((), 1, 3), arrays=Arrays((A,), B, 1, 4))
    assert meet(shape, ALL) == meet(ALL, shape) == shape
    assert meet(shape, NONE) == NONE


def test_enumerated_values_are_filtered():
    words = Shape(strings=Strings(words=("a", "bb", "ccc")))
    assert meet(words, Shape(strings=Strings((search("^[ab]"),), 2))) == Shape(
        strings=Strings((search("^[ab]"),), 2, None, ("bb",))
    )
    assert meet(words, Shape(strings=Strings(words=("x",)))) == NONE
    assert meet(Shape(numbers=Numbers(values=(Decimal(1),))), Shape(numbers=Numbers(values=(Decimal(2),)))) == NONE


def test_lengths_and_members_that_contradict_leave_nothing():
    assert meet(Shape(arrays=Arrays(least=3)), Shape(arrays=Arrays(most=2))) == NONE
    assert meet(Shape(objects=Objects(required=("a",))), Shape(objects=Objects(absent=frozenset("a")))) == NONE


def test_items_after_a_shorter_prefix_are_its_rest():
    met = meet(Shape(arrays=Arrays((A,), B)), Shape(arrays=Arrays((A, A), A)))
    assert met.arrays is not None and met.arrays.prefix == (A, A | B) and met.arrays.rest == A | B


def test_shapes_of_different_types_join():
    assert join([Shape(null=True), Shape(booleans=frozenset([True]))]) == Shape(True, frozenset([True]))
