"""Tokenizers made of metadata equal the models' own; what is not known is refused by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE

from build.base import gguf_tokenizer
from build.base.json_fields import BadField, Fields
from tests.fakes import gguf_models

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "12 3", "i n", "Ġ Ġ", "l l"]
TOKENS = [*ALPHABET, *(merge.replace(" ", "") for merge in MERGES), "<|end|>", "<tool>"]


def metadata(pre: str | None = "gpt-2", **more: object) -> Fields:
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1] * (len(TOKENS) - 2) + [3, 4],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": len(TOKENS) - 2,
        "tokenizer.ggml.eos_token_id": len(TOKENS) - 2,
    }
    return Fields(keys | more, "m.gguf")


def spm(**changes: object) -> Tokenizer:
    return gguf_tokenizer.tokenizer(Fields(gguf_models.spm_keys(331, **changes), "m.gguf"))


# The pre-tokenizers of the published tokenizer.json of each family.
PUBLISHED = {
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "default": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "qwen2": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
                    r"\s+(?!\S)|\s+"
                ),
                behavior="isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "llama-bpe": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
                    r"\s*[\r\n]+|\s+(?!\S)|\s+"
                ),
                behavior="isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
@given(st.text("abthe IT'll123 \n\t.,é你", max_size=30))
def test_text_is_split_as_the_family_splits_it(name, text):
    made = gguf_tokenizer.tokenizer(metadata(name, **{"tokenizer.ggml.add_bos_token": False}))
    own = Tokenizer(BPE({token: n for n, token in enumerate(TOKENS)}, [tuple(m.split(" ")) for m in MERGES]))
    own.pre_tokenizer = PUBLISHED[name]
    if name == "qwen2":
        own.normalizer = normalizers.NFC()
    assert made.encode(text).ids == own.encode(text).ids
    composed = normalizers.NFC().normalize_str(text) if name == "qwen2" else text
    assert made.decode(made.encode(text).ids) == composed


@pytest.mark.parametrize("name", gguf_tokenizer.SPLITTINGS)
def test_every_name_makes_a_tokenizer_that_gives_the_text_back(name):
    made = gguf_tokenizer.tokenizer(metadata(name))
    text = "The thé's 12345, in 你好\n\n  x = [1]"
    assert made.decode(made.encode(text).ids, skip_special_tokens=True) == text


def test_control_tokens_are_special_and_user_defined_ones_are_not():
    made = gguf_tokenizer.tokenizer(metadata())
    ids = made.encode("a<|end|><tool>b").ids
    assert ids[1:3] == [len(TOKENS) - 2, len(TOKENS) - 1]
    assert made.decode(ids, skip_special_tokens=True) == "a<tool>b"


@pytest.mark.parametrize(
    ("pre", "given", "begins"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_a_text_begins_with_bos_where_the_file_or_the_family_says_so(pre, given, begins):
    made = gguf_tokenizer.tokenizer(metadata(pre, **{"tokenizer.ggml.add_bos_token": given}))
    assert (made.encode("a").ids[0] == len(TOKENS) - 2) is begins
    assert made.encode("a", add_special_tokens=False).ids == [TOKENS.index("a")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "kimi-k2"}, "tokenizer.ggml.pre must be one of default, gpt-2, .*, got 'kimi-k2'"),
        ({"tokenizer.ggml.model": "bert"}, r"must be gpt2 \(byte-level BPE\) or llama .*, got 'bert'"),
        ({"tokenizer.ggml.model": None}, "got None"),
        ({"tokenizer.ggml.tokens": []}, "the file has no tokenizer"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "holds a token twice"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merges: must hold two pieces each, got 'ab'"),
        ({"tokenizer.ggml.merges": ["zz yy"]}, "vocabulary and merges do not fit each other"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type must be a number for each of"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id must be an integer up to"),
    ],
)
def test_what_cannot_be_a_tokenizer_is_refused_by_name(change, message):
    with pytest.raises(BadField, match=message):
        gguf_tokenizer.tokenizer(metadata(**change))


def test_a_sentence_piece_vocabulary_without_scores_is_refused():
    for scores, message in (
        (None, "scores is missing"),
        ([float("nan")] * 331, "not a number"),
        ([1.0], "each of 331"),
    ):
        with pytest.raises(BadField, match=message):
            spm(**{"tokenizer.ggml.scores": scores})


def by_score(text: str) -> list[str]:
    """SentencePiece's own algorithm: of all neighbours, join the best scored; bytes for what is left unknown."""
    keys = gguf_models.spm_keys(331)
    score = dict(zip(keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.scores"], strict=True))
    pieces = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joined = [(score.get(a + b, -1e9), -n) for n, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False))]
        if not joined or max(joined)[0] <= -1e9:
            break
        at = -max(joined)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    known = [[piece] if piece in score else [f"<0x{byte:02X}>" for byte in piece.encode()] for piece in pieces]
    return [token for tokens in known for token in tokens]


@given(st.text("thewolding a.é你🎉\n", max_size=24))
def test_sentence_piece_merges_the_best_scored_neighbours_first(text):
    made = spm(**{"tokenizer.ggml.add_bos_token": False})
    assert made.encode(text).tokens == by_score(text)
    assert made.decode(made.encode(text).ids) == text


def test_a_space_is_put_before_the_text_unless_the_file_says_no():
    assert spm().encode("hello").tokens == ["<s>", "▁hello"]
    assert spm(**{"tokenizer.ggml.add_space_prefix": False}).encode("hello").tokens == ["<s>", "hello"]
    assert spm(**{"tokenizer.ggml.add_eos_token": True}).encode("hello").tokens == ["<s>", "▁hello", "</s>"]
