"""Each stage by itself, fed in parts; test_decoding.py compares them with the library."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_backends.detokenizer import stages

PARTS = st.lists(st.text(alphabet=" ab", max_size=4), max_size=8)


def fed(stage, parts):
    return "".join([stage.feed(part) for part in parts] + [stage.finish()])


@given(PARTS, st.sampled_from([" ", "a", "ab", "aba", "aa"]), st.sampled_from(["", "x", "aa"]))
def test_a_pattern_is_replaced_wherever_the_text_is_cut(parts, pattern, content):
    assert fed(stages.Substitute(pattern, content), parts) == "".join(parts).replace(pattern, content)


@given(PARTS, st.integers(0, 3), st.integers(0, 3))
def test_at_most_so_many_characters_are_stripped_from_each_end(parts, start, stop):
    text = "".join(parts)
    kept = text[min(start, len(text) - len(text.lstrip(" "))) :]
    kept = kept[: len(kept) - min(stop, len(kept) - len(kept.rstrip(" ")))]
    assert fed(stages.StripText(" ", start, stop), parts) == kept


@given(st.binary(max_size=12), st.integers(1, 4))
def test_bytes_become_the_text_that_python_reads(data, size):
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    assert fed(stages.Utf8(), [[part] for part in parts]) == data.decode("utf-8", "replace")


@given(st.lists(st.sampled_from(["<0xC3>", "<0xA9>", "<0x41>", "<0xFF>", "a"]), max_size=10))
def test_a_run_of_byte_tokens_is_its_text_or_a_replacement_per_byte(tokens):
    runs = stages.ByteRuns()
    found = "".join("".join(runs.feed([token])) for token in tokens) + "".join(runs.finish())
    expected, run = "", b""
    for token in [*tokens, ""]:
        if token in stages.BYTE_TOKENS:
            run += bytes([stages.BYTE_TOKENS[token]])
            continue
        try:
            expected += run.decode()
        except UnicodeDecodeError:
            expected += stages.REPLACEMENT * len(run)
        expected, run = expected + token, b""
    assert found == expected


@pytest.mark.parametrize(("token", "spelled"), [("Ġa", b" a"), ("Ã©", "é".encode()), ("你", "你".encode())])
def test_a_token_of_the_byte_alphabet_stands_for_its_bytes(token, spelled):
    assert stages.byte_level(token) == spelled


def test_the_first_token_alone_is_told_apart():
    each = stages.EachInTurn(stages.metaspace(lambda tokens: "".join(tokens).upper() if tokens[0] else tokens[1]))
    assert each.feed(["a", "b"]) + each.feed(["c"]) + each.finish() == ["A", "b", "c"]
