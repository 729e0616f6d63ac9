"""What an id spells to a grammar."""

from __future__ import annotations

from python_backends.detokenizer.decoding import Decoding

# A noncharacter in front of every special token: no character class of ours has it, so that no special token, which
# the text would not show, is taken for its characters; a structural tag can still begin or end with one.
SPECIAL_MARK = "\ufdd0"


def spelling(decoding: Decoding, token_id: int) -> bytes:
    """Return the bytes that an id adds to a text; a special token's have SPECIAL_MARK in front; empty for no token."""
    if special := decoding.special(token_id):
        return (SPECIAL_MARK + special).encode()
    return decoding.bytes_of(token_id)
