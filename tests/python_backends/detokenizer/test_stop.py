"""The matcher against a search that looks at every end of the text."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_backends.detokenizer.stop import StopMatcher, StopStrings


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Start and end of the match that ends first, and of those the longest."""
    for end in range(len(text) + 1):
        ending_here = [stop for stop in stops if text[:end].endswith(stop)]
        if ending_here:
            return end - len(max(ending_here, key=len)), end
    return None


def undecided(text: str, stops: list[str]) -> int:
    """How many characters at the end of a text without a match may become part of one, by trying all ways to go on."""
    most = 0
    for stop in stops:
        for size in range(1, len(stop)):
            if text.endswith(stop[:size]):
                start, _ = first_match(text + stop[size:], stops)
                most = max(most, len(text) - start)
    return most


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(cut, len(text)) for cut in cuts})
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


ALPHABETS = st.sampled_from(["a", "ab", "abc", "\n€👩\u200d💻", "e\u0301x", " </s>"])
TEXTS_AND_STOPS = ALPHABETS.flatmap(
    lambda alphabet: st.tuples(
        st.text(alphabet=alphabet + "-", max_size=20),
        st.lists(st.text(alphabet=alphabet, min_size=1, max_size=5), max_size=4),
    )
)
CUTS = st.lists(st.integers(0, 20), max_size=8)


@given(text_and_stops=TEXTS_AND_STOPS, cuts=CUTS, include_stop=st.booleans())
def test_the_text_goes_up_to_the_first_match_however_it_is_cut(
    text_and_stops: tuple[str, list[str]], cuts: list[int], include_stop: bool
) -> None:
    text, stops = text_and_stops
    matcher = StopMatcher(StopStrings(stops), include_stop)
    given_out = "".join([matcher.feed(piece) for piece in pieces(text, cuts)] + [matcher.finish()])
    match = first_match(text, stops)
    if match is None:
        assert (given_out, matcher.stop) == (text, None)
    else:
        start, end = match
        assert (given_out, matcher.stop) == (text[: end if include_stop else start], text[start:end])


@given(text_and_stops=TEXTS_AND_STOPS, cuts=CUTS, include_stop=st.booleans())
def test_exactly_the_text_that_may_become_part_of_a_match_is_held_back(
    text_and_stops: tuple[str, list[str]], cuts: list[int], include_stop: bool
) -> None:
    text, stops = text_and_stops
    matcher = StopMatcher(StopStrings(stops), include_stop)
    seen, given_out = "", ""
    for piece in pieces(text, cuts):
        seen += piece
        given_out += matcher.feed(piece)
        if matcher.stop is not None:
            return
        held = 0 if include_stop else undecided(seen, stops)
        assert given_out == seen[: len(seen) - held]


@given(text_and_stops=TEXTS_AND_STOPS, cuts=CUTS, before=st.text(alphabet="ab\n€</s>", max_size=8))
def test_text_from_before_arming_is_never_part_of_a_match(
    text_and_stops: tuple[str, list[str]], cuts: list[int], before: str
) -> None:
    text, stops = text_and_stops
    alone, behind = StopMatcher(StopStrings(stops)), StopMatcher(StopStrings(stops), armed=False)
    assert "".join(behind.feed(piece) for piece in pieces(before, cuts)) == before
    behind.arm()
    for piece in pieces(text, cuts):
        assert behind.feed(piece) == alone.feed(piece)
    assert (behind.finish(), behind.stop) == (alone.finish(), alone.stop)


@pytest.mark.parametrize(
    ("stops", "fed", "given_out", "stop"),
    [
        (["\n\n"], ["one\n", "two\n", "\nthree"], ["one", "\ntwo", "", ""], "\n\n"),
        (["</s>"], ["a <", "/b> <", "/", "s> c"], ["a ", "</b> ", "", "", ""], "</s>"),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", "", ""], "aab"),
        (["abcd", "bc"], ["xa", "b", "c", "d"], ["xa", "", "", "", ""], "bc"),
        (["bc", "abc"], ["ab", "c"], ["", "", ""], "abc"),
        (["abcz", "c", "bd"], ["ab", "d"], ["a", "", ""], "bd"),
        (["stop", "stop"], ["sto", "p it"], ["", "", ""], "stop"),
        (["👩‍💻"], ["hi 👩", "\u200d", "👩", "\u200d💻!"], ["hi ", "", "👩\u200d", "", ""], "👩‍💻"),
        (["e\u0301"], ["caf", "e", "e", "\u0301"], ["caf", "", "e", "", ""], "e\u0301"),
        (["é"], ["cafe\u0301"], ["cafe\u0301", ""], None),
        (["END"], ["the EN"], ["the ", "EN"], None),
        ([], ["as ", "it is"], ["as ", "it is", ""], None),
    ],
)
def test_examples(stops: list[str], fed: list[str], given_out: list[str], stop: str | None) -> None:
    matcher = StopMatcher(StopStrings(stops))
    assert [matcher.feed(piece) for piece in fed] + [matcher.finish()] == given_out
    assert matcher.stop == stop


def test_an_included_stop_string_is_not_waited_for_and_nothing_follows_it() -> None:
    matcher = StopMatcher(StopStrings(["END"]), include_stop=True)
    assert [matcher.feed(piece) for piece in ("the E", "N", "D of", "it")] == ["the E", "N", "D", ""]
    assert (matcher.stop, matcher.finish()) == ("END", "")


def lines_run(work) -> int:
    """Python lines that ``work`` runs."""
    lines = 0

    def count(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return count

    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(None)
    return lines


def test_the_work_per_character_does_not_grow_with_the_number_or_length_of_stop_strings() -> None:
    text = "a" * 2000
    few, many = StopStrings(["a" * 10 + "b"]), StopStrings(["a" * size + "b" for size in range(1, 200)])

    def follow(stops: StopStrings) -> None:
        matcher = StopMatcher(stops)
        for character in text:
            matcher.feed(character)

    assert lines_run(lambda: follow(many)) <= 2 * lines_run(lambda: follow(few))


def test_compiling_takes_work_in_proportion_to_the_characters() -> None:
    def compiled(count: int):
        return lambda: StopStrings([f"{number:04}" + "ab" * 5 for number in range(count)])

    assert lines_run(compiled(2000)) <= 2.2 * lines_run(compiled(1000))
