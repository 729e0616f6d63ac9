"""What an id spells to a grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from python_backends.detokenizer.decoding import Decoding
from python_backends.detokenizer.stages import CHARACTER_OF_BYTE

# In front of every special token: no character class of ours has it, so that no special token, which the text would not
# show, is taken for its characters; a structural tag can still begin or end with one. Only private characters begin
# with its first byte; the token of that byte is left out, so that no other tokens can spell the mark.
SPECIAL_MARK = "\U0010ffff"


def spelling(decoding: Decoding, token_id: int) -> bytes:
    """Return the bytes that an id adds to a text; a special token's have SPECIAL_MARK in front; empty for no token."""
    if special := decoding.special(token_id):
        return (SPECIAL_MARK + special).encode()
    word = decoding.bytes_of(token_id)
    return b"" if word == SPECIAL_MARK.encode()[:1] else word


def special_tokens(tokenizer_json: Path) -> tuple[str, ...]:
    """Return the texts of the special tokens."""
    added = json.loads(tokenizer_json.read_text(encoding="utf-8")).get("added_tokens") or []
    return tuple(token["content"] for token in added if token.get("special"))


def encoded(word: bytes) -> str:
    """Return bytes in the alphabet of ByteLevel, in which JSON can hold parts of characters."""
    return "".join(CHARACTER_OF_BYTE[byte] for byte in word)


def tokenizer_info(
    tokenizer_json: Path, vocab_size: int, stop_ids: Sequence[int], marked: bool = True
) -> dict[str, object]:
    """Return what TensorRT-LLM's C++ backend reads from ``xgrammar_tokenizer_info_path``.

    vocab_size: ids of the model's logits; those without a token spell nothing and no grammar allows them.
    marked: special tokens have SPECIAL_MARK. The LLM API reads the tokenizer's own files, so its checker has none.
    stop_ids: allowed where a grammar's text may end, and nowhere else.
    """
    decoding = Decoding.from_tokenizer(tokenizer_json)
    spelled = [spelling(decoding, token_id) for token_id in range(vocab_size)]
    words = [encoded(word if marked else word.removeprefix(SPECIAL_MARK.encode())) for word in spelled]
    # Of this text the backend reads only how the words are written: as bytes, whatever the tokenizer's own way.
    written = json.dumps({"decoder": {"type": "ByteLevel"}})
    return {"encoded_vocab": words, "tokenizer_str": written, "stop_token_ids": list(stop_ids)}
