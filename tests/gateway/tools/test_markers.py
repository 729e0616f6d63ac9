"""Markers are found in the text, and by their ids where they are tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from gateway.tools.cutter import Marker, MarkerFinder
from tests.gateway.tools.letters import Letters

A, B = "<tool_call>", "<|eom_id|>"


def found(
    letters: Letters, pieces: Sequence[str], splits: Sequence[int] = (), skips: bool = False
) -> list[str | Marker]:
    finder = MarkerFinder([A, B], letters, skips)
    ids = letters.ids(pieces)
    for token_id in ids:
        finder.read_id(token_id)
    text = "".join(letters.text(token_id, skips) for token_id in ids)
    cuts = [0, *sorted(min(split, len(text)) for split in splits), len(text)]
    pieces_found: list[str | Marker] = []
    for begin, end in zip(cuts, cuts[1:], strict=False):
        for piece in finder.feed(text[begin:end]):
            if isinstance(piece, str) and pieces_found and isinstance(pieces_found[-1], str):
                pieces_found[-1] += piece
            else:
                pieces_found.append(piece)
    rest = finder.finish()
    if rest and pieces_found and isinstance(pieces_found[-1], str):
        return [*pieces_found[:-1], pieces_found[-1] + rest]
    return [*pieces_found, rest] if rest else pieces_found


def test_the_ids_tell_a_token_from_its_spelling() -> None:
    pieces = ["a<tool", "_call>", A, "<tool_call", A, "b"]
    expected = ["a", Marker(A, False), Marker(A, True), "<tool_call", Marker(A, True), "b"]
    assert found(Letters(), pieces) == found(Letters(), pieces, range(100)) == expected
    assert found(Letters(tokens=()), [A]) == [Marker(A, None)]


def test_special_tokens_that_the_text_leaves_out_are_no_gap_in_it() -> None:
    letters = Letters(special=[B])
    finder = MarkerFinder([A], letters, skips_special=True)
    for token_id in letters.ids(["<tool_", B, "call>"]):
        spelled = finder.read_id(token_id)
    assert spelled == [Marker(A, False)]
    assert finder.feed("<tool_call>") == [Marker(A, False)]


def test_without_a_vocabulary_ids_tell_nothing() -> None:
    unknown = Letters(tokens=())
    unknown.known = False
    finder = MarkerFinder([A], unknown, skips_special=True)
    assert finder.read_id(1) == [] and finder.feed(f"x{A}<to") == ["x", Marker(A, None)] and finder.finish() == "<to"


def test_a_delta_costs_the_same_however_many_markers_there_are() -> None:
    def calls(markers: int) -> int:
        finder = MarkerFinder([A, *(f"<|special_{number}|>" for number in range(markers))], Letters(), False)
        counted = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal counted
            counted += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            finder.feed(" a word <")
        finally:
            sys.setprofile(None)
        return counted

    assert calls(500) == calls(1)


@given(st.lists(st.sampled_from([A, B, "<", "<tool", "_call>", ">", "x"]), max_size=10), st.lists(st.integers(0, 99)))
def test_no_text_is_lost_however_it_is_cut(pieces: list[str], splits: list[int]) -> None:
    whole = found(Letters(), pieces)
    assert found(Letters(), pieces, splits) == whole
    assert "".join(one if isinstance(one, str) else one.text for one in whole) == "".join(pieces)
