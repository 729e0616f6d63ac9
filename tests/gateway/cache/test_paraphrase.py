"""What two prompts must share, whatever a model finds of their meaning."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cache.paraphrase import exchanged, gist, of_the_moment

PAIRS = (Path(__file__).parents[1] / "prompt_pairs.tsv").read_text("utf-8").splitlines()[1:]
WORD = st.sampled_from("sort file list server how what is the a of in to not 3 4 Paris Berlin can you please".split())
SENTENCE = st.lists(WORD, min_size=1, max_size=12).map(" ".join)


def match(one: str, other: str) -> tuple[tuple[str, str], ...] | None:
    return exchanged(gist(one), gist(other))


def test_no_near_miss_passes_without_the_model_being_asked() -> None:
    """Numbers, negations, order, quotations and opposites never pass; a plain word that was exchanged is for the
    model to compare."""
    for line in PAIRS:
        _, kind, first, second = line.split("\t")
        found = match(first, second)
        if kind in ("number", "negation", "order", "quoted", "opposite"):
            assert found is None, line
        elif kind != "same":
            assert found != (), line


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is the capital of France?", "Tell me the capital of France"),
        ("What is the capital of France?", "what's France's capital"),
        ("How do I sort a list?", "Could you please tell me how to sort lists?"),
        ("Hi there! How can I sort a list?", "What is the way to sort a list? Thanks"),
        ("I can't log in, why?", "I cannot log in, why?"),
        ("How tall is the tower?", "What is the height of the tower?"),
        ("How many moons does Mars have?", "What is the number of moons Mars have?"),
        ("Who's the mayor?", "Who is the mayor?"),
        ("What does ‘entropy’ mean?", "What is ‘entropy’?"),
    ],
)
def test_forms_of_asking_the_same_are_the_same(one: str, other: str) -> None:
    assert match(one, other) == ()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Can dogs eat grapes?", "Should dogs eat grapes?"),
        ("Do vaccines work?", "How do vaccines work?"),
        ("Who is the president?", "Who was the president?"),
        ("Is it cheap?", "Is it not cheap?"),
        ("How many moons does Mars have?", "Which moons does Mars have?"),
        ("What is 5!", "What is 5"),
        ("Who is calling?", "Who is called?"),
        ("Is 2 < 3?", "Is 2 > 3?"),
        ("Ist das gut?", "Ist das nicht gut?"),
        ("¿Es bueno?", "¿No es bueno?"),
        ("Explain: stop", "Explain: go"),
        ("Fix this\nx = 1", "Fix this\nx = 2"),
        ("What is my name?", "What is your name?"),
        ("Meet me at 10:30", "Meet me at 10:45"),
        ("", ""),
        ("what is the", "which is a"),
    ],
)
def test_a_difference_that_matters_is_none_the_model_is_asked_about(one: str, other: str) -> None:
    assert match(one, other) is None


def test_plain_words_that_differ_are_for_the_model_to_compare() -> None:
    assert match("Write a poem about the ocean", "Write a poem about the sea") == (("ocean", "sea"),)
    assert match("Fix my vehicle near the ocean quietly", "Fix my car near the sea silently") is None, "too many"
    assert match("Describe Anna's ocean", "Describe Peter's ocean") is None, "a name"
    assert match("Is it edible?", "Is it inedible?") is None, "an opposite by its beginning"


@pytest.mark.parametrize(
    "text",
    [
        "What's new today?",
        "the LATEST release",
        "who won last night",
        "two days ago",
        "what time is it",
        "Tell me the news",
    ],
)
def test_what_is_true_only_when_it_is_asked_takes_no_part(text: str) -> None:
    assert of_the_moment(text)


def test_a_word_that_only_holds_such_a_word_does_take_part() -> None:
    assert not of_the_moment("How do I know knowledge is renowned? Newsletter, agog, currents")


@given(SENTENCE, SENTENCE)
def test_either_may_be_the_one_that_was_kept(one: str, other: str) -> None:
    found, turned = match(one, other), match(other, one)
    assert (found is None) == (turned is None)
    assert found is None or [(b, a) for a, b in found] == list(turned)


@given(SENTENCE)
def test_a_text_that_says_anything_is_a_paraphrase_of_itself(text: str) -> None:
    assert match(text, text) in ((), None) and (match(text, text) == ()) == bool(gist(text).words)


@given(SENTENCE, st.integers(0, 12), st.sampled_from(["not", "never", "7", "without", "only", "Rome", "unless"]))
def test_a_word_that_turns_the_meaning_never_goes_unseen(text: str, at: int, word: str) -> None:
    words = text.split()
    assert match(text, " ".join([*words[:at], word, *words[at:]])) is None


@given(SENTENCE, st.integers(0, 10**6), st.integers(0, 10**6))
def test_two_numbers_are_equal_or_no_match(text: str, one: int, other: int) -> None:
    assert (match(f"{text} with {one} of them", f"{text} with {other} of them") == ()) == (one == other)


@given(st.text(max_size=200))
def test_any_text_has_a_gist(text: str) -> None:
    assert gist(text) == gist(text)
    of_the_moment(text)
