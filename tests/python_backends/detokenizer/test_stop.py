"""The matcher against a search that looks at every end of the text."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from python_backends.detokenizer.decoding import Decoding
from python_backends.detokenizer.stop import StopMatcher, StopStrings, TextStream
from tests.fakes.tokenizer_families import FAMILIES, TEXTS
from tests.python_backends.detokenizer.test_decoding import DECODINGS, id_chunks, joined


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


# ---- ids and stop strings together: text, the id that ends it, and the stop string -----------------------------------


# Strip at the end and a decoder per token behind the byte runs say what they held a token later.
AT_ONCE = sorted(set(FAMILIES) - {"sentencepiece_bpe_with_strip_both", "unigram_with_byte_fallback"})


def followed(stream: TextStream, chunks: list[list[int]]) -> tuple[str, int, str | None]:
    increments = [stream.feed(chunk) for chunk in chunks]
    text = "".join(text for text, _ in increments) + stream.finish()
    return text, sum(consumed for _, consumed in increments), stream.stop


def stop_strings(draw: st.DrawFn, text: str) -> list[str]:
    """Parts of the text and strings that may not occur in it. None has a U+FFFD, which an incomplete character is
    for the library and nothing is for us."""
    places = draw(st.lists(st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 5)), max_size=3))
    parts = [text[start : start + size] for start, size in places] + draw(st.sampled_from([[], ["\n"], ["zz", "the"]]))
    return [part for part in parts if part and "\ufffd" not in part]


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data(), include_stop=st.booleans())
def test_the_text_is_the_library_s_up_to_the_first_match(family: str, data: st.DataObject, include_stop: bool) -> None:
    tokenizer = FAMILIES[family]()
    chunks = data.draw(id_chunks(tokenizer).filter(lambda chunks: any(chunks)))
    # Where the ids stop is part of the text, so it is read off the ids consumed.
    text, _ = TextStream(DECODINGS[family], StopStrings()).feed(joined(chunks))
    stops = stop_strings(data.draw, text)
    given_out, consumed, stop = followed(
        TextStream(DECODINGS[family], StopStrings(stops), include_stop=include_stop), chunks
    )
    whole = DECODINGS[family].open()
    read = whole.feed(joined(chunks)[:consumed]) + whole.finish()
    match = first_match(read, stops)
    if stop is None:
        assert (given_out, consumed, match) == (read, len(joined(chunks)), None)
    else:
        start, end = match
        assert (given_out, stop) == (read[: end if include_stop else start], read[start:end])


@pytest.mark.slow
@pytest.mark.parametrize("family", AT_ONCE)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_stop_is_at_the_first_id_whose_text_has_the_stop_string(family: str, data: st.DataObject) -> None:
    tokenizer = FAMILIES[family]()
    chunks = data.draw(id_chunks(tokenizer))
    ids = joined(chunks)[:40]
    stops = stop_strings(data.draw, tokenizer.decode(ids))
    _, consumed, stop = followed(TextStream(DECODINGS[family], StopStrings(stops)), [ids])
    for count in range(1, len(ids) + 1):
        match = first_match(tokenizer.decode(ids[:count]), stops)
        if match is not None:
            start, end = match
            assert (consumed, stop) == (count, tokenizer.decode(ids[:count])[start:end])
            return
    assert (consumed, stop) == (len(ids), None)


@pytest.mark.parametrize("family", AT_ONCE)
@given(data=st.data(), cut=st.integers(0, 30))
def test_stops_are_looked_for_only_behind_the_ids_fed_before_arming(family: str, data: st.DataObject, cut: int) -> None:
    tokenizer = FAMILIES[family]()
    ids = joined(data.draw(id_chunks(tokenizer)))[:40]
    before = tokenizer.decode(ids[:cut])
    stops = stop_strings(data.draw, tokenizer.decode(ids))
    stream = TextStream(DECODINGS[family], StopStrings(stops), armed=False)
    text, consumed = stream.feed(ids[:cut])
    stream.arm()
    for token_id in ids[cut:]:
        added, used = stream.feed([token_id])
        text, consumed = text + added, consumed + used
    text, stop = text + stream.finish(), stream.stop
    for count in range(cut + 1, len(ids) + 1):
        so_far = tokenizer.decode(ids[:count])
        if not so_far.startswith(before):
            return  # a run of bytes from before turned out broken: what is before and what is behind is moot
        match = first_match(so_far[len(before) :], stops)
        if match is not None:
            start, end = match
            assert (text, consumed) == (so_far[: len(before) + start], count)
            assert stop == so_far[len(before) :][start:end]
            return
    assert (text, consumed, stop) == (tokenizer.decode(ids), len(ids), None)


def byte_fallback() -> tuple[Decoding, dict[str, int]]:
    tokenizer = FAMILIES["sentencepiece_bpe"]()
    return DECODINGS["sentencepiece_bpe"], tokenizer.get_vocab()


def test_a_newline_that_is_a_byte_token_stops_with_that_token() -> None:
    decoding, vocab = byte_fallback()
    stream = TextStream(decoding, StopStrings(["\n"]))
    ids = [vocab["▁"], vocab["e"], vocab["<0x0A>"], vocab["e"]]
    assert (stream.feed(ids), stream.stop) == (("e", 3), "\n")
    assert (stream.feed(ids), stream.stop) == (("", 0), "\n")
    assert (stream.finish(), stream.stop) == ("", "\n")


def test_a_stop_string_across_a_run_of_bytes_and_the_text_before_it() -> None:
    decoding, vocab = byte_fallback()
    stream = TextStream(decoding, StopStrings(["e€"]))
    assert (stream.feed([vocab["▁"], vocab["h"], vocab["e"]]), stream.stop) == (("h", 3), None)
    assert (stream.feed([vocab["<0xE2>"], vocab["<0x82>"]]), stream.stop) == (("", 2), None)
    assert (stream.feed([vocab["<0xAC>"], vocab["<0xFF>"]]), stream.stop) == (("", 1), "e€")


def test_a_draft_that_is_taken_back_gives_no_match() -> None:
    decoding, vocab = byte_fallback()
    stream = TextStream(decoding, StopStrings(["€€"]))
    euro = [vocab["<0xE2>"], vocab["<0x82>"], vocab["<0xAC>"]]
    assert (stream.feed([*euro, vocab["<0xFF>"]]), stream.stop) == (("\ufffd" * 4, 4), None)
    assert (stream.feed([vocab["e"], *euro]), stream.stop) == (("e", 4), None)
    assert (stream.feed([vocab["e"], *euro, *euro]), stream.stop) == (("€e", 7), "€€")


def test_a_newline_from_before_arming_does_not_match_when_it_is_decided_after_it() -> None:
    decoding, vocab = byte_fallback()
    stream = TextStream(decoding, StopStrings(["\n", "\ne"]), armed=False)
    assert (stream.feed([vocab["e"], vocab["<0x0A>"]]), stream.stop) == (("e", 2), None)
    stream.arm()
    assert (stream.feed([vocab["e"]]), stream.stop) == (("\ne", 1), None)
    assert (stream.feed([vocab["<0x0A>"]]), stream.stop) == (("", 1), "\n")


def test_a_run_begun_before_arming_stops_with_its_next_character() -> None:
    decoding, vocab = byte_fallback()
    stream = TextStream(decoding, StopStrings(["\n"]), armed=False)
    assert (stream.feed([vocab["<0x0A>"]]), stream.stop) == (("", 1), None)
    stream.arm()
    assert (stream.feed([vocab["<0x41>"], vocab["<0x0A>"], vocab["e"]]), stream.stop) == (("\nA", 2), "\n")


def test_a_run_begun_before_arming_is_still_held_until_it_is_decided() -> None:
    decoding, vocab = byte_fallback()
    stream = TextStream(decoding, StopStrings(["\n"]), armed=False)
    assert (stream.feed([vocab["<0x0A>"]]), stream.stop) == (("", 1), None)
    stream.arm()
    assert (stream.feed([vocab["<0x41>"]]), stream.stop) == (("", 1), None)
    assert (stream.feed([vocab["<0xFF>"]]), stream.stop) == (("\ufffd" * 3, 1), None)


def test_the_run_after_the_one_in_which_the_stream_was_armed_is_looked_at_in_full() -> None:
    decoding, vocab = byte_fallback()
    stream = TextStream(decoding, StopStrings(["\n"]), armed=False)
    stream.feed([vocab["e"], vocab["<0x41>"]])
    stream.arm()
    assert (stream.feed([vocab["e"], vocab["<0x0A>"]]), stream.stop) == (("Ae", 2), "\n")


def test_an_incomplete_character_is_not_taken_for_the_replacement_character() -> None:
    decoding, vocab = byte_fallback()
    stream = TextStream(decoding, StopStrings(["\ufffd"]))
    assert (stream.feed([vocab["<0xC3>"], vocab["<0xA9>"], vocab["e"]]), stream.stop) == (("ée", 3), None)
    assert (stream.feed([vocab["<0xC3>"]]), stream.stop) == (("", 1), None)
    assert (stream.finish(), stream.stop) == ("", "\ufffd")


def test_a_skipped_or_unknown_id_is_consumed_and_adds_nothing() -> None:
    decoding, vocab = byte_fallback()
    stream = TextStream(decoding, StopStrings(["</s>"]))
    assert (stream.feed([vocab["<s>"], vocab["e"], 10**6, vocab["</s>"]]), stream.stop) == (("e", 4), None)
    kept = TextStream(decoding, StopStrings(["</s>"]), skip_special_tokens=False, include_stop=True)
    assert (kept.feed([vocab["e"], vocab["</s>"], vocab["e"]]), kept.stop) == (("e</s>", 2), "</s>")


def test_without_stop_strings_a_chunk_is_decoded_at_once_and_finish_gives_the_rest() -> None:
    tokenizer = FAMILIES["byte_level_bpe"]()
    ids = tokenizer.encode(TEXTS[12], add_special_tokens=False).ids
    stream = TextStream(DECODINGS["byte_level_bpe"], StopStrings())
    assert (stream.feed(ids), stream.stop) == ((TEXTS[12], len(ids)), None)
    broken = tokenizer.encode("é", add_special_tokens=False).ids
    stream = TextStream(DECODINGS["byte_level_bpe"], StopStrings())
    cut = tokenizer.decode(broken[:1])
    assert stream.feed(broken[:1]) == ("", 1)
    assert stream.finish() == cut
