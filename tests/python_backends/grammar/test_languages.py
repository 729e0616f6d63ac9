"""Sets of texts: membership, operations and automata agree."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_backends.grammar import languages
from python_backends.grammar.languages import (
    ANYTHING,
    NOTHING,
    TooLarge,
    automaton,
    both,
    characters,
    complement,
    either,
    outside,
    repeat,
    sequence,
    word,
)

LEAVES = st.sampled_from([characters("a"), characters("ab"), characters((98, 100)), word("ab"), ANYTHING, NOTHING])
COUNTS = st.tuples(st.integers(0, 2), st.none() | st.integers(2, 3))


def combined(inner):
    pairs = st.tuples(inner, inner)
    return st.one_of(
        pairs.map(lambda pair: either(*pair)),
        pairs.map(lambda pair: both(*pair)),
        pairs.map(lambda pair: sequence(*pair)),
        inner.map(complement),
        st.tuples(inner, COUNTS).map(lambda entry: repeat(entry[0], *entry[1])),
    )


LANGUAGES = st.recursive(LEAVES, combined, max_leaves=5)
TEXTS = st.text("abcd", max_size=5)


@given(LANGUAGES, LANGUAGES, TEXTS)
def test_operations_are_those_of_sets(a, b, text):
    assert (text in both(a, b)) == (text in a and text in b)
    assert (text in either(a, b)) == (text in a or text in b)
    assert (text in complement(a)) == (text not in a)
    assert (text in sequence(a, b)) == any(text[:cut] in a and text[cut:] in b for cut in range(len(text) + 1))


@given(LANGUAGES, TEXTS)
def test_an_automaton_holds_the_same_texts(language, text):
    try:
        found = automaton(language, 200)
    except TooLarge:
        return
    if found is None:
        assert text not in language
        return
    place = 0
    for character in text:
        ways = [to for ranges, to in found.edges[place] if any(low <= ord(character) <= high for low, high in ranges)]
        assert len(ways) <= 1
        if not ways:
            assert text not in language
            return
        place = ways[0]
    assert found.ends[place] == (text in language)


def test_an_automaton_has_a_limit():
    with pytest.raises(TooLarge):
        automaton(both(repeat(characters("a"), 0, 500), complement(word("a"))), 100)


def test_a_long_text_takes_few_calls_for_each_of_its_characters(monkeypatch):
    calls = itertools.count()

    def counted(*parts):
        assert next(calls) < 2000
        return sequence(*parts)

    monkeypatch.setattr(languages, "sequence", counted)
    found = automaton(both(word("abcd" * 50), repeat(characters("abcd"), 1, None)), 400)
    assert len(found.ends) == 201


def test_ranges_outside_are_the_rest_of_unicode_without_surrogates():
    assert outside(((0, 0xDFFF),)) == ((0xE000, 0xFFFFF),)
    assert outside(outside(((65, 70),))) == ((65, 70),)
