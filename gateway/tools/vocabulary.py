"""Convert token ids to the text and bytes that ``logprobs`` contains, with the model's tokenizer.json if there is one.

A token of a byte-level vocabulary may be part of a character: its bytes are exact, its text has U+FFFD instead.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from gateway.admission.prompt_tokens import load_tokenizer
from python_backends.detokenizer.stages import byte_level

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """Look up token ids. Without a tokenizer a token's text is ``token_id:N``, and its bytes are unknown."""

    def __init__(self, tokenizer: Path | None = None) -> None:
        self._tokenizer = None
        self.known = tokenizer is not None
        self.special = frozenset[int]()  # ids that texts leave out unless a request says otherwise
        if tokenizer is not None:
            self._tokenizer = load_tokenizer(tokenizer)
            self._byte_level = '"ByteLevel"' in tokenizer.read_text(encoding="utf-8")
            added = self._tokenizer.get_added_tokens_decoder()
            self.special = frozenset(token for token, entry in added.items() if entry.special)
        self.token = lru_cache(65_536)(self._token)

    def id(self, text: str) -> int | None:
        """Return the id of the token that is written as ``text``."""
        return self._tokenizer.token_to_id(text) if self._tokenizer is not None else None

    def _token(self, token_id: int) -> tuple[str, list[int] | None]:
        """Return text, and bytes or None if unknown."""
        surface = self._tokenizer.id_to_token(token_id) if self._tokenizer else None
        if surface is None:
            return f"token_id:{token_id}", None
        data = self._bytes(surface)
        return data.decode(errors="replace"), list(data)

    def _bytes(self, surface: str) -> bytes:
        if self._byte_level:
            return byte_level(surface)  # an added token is literal text
        if found := _BYTE.fullmatch(surface):
            return bytes([int(found[1], 16)])
        return surface.replace("\u2581", " ").encode()


@lru_cache(maxsize=16)
def vocabulary_of(tokenizer: Path | None) -> Vocabulary:
    """Return the vocabulary of a tokenizer, made once."""
    return Vocabulary(tokenizer)
