"""Small real tokenizers, one of every family we serve, made with the ``tokenizers`` library in milliseconds.

``FAMILIES`` maps a family's name to the function that builds it. All share special tokens that start and end a text,
added tokens with and without spaces around them, one that a normaliser changes, and a vocabulary trained on ``TEXTS``,
so that every script is met both as whole words and as single characters or bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = (
    "The quick brown fox jumps over the lazy dog. Don't you think, it isn't far? No! It's 'quoted' text, I'm sure.",
    "def main() -> None:\n    print('hello, world')\n\n\n\treturn {'a': [1, 2, 3]}\r\n",
    "Größe, façade, naïve, Übermut, señor, İstanbul, smørrebrød; cafe\u0301 and e\u0301\u0323\u0302.",
    "Съешь ещё этих мягких французских булок, да выпей чаю.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "我能吞下玻璃而不伤身体。今天天气很好！",
    "いろはにほへと ちりぬるを。カタカナも。",
    "키스의 고유조건은 입술끼리 만나야 하고",
    "إن شاء الله، كيف حالك؟",
    "עברית עם נִקּוּד",
    "नमस्ते दुनिया, क्षत्रिय।",
    "สวัสดีชาวโลก",
    "👩‍💻 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽 ❤️ 🤷🏻‍♀️",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝕴𝖓 𝖆𝖑𝖑 𐍈 🜚 \u200d \u200b \ufeff \u00a0 end",
)

ADDED_TOKENS = (
    AddedToken("<tool call>", normalized=False),
    AddedToken("<pad>", lstrip=True, rstrip=True, normalized=False),
    AddedToken("▁▁", normalized=False),
    AddedToken(" lead", lstrip=True, normalized=False),
    AddedToken("trail ", rstrip=True, normalized=True),
    AddedToken("你好 мир", normalized=True),
    AddedToken("ĠÉ", normalized=True),
    AddedToken("<0x0A>", normalized=False),
)
SPECIAL_TOKENS = (
    AddedToken("<s>", special=True, normalized=False),
    AddedToken("</s>", special=True, normalized=False),
    AddedToken("<|im_end|>", special=True, normalized=False, lstrip=True, rstrip=True),
)

VOCABULARY_SIZE = 700


def _with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.add_tokens(list(ADDED_TOKENS))
    return tokenizer


def _trained_bpe(pre_tokenizer: pre_tokenizers.PreTokenizer, **trainer_options: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY_SIZE, show_progress=False, **trainer_options)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def byte_level_bpe() -> Tokenizer:
    """GPT-2, Llama 3, Qwen."""
    tokenizer = _trained_bpe(
        pre_tokenizers.ByteLevel(add_prefix_space=False), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.decoder = decoders.ByteLevel()
    return _with_added_tokens(tokenizer)


def byte_level_bpe_with_normalizer() -> Tokenizer:
    """Qwen's NFC, and lower case on top, so that normalised added tokens change."""
    tokenizer = byte_level_bpe()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    return tokenizer


def _byte_fallback_bpe() -> Tokenizer:
    """A BPE of ``▁`` words, with one token for each of the 256 bytes in front as SentencePiece has it."""
    trained = _trained_bpe(pre_tokenizers.Metaspace(prepend_scheme="never"), limit_alphabet=70)
    pieces = sorted(trained.get_vocab(), key=lambda piece: trained.get_vocab()[piece])
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    return Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))


def sentencepiece_bpe() -> Tokenizer:
    """Llama 2, Mistral: a space is put before the text and taken away again."""
    tokenizer = _byte_fallback_bpe()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_added_tokens(tokenizer)


def sentencepiece_bpe_without_strip() -> Tokenizer:
    """Gemma: spaces are what they are."""
    tokenizer = _byte_fallback_bpe()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _with_added_tokens(tokenizer)


def sentencepiece_bpe_with_strip_both() -> Tokenizer:
    """A space is taken away at both ends."""
    tokenizer = sentencepiece_bpe()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 1)]
    )
    return tokenizer


def _metaspace(prepend_scheme: str) -> Tokenizer:
    tokenizer = _trained_bpe(pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    return _with_added_tokens(tokenizer)


def metaspace_always() -> Tokenizer:
    return _metaspace("always")


def metaspace_first() -> Tokenizer:
    return _metaspace("first")


def metaspace_never() -> Tokenizer:
    return _metaspace("never")


def unigram() -> Tokenizer:
    """T5, XLM-R."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=500, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"])
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.decoder = decoders.Metaspace()
    return _with_added_tokens(tokenizer)


def unigram_with_byte_fallback() -> Tokenizer:
    """Unigram with bytes behind, and Metaspace in a Sequence."""
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    pieces += [(piece, -2.0) for piece in ("▁", "▁the", "▁a", "e", "t", "h", "o", "ö", "▁▁", ".", " ", "字")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()]
    )
    return _with_added_tokens(tokenizer)


# Tokens on which the decoders disagree with each other and with themselves, for decoders made up by a test.
AWKWARD_TOKENS = (
    "a", "", " ", "  ", "▁", "▁a", "▁▁", "a▁b", "##a", "##", "a##", "a</w>", "</w>", "</w>b", "</w", ">",
    "<0xE2>", "<0x82>", "<0xAC>", "<0x0A>", "<0xFF>", "<0xC3>", "<0xa9>", "<0x+F>", "<0x20>", "<0x", "41>",
    "<0x4", "<0x é>", "<pad>", "<pa", "d>", "|", "n", "'t", " n't", "n't", " .", ".", "do", " not", " '", "' ",
    "s", "'s", "é", "e\u0301", "Ã", "©", "Ġ", "Ġa", "âĤ", "¬", "ðŁ", "Ĵ", "»", "ÿ", "👩‍💻", "\u200d", "\ufffd",
    "aa", "ab", "ba", "\n", "\x00", "<s>", "A B",
)  # fmt: skip


def awkward(decoder: decoders.Decoder | None) -> Tokenizer:
    """``AWKWARD_TOKENS`` as ids in order, read by any decoder."""
    vocabulary = {token: token_id for token_id, token in enumerate(AWKWARD_TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    return tokenizer


_BUILDERS: tuple[Callable[[], Tokenizer], ...] = (
    byte_level_bpe,
    byte_level_bpe_with_normalizer,
    sentencepiece_bpe,
    sentencepiece_bpe_without_strip,
    sentencepiece_bpe_with_strip_both,
    metaspace_always,
    metaspace_first,
    metaspace_never,
    unigram,
    unigram_with_byte_fallback,
)
FAMILIES: dict[str, Callable[[], Tokenizer]] = {builder.__name__: cache(builder) for builder in _BUILDERS}
