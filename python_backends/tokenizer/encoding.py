"""Text to ids with the model's own tokenizer.json, many prompts at a time and outside Python's lock."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from contract.errors import PromptTooLong


class Encoding:
    """``max_seq_len`` bounds a prompt before it is encoded: a megabyte that cannot fit is refused in microseconds."""

    def __init__(self, tokenizer_json: Path, max_seq_len: int) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_json))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._max_seq_len = max_seq_len

    @cached_property
    def _longest_token_bytes(self) -> int:
        return max(len(token.encode()) for token in self._tokenizer.get_vocab(with_added_tokens=True))

    def check_length(self, name: str, text: str) -> None:
        """PromptTooLong when even the longest tokens of the vocabulary could not bring the text under the limit.

        A byte-level token spells each byte with one or two, a word piece with the byte itself, so a token's own
        length in UTF-8 bounds the text it stands for; normalisers that shorten text do so at most fourfold.
        """
        size = len(text.encode())
        at_least = size // (4 * self._longest_token_bytes)
        if at_least > self._max_seq_len:
            raise PromptTooLong(
                name,
                f"has {size} bytes, more than {at_least} tokens; allowed are {self._max_seq_len} tokens",
            )

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def token(self, token_id: int) -> str:
        """How the vocabulary writes the token ``token_id``."""
        return self._tokenizer.id_to_token(token_id) or ""

    def encode_word(self, word: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(word, add_special_tokens=False).ids)
