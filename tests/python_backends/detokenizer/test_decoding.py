"""Pieces against ``Tokenizer.decode`` of the installed library, for every family and for decoders made up at random."""

from __future__ import annotations

import json
import os
import sys
import threading
from itertools import cycle

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models

from contract.errors import InvalidArgument, NotFound
from python_backends.detokenizer.decoding import Decoding
from python_backends.detokenizer.stages import byte_level
from tests.fakes.tokenizer_families import AWKWARD_TOKENS, FAMILIES, TEXTS, awkward

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
DECODINGS = {family: Decoding.from_tokenizer(build()) for family, build in FAMILIES.items()}
SCRIPTS = st.one_of(
    st.tuples(st.sampled_from(TEXTS), st.integers(0, 60)).map(lambda cut: cut[0][cut[1] :][:40]),
    st.text(max_size=10),
    st.text(alphabet="e\u0301\u0323\u200d👩💻👍🏽🇩🇪❤️\ufe0f नमस्ते ▁Ġ\n\t", max_size=10),
)


def decoded(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool) -> str | None:
    """What the library says, or None where it panics (Strip on a token with fewer characters than it strips)."""
    stderr = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # a panic prints a backtrace
        try:
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        except BaseException as exc:
            if type(exc).__name__ != "PanicException":
                raise
            return None
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def streamed(decoding: Decoding, chunks: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
    stream = decoding.open(skip_special_tokens)
    return [stream.feed(chunk) for chunk in chunks] + [stream.finish()]


def joined(chunks: list[list[int]]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk]


@st.composite
def id_chunks(draw: st.DrawFn, tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of text in any script, with any ids and ids that no vocabulary has in between, cut anywhere."""
    size = tokenizer.get_vocab_size()
    any_id = st.one_of(st.integers(0, size + 3), st.integers(0, size - 1), st.just(2**32 - 1))
    of_text = SCRIPTS.map(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    parts = draw(st.lists(st.one_of(of_text, st.lists(any_id, max_size=8)), max_size=3))
    ids = joined(parts)
    sizes = cycle(draw(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any)))
    chunks = []
    while ids:
        size = next(sizes)
        chunks.append(ids[:size])
        ids = ids[size:]
    return chunks


@EVERY_FAMILY
@given(data=st.data())
def test_the_pieces_joined_are_the_library_s_text_however_the_ids_are_cut(family: str, data: st.DataObject) -> None:
    tokenizer = FAMILIES[family]()
    chunks = data.draw(id_chunks(tokenizer))
    ids = joined(chunks)
    for skip_special_tokens in (True, False):
        text = decoded(tokenizer, ids, skip_special_tokens)
        for cut in (chunks, [ids], [[token_id] for token_id in ids]):
            assert "".join(streamed(DECODINGS[family], cut, skip_special_tokens)) == (text or "")


LITERALS = st.sampled_from([" ", "▁", "a", "aa", "aba", "</w>", "\ufffd", "##", "."])
CONTENTS = st.sampled_from(["", " ", "x", "a", "ab"])
ON_TOKENS = st.one_of(
    st.builds(lambda scheme: decoders.Metaspace(prepend_scheme=scheme), st.sampled_from(["always", "first", "never"])),
    st.builds(decoders.Replace, st.one_of(LITERALS, st.just("")), CONTENTS),
    st.builds(
        lambda pattern, content: decoders.Replace(Regex(pattern), content),
        st.sampled_from([" +", "a.", "▁", "[ab]$", "^a", r"\s+(?=\S)"]),
        CONTENTS,
    ),
    st.builds(decoders.Strip, st.sampled_from([" ", "a", "\ufffd"]), st.integers(0, 3), st.integers(0, 2)),
)
ON_TEXT = st.one_of(
    st.builds(decoders.Fuse),
    st.builds(lambda scheme: decoders.Metaspace(prepend_scheme=scheme), st.sampled_from(["always", "first", "never"])),
    st.builds(decoders.Replace, LITERALS, CONTENTS),
    st.builds(decoders.Strip, st.sampled_from([" ", "a", "\ufffd"]), st.integers(0, 3), st.integers(0, 2)),
)


@st.composite
def supported_decoders(draw: st.DrawFn) -> decoders.Decoder:
    """Steps on tokens, a join and steps on the text, some of them in nested sequences."""
    steps = draw(st.lists(ON_TOKENS, max_size=2))
    runs = draw(st.integers(0, 2))
    for _ in range(runs):
        steps += [decoders.ByteFallback(), *draw(st.lists(ON_TOKENS, max_size=1))]
    join = draw(st.sampled_from([None, decoders.Fuse()] if runs else [None, decoders.Fuse(), decoders.ByteLevel()]))
    if join is not None:
        steps += [join, *draw(st.lists(ON_TEXT, max_size=2))]
    if len(steps) == 1 and draw(st.booleans()):
        return steps[0]
    cut = draw(st.integers(0, len(steps)))
    nested = [decoders.Sequence(steps[:cut])] if cut and draw(st.booleans()) else steps[:cut]
    return decoders.Sequence([*nested, *steps[cut:]])


@st.composite
def awkward_chunks(draw: st.DrawFn) -> list[list[int]]:
    """Many tokens of few kinds, so that they meet often."""
    kinds = draw(st.lists(st.integers(0, len(AWKWARD_TOKENS) + 1), min_size=1, max_size=4))
    return draw(st.lists(st.lists(st.sampled_from(kinds), max_size=4), max_size=6))


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(decoder=supported_decoders(), chunks=awkward_chunks(), skip_special_tokens=st.booleans())
def test_any_supported_decoder_gives_the_library_s_text(
    decoder: decoders.Decoder, chunks: list[list[int]], skip_special_tokens: bool
) -> None:
    tokenizer = awkward(decoder)
    pieces = streamed(Decoding.from_tokenizer(tokenizer), chunks, skip_special_tokens)
    text = decoded(tokenizer, joined(chunks), skip_special_tokens)
    assume(text is not None)
    assert "".join(pieces) == text


def spelled(decoder: decoders.Decoder, parts: list[str]) -> tuple[str, str | None]:
    """A text fed to ``decoder`` in parts, and what the library makes of it at once."""
    vocabulary = {part: place for place, part in enumerate(dict.fromkeys(parts))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=parts[0]))
    tokenizer.decoder = decoder
    ids = [vocabulary[part] for part in parts]
    pieces = streamed(Decoding.from_tokenizer(tokenizer), [[token_id] for token_id in ids])
    return "".join(pieces), decoded(tokenizer, ids, True)


@given(
    decoder=ON_TEXT,
    parts=st.sampled_from([" a", "a b", "aba", "▁a", "\ufffda"]).flatmap(
        lambda alphabet: st.lists(st.text(alphabet=alphabet, max_size=3), min_size=1, max_size=8)
    ),
)
def test_what_comes_behind_fuse_works_on_the_text_and_not_on_the_tokens(
    decoder: decoders.Decoder, parts: list[str]
) -> None:
    streamed_text, text = spelled(decoders.Sequence([decoders.Fuse(), decoder]), parts)
    assume(text is not None)
    assert streamed_text == text


@pytest.mark.parametrize("start", range(4))
@pytest.mark.parametrize("stop", range(4))
def test_strip_behind_fuse_takes_characters_off_the_text_s_ends(start: int, stop: int) -> None:
    decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", start, stop)])
    for before in range(5):
        for after in range(5):
            streamed_text, text = spelled(decoder, [*" " * before, "a", " ", "  ", "b", *" " * after])
            assert streamed_text == text


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"sentencepiece_bpe_with_strip_both"}))
@settings(max_examples=4)
@given(data=st.data())
def test_no_text_is_held_back_on_which_all_continuations_agree(family: str, data: st.DataObject) -> None:
    tokenizer = FAMILIES[family]()
    ids = joined(data.draw(id_chunks(tokenizer)))[:8]
    stream = DECODINGS[family].open()
    given_out = "".join(stream.feed([token_id]) for token_id in ids)
    every_id = range(tokenizer.get_vocab_size())
    endings = [ids, *([*ids, token_id] for token_id in every_id)]
    if "byte" in family or "sentencepiece" in family:
        # A character needs up to three more bytes, so one more id does not show all there can be.
        bytes_of = byte_ids(tokenizer)
        endings += [[*ids, bytes_of[byte], bytes_of[0xFF]] for byte in range(256)]
        for rest in (b"\xa9", b"\x82\xac", b"\xa4\xb0", b"\x9f\x91\xa9", b"\x91\xa9", b"\x8f\xbf\xbf"):
            endings.append([*ids, *(bytes_of[byte] for byte in rest)])
    agreed = os.path.commonprefix([tokenizer.decode(ending) for ending in endings])
    assert given_out == agreed


def test_a_run_of_byte_tokens_is_held_until_it_is_decided_and_not_longer() -> None:
    tokenizer = FAMILIES["sentencepiece_bpe"]()
    ids = {byte: tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    word = tokenizer.token_to_id("▁")
    stream = DECODINGS["sentencepiece_bpe"].open()
    assert [stream.feed([ids[byte]]) for byte in "é€".encode()] == [""] * 5
    assert "".join(stream.draft) == "é€"
    assert stream.feed([word]) == "é€ "
    assert stream.draft == []
    assert [stream.feed([ids[byte]]) for byte in b"\xc3\xa9\xff\x41"] == ["", "", "\ufffd" * 3, "\ufffd"]
    assert stream.feed([word]) == " "
    assert stream.feed([ids[0xE2], ids[0x82]]) == ""
    assert stream.draft == []
    assert stream.finish() == "\ufffd\ufffd"


def test_a_draft_is_text_behind_the_later_steps_and_starts_anew_with_every_run() -> None:
    tokenizer = FAMILIES["sentencepiece_bpe"]()
    space, letter, word = (tokenizer.token_to_id(token) for token in ("<0x20>", "<0x41>", "▁"))
    stream = DECODINGS["sentencepiece_bpe"].open()
    assert (stream.feed([space]), stream.draft) == ("", [])  # Strip takes the first space away
    assert (stream.feed([letter]), "".join(stream.draft)) == ("", "A")
    assert (stream.feed([word, space, letter]), "".join(stream.draft)) == ("A ", " A")
    assert (stream.finish(), stream.draft) == (" A", [])


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_bytes_become_characters_exactly_as_in_the_library(length: int) -> None:
    edges = [0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xED, 0xEF, 0xF0, 0xF4, 0xF5]
    for family in ("byte_level_bpe", "sentencepiece_bpe_without_strip"):
        tokenizer, decoding = FAMILIES[family](), DECODINGS[family]
        alphabet = byte_ids(tokenizer)
        for number in range(0, len(edges) ** length, 1 if length < 4 else 37):
            ids = [alphabet[edges[number // len(edges) ** place % len(edges)]] for place in range(length)]
            assert "".join(streamed(decoding, [[token_id] for token_id in ids])) == tokenizer.decode(ids)


def byte_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids of the 256 bytes, found by asking the library what each token means."""
    if tokenizer.token_to_id("<0x00>") is not None:
        return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    of_byte = {byte_level(token): token_id for token, token_id in tokenizer.get_vocab().items()}
    return [of_byte[bytes([byte])] for byte in range(256)]


def test_which_tokens_are_bytes_is_as_in_the_library() -> None:
    characters = [chr(code) for code in range(0x20, 0x7F)]
    tokens = [f"<0x{a}{b}>" for a in characters for b in characters] + ["<0x4>", "<0x411>", "<0xé>", "<0X41>", "0x41"]
    tokenizer = Tokenizer(models.WordLevel({token: place for place, token in enumerate(tokens)}, unk_token="<0x  >"))
    tokenizer.decoder = decoders.ByteFallback()
    decoding = Decoding.from_tokenizer(tokenizer)
    for token_id in range(len(tokens)):
        assert "".join(streamed(decoding, [[token_id]])) == tokenizer.decode([token_id])


def test_special_tokens_are_skipped_or_kept_and_do_not_count_as_the_first_token() -> None:
    for family in ("metaspace_first", "sentencepiece_bpe", "byte_level_bpe"):
        tokenizer = FAMILIES[family]()
        start, end = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("<|im_end|>")
        ids = [start, *tokenizer.encode("fox jumps", add_special_tokens=False).ids, end, end]
        assert "".join(streamed(DECODINGS[family], [ids], True)).strip() == tokenizer.decode(ids).strip() != ""
        kept = "".join(streamed(DECODINGS[family], [[token_id] for token_id in ids], False))
        assert kept == tokenizer.decode(ids, skip_special_tokens=False)
        assert kept.startswith("<s>") and "<|im_end|>" in kept


def test_a_special_token_the_normalizer_changes_is_kept_as_the_library_keeps_it() -> None:
    tokenizer = FAMILIES["byte_level_bpe_with_normalizer"]()
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.add_special_tokens([AddedToken("<STOP>", normalized=True), AddedToken("<END>", normalized=False)])
    ids = [tokenizer.token_to_id("<STOP>"), tokenizer.token_to_id("<END>")]
    assert "".join(streamed(Decoding.from_tokenizer(tokenizer), [ids])) == tokenizer.decode(ids) == "<stop>"


@EVERY_FAMILY
@example(ids=[])
@settings(max_examples=10, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(max_value=-1), st.integers(min_value=10_000)), max_size=5))
def test_ids_outside_the_vocabulary_give_nothing_and_leave_nothing(family: str, ids: list[int]) -> None:
    decoding = Decoding.from_tokenizer(FAMILIES[family]())
    assert "".join(streamed(decoding, [ids])) == ""
    assert all(not table for table in decoding._tables.values())


@EVERY_FAMILY
def test_a_tokenizer_is_read_from_a_file_or_its_folder(family: str, tmp_path) -> None:
    tokenizer = FAMILIES[family]()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode(TEXTS[0], add_special_tokens=False).ids
    for source in (tmp_path, str(tmp_path), tmp_path / "tokenizer.json"):
        assert "".join(streamed(Decoding.from_tokenizer(source), [ids])) == tokenizer.decode(ids)


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(NotFound, match="there is no file .*tokenizer.json"):
        Decoding.from_tokenizer(tmp_path)


@pytest.mark.parametrize("nested", [False, True])
def test_an_unsupported_decoder_is_refused_by_name_with_what_is_supported(nested: bool, tmp_path) -> None:
    content = json.loads(FAMILIES["byte_level_bpe"]().to_str())
    unknown = {"type": "Rot13", "shift": 13}
    content["decoder"] = {"type": "Sequence", "decoders": [{"type": "Fuse"}, unknown]} if nested else unknown
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InvalidArgument, match="decoder: must be made of ByteFallback, ByteLevel, .*, got Rot13"):
        Decoding.from_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (None, "no decoder"),
        (decoders.CTC(), "CTC"),
        (decoders.WordPiece(), "WordPiece"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.Sequence([decoders.Fuse(), decoders.CTC()]), "CTC"),
        (decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()]), "ByteLevel after Fuse"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.ByteFallback()]), "ByteFallback after ByteLevel"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.ByteLevel()]), "ByteLevel after ByteFallback"),
        (
            decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("a+"), "b")]),
            "Replace with a regular expression after Fuse",
        ),
    ],
)
def test_a_decoder_that_cannot_be_streamed_is_refused_by_name(decoder: decoders.Decoder | None, named: str) -> None:
    with pytest.raises(InvalidArgument, match=f"decoder: must be made of .*, got {named}$") as caught:
        Decoding.from_tokenizer(awkward(decoder))
    assert caught.value.field == "decoder"


class Rot13:
    def decode(self, tokens: list[str]) -> str:
        return "".join(tokens)

    def decode_chain(self, tokens: list[str]) -> list[str]:
        return tokens


def test_a_decoder_written_in_python_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="decoder: .* got a decoder written in Python"):
        Decoding.from_tokenizer(awkward(decoders.Decoder.custom(Rot13())))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"decoder": null}', '{"decoder": {"type": "Fuse"}}', "\x00"])
def test_a_file_that_is_no_tokenizer_is_refused(content: str, tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InvalidArgument, match="tokenizer: .* must be a file of the tokenizers library"):
        Decoding.from_tokenizer(tmp_path)


def calls_made(work) -> int:
    """Python calls, library calls included, that ``work`` makes."""
    calls = 0

    def count(frame, event, argument) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@EVERY_FAMILY
def test_the_work_for_an_id_does_not_grow_with_the_text_before_it(family: str) -> None:
    tokenizer, decoding = FAMILIES[family](), DECODINGS[family]
    ids = tokenizer.encode("".join(TEXTS), add_special_tokens=False).ids[:200]
    streamed(decoding, [ids])  # fills the tables
    once = calls_made(lambda: streamed(decoding, [[token_id] for token_id in ids * 4]))
    twice = calls_made(lambda: streamed(decoding, [[token_id] for token_id in ids * 8]))
    assert twice <= 2 * once


def test_streams_of_one_decoding_do_not_mix_in_threads() -> None:
    tokenizer = FAMILIES["sentencepiece_bpe"]()
    decoding = Decoding.from_tokenizer(tokenizer)
    texts: dict[int, str] = {}

    def decode(number: int) -> None:
        ids = tokenizer.encode(TEXTS[number], add_special_tokens=False).ids
        texts[number] = "".join(streamed(decoding, [[token_id] for token_id in ids]))

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(len(TEXTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == dict(enumerate(TEXTS))
