"""The written grammar holds the texts that were meant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_backends.grammar.ebnf import NEVER, Grammar, TooManyRules, choice, row
from python_backends.grammar.languages import both, characters, complement, repeat, word
from python_backends.grammar.patterns import search, whole
from tests.fakes.grammar_matcher import Matcher


@given(st.integers(0, 70), st.none() | st.integers(0, 70), st.sampled_from([1, 4, 16]))
def test_repetitions_have_their_lengths(least, more, block):
    grammar = Grammar()
    most = None if more is None else least + more
    matcher = Matcher(grammar.write(row("<", grammar.repeated("a", least, most, block), ">")))
    for count in {0, least - 1, least, least + 1, least + (more or 90), least + (more or 90) + 1} - {-1}:
        assert matcher.matches(f"<{'a' * count}>") == (count >= least and (most is None or count <= most)), count


@pytest.mark.parametrize("text", ["plain", 'quote "', "back \\", "tab \t", "line \n", "é", "\x01", "😀", "]^-[", ""])
def test_characters_are_written_as_json_writes_them(text):
    import json

    grammar = Grammar()
    quoted = row('"', grammar.language(word(text), json=True), '"')
    assert Matcher(grammar.write(quoted)).matches(json.dumps(text, ensure_ascii=False))


@given(st.text("abx1", max_size=6))
def test_intersections_become_automata(text):
    grammar = Grammar()
    language = both(search("a.*b"), complement(word("ab")), repeat(characters((32, 126)), 0, 5))
    assert Matcher(grammar.write(grammar.language(language, json=False))).matches(text) == (text in language)


def test_what_matches_no_finite_text_is_left_out():
    grammar = Grammar()
    endless = grammar.reserve("r")
    grammar.define(endless, row("a", endless))
    assert grammar.write(endless) == ""
    text = grammar.write(choice(row("x", endless), row("y", NEVER), "z"))
    assert text == 'root ::= "z"\n'


def test_there_is_a_limit_to_rules():
    grammar = Grammar()
    with pytest.raises(TooManyRules):
        for _ in range(30_000):
            grammar.reserve("r")


def test_a_set_that_needs_no_automaton_is_written_plainly():
    grammar = Grammar()
    assert grammar.write(grammar.language(whole("[0-9]{3}-(a|b)?"), json=False)).count("\n") == 1
