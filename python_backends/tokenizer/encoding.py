"""Text to ids with the model's tokenizer.json, many prompts at a time and without the interpreter lock."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from contract.errors import PromptTooLong


class Encoding:
    """One tokenizer."""

    def __init__(self, tokenizer_json: Path, max_seq_len: int) -> None:
        """max_seq_len: tokens; bounds a prompt before it is encoded, which refuses a megabyte in microseconds."""
        self._tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_json))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._max_seq_len = max_seq_len

    @cached_property
    def _longest_token_bytes(self) -> int:
        return max(len(token.encode()) for token in self._tokenizer.get_vocab(with_added_tokens=True))

    def check_length(self, name: str, text: str) -> None:
        """Check that the text can fit ``max_seq_len`` if it is encoded in the vocabulary's longest tokens.

        A byte-level token writes each byte as one or two, other tokens as the byte itself, so a token's length in UTF-8
        bounds the text it stands for; normalizers shorten text at most fourfold.
        Raises PromptTooLong: it cannot.
        """
        size = len(text.encode())
        at_least = size // (4 * self._longest_token_bytes)
        if at_least > self._max_seq_len:
            got = f"{size} bytes, which are more than {at_least}"
            raise PromptTooLong(name, f"must have at most {self._max_seq_len} tokens, got {got}")

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Return the ids of each text."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_end(self, text: str, add_special_tokens: bool, tokens: int) -> list[int]:
        """Return the last ``tokens`` ids at most, as the library truncates on the left: the special tokens that it
        adds are kept and count."""
        [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=False)
        added = self._tokenizer.num_special_tokens_to_add(False) if add_special_tokens else 0
        if len(encoding.ids) > tokens - added:
            encoding.truncate(max(0, tokens - added), direction="left")
        return self._tokenizer.post_process(encoding, add_special_tokens=add_special_tokens).ids[-tokens:]

    def token(self, token_id: int) -> str:
        """Return the token as the vocabulary writes it, empty for an unknown id."""
        return self._tokenizer.id_to_token(token_id) or ""

    def encode_word(self, word: str) -> tuple[int, ...]:
        """Return the ids of a word without special tokens."""
        return tuple(self._tokenizer.encode(word, add_special_tokens=False).ids)
