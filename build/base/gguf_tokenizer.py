"""The tokenizer of a GGUF file's metadata as a ``tokenizers`` tokenizer.

A GGUF keeps vocabulary, merges and only the *name* of the pre-tokenizer of a byte-level BPE, and vocabulary with scores
of a SentencePiece BPE. The rest is written here by name as the models' own tokenizer.json files have it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from build.base.json_fields import BadField, Fields, shown

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_SPACE = "▁"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Splitting:
    """What a pre-tokenizer's name stands for. pattern: None for GPT-2's own, which the ByteLevel step has.

    digits: each digit stands alone. whole_words: a word that is a token is not built from merges. bos: begins a text
    unless the metadata says otherwise. nfc: text is composed first.
    """

    pattern: str | None = None
    digits: bool = False
    whole_words: bool = False
    bos: bool = False
    nfc: bool = False


_GPT2, _DIGITS = _Splitting(), _Splitting(digits=True)
_LLAMA3_PATTERN = rf"{_CONTRACTION}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_LLAMA3 = _Splitting(_LLAMA3_PATTERN, whole_words=True, bos=True)
_QWEN2_PATTERN = rf"{_CONTRACTION}|{_WORDS}|\p{{N}}|{_REST}"
SPLITTINGS = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "jais"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Splitting(_LLAMA3_PATTERN)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Splitting(_QWEN2_PATTERN, nfc=True)),
    "stablelm2": _Splitting(_QWEN2_PATTERN),
    "tekken": _Splitting(_TEKKEN, whole_words=True, bos=True),
}


def tokenizer(metadata: Fields) -> Tokenizer:
    """Raises BadField, which names the kind or the pre-tokenizer that is not known here."""
    kind = metadata.text("tokenizer.ggml.model")
    tokens = metadata.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise BadField(f"{metadata.where}: tokenizer.ggml.tokens is missing; the file has no tokenizer")
    if len(set(tokens)) < len(tokens):
        raise BadField(f"{metadata.where}: tokenizer.ggml.tokens holds a token twice; it is unknown which id is meant")
    if kind == "gpt2":
        made, bos = _byte_level(metadata, tokens)
    elif kind == "llama":
        made, bos = _sentence_piece(metadata, tokens)
    else:
        raise metadata.bad("tokenizer.ggml.model", "gpt2 (byte-level BPE) or llama (SentencePiece BPE)")
    types = _numbers(metadata, "tokenizer.ggml.token_type", len(tokens)) or [1] * len(tokens)
    special = [token for token, given in zip(tokens, types, strict=True) if given == CONTROL]
    added = [token for token, given in zip(tokens, types, strict=True) if given == USER_DEFINED]
    made.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    made.add_tokens([AddedToken(token, normalized=False) for token in added])
    _add_ends(made, metadata, tokens, bos)
    return made


def token(metadata: Fields, name: str, tokens: Sequence[str]) -> str | None:
    """The token that ``tokenizer.ggml.<name>_token_id`` names; None where the file does not say."""
    key = f"tokenizer.ggml.{name}_token_id"
    if metadata.get(key) is None:
        return None
    return tokens[metadata.integer(key, low=0, high=len(tokens) - 1)]


def _byte_level(metadata: Fields, tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    name = metadata.text("tokenizer.ggml.pre") or "default"
    if name not in SPLITTINGS:
        known = ", ".join(SPLITTINGS)
        raise BadField(f"{metadata.where}: tokenizer.ggml.pre must be one of {known}, got {shown(name)}")
    splitting = SPLITTINGS[name]
    merges = [_pair(metadata, merge) for merge in metadata.texts("tokenizer.ggml.merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(_bpe(metadata, vocabulary, merges, ignore_merges=splitting.whole_words))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitting.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.pattern:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    if splitting.nfc:
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    return made, splitting.bos


def _sentence_piece(metadata: Fields, tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    """SentencePiece merges the neighbours whose joint piece has the best score: a BPE whose merges are in that order,
    of several ways to make a piece the one whose parts come first."""
    scores = _numbers(metadata, "tokenizer.ggml.scores", len(tokens))
    if not scores:
        raise BadField(f"{metadata.where}: tokenizer.ggml.scores is missing; a SentencePiece vocabulary needs it")
    if any(math.isnan(score) for score in scores):
        raise BadField(f"{metadata.where}: tokenizer.ggml.scores holds what is not a number")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(piece)):
            left, right = vocabulary.get(piece[:cut]), vocabulary.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-score, left, right, (piece[:cut], piece[cut:])))
    merges = [merge for *_, merge in sorted(ranked)]
    unknown = token(metadata, "unknown", tokens) or tokens[0]
    made = Tokenizer(_bpe(metadata, vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    end: list[decoders.Decoder] = []
    if metadata.boolean("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(_SPACE))
        end.append(decoders.Strip(" ", left=1))
    made.normalizer = normalizers.Sequence(spaces)
    made.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *end]  # as Llama 2's own file
    )
    return made, True


def _bpe(metadata: Fields, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: object) -> models.BPE:
    try:
        return models.BPE(vocabulary, merges, **options)
    except Exception as exc:  # the library raises nothing narrower
        raise BadField(f"{metadata.where}: vocabulary and merges do not fit each other: {exc}") from exc


def _pair(metadata: Fields, merge: str) -> tuple[str, str]:
    left, _, right = merge[1:].partition(" ")  # the first character is part of the left piece whatever it is
    if not right:
        raise BadField(f"{metadata.where}: tokenizer.ggml.merges: must hold two pieces each, got {shown(merge)}")
    return merge[0] + left, right


def _numbers(metadata: Fields, key: str, length: int) -> list[float]:
    """One number per token, or none at all."""
    values = metadata.get(key)
    if values is None:
        return []
    if not isinstance(values, list) or len(values) != length or not all(isinstance(n, (int, float)) for n in values):
        raise metadata.bad(key, f"a number for each of {length} tokens")
    return values


def _add_ends(made: Tokenizer, metadata: Fields, tokens: Sequence[str], bos_by_default: bool) -> None:
    """What begins and ends every text that is no chat."""
    bos, eos = token(metadata, "bos", tokens), token(metadata, "eos", tokens)
    first = [bos] if bos is not None and metadata.boolean("tokenizer.ggml.add_bos_token", bos_by_default) else []
    last = [eos] if eos is not None and metadata.boolean("tokenizer.ggml.add_eos_token", False) else []
    if first or last:
        around = [*(f"{text}:0" for text in first), "$A:0", *(f"{text}:0" for text in last)]
        ids = [(text, tokens.index(text)) for text in {*first, *last}]
        made.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
