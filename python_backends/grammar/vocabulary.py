"""What an id spells to a grammar."""

from __future__ import annotations

import json
from pathlib import Path

from python_backends.detokenizer.decoding import Decoding

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
