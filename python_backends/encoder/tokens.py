"""Texts and pairs of texts to token ids, as an encoder was trained to read them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tokenizers

from contract.encoder import Encoder
from contract.errors import InvalidArgument, PromptTooLong
from python_backends.limits import check_ids


class Row(NamedTuple):
    """One text or pair. types: 0 for tokens of the first text, 1 for those of the second."""

    ids: Sequence[int]
    types: Sequence[int]


class Tokens:
    """One tokenizer. Not safe for threads."""

    def __init__(self, folder: Path, encoder: Encoder, max_seq_len: int, vocab_size: int) -> None:
        """folder: holds tokenizer.json. max_seq_len, vocab_size: of the model."""
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._encoder, self._vocab_size = encoder, vocab_size
        self.max_seq_len = max_seq_len
        longest = max(len(token.encode()) for token in self._tokenizer.get_vocab(with_added_tokens=True))
        # A text of more bytes cannot fit (tokenizer/encoding.py says why), so it is never tokenized whole.
        self._max_bytes = 4 * longest * max_seq_len
        around = encoder.template[:1] + encoder.template[2:]
        self._around = [self._tokenizer.encode(part, add_special_tokens=False).ids for part in around]

    def texts(self, name: str, texts: Sequence[str], most: int | None) -> list[Row]:
        """Return the row of each text, special tokens included.

        name: of the field, for errors. most: tokens that are kept of a text, or None to refuse a longer one than
            ``max_seq_len``.
        Raises InvalidArgument: a text is too long or has no token, or ``most`` has no room for the special tokens.
        """
        return self._rows(name, [(text,) for text in texts], most, special=True)

    def pairs(self, name: str, pairs: Sequence[tuple[str, str]], most: int | None) -> list[Row]:
        """Return the row of each pair, joined by the tokenizer or by the model's template; as ``texts``."""
        if not self._encoder.template:
            return self._rows(name, pairs, most, special=True)
        before, after = self._around
        body = self._encoder.template[1]
        query, document = body.split("{query}")[0], body.split("{document}")[0].split("{query}")[1]
        texts = [(f"{query}{first}{document}{second}",) for first, second in pairs]
        rows = self._rows(name, texts, most, special=False, around=len(before) + len(after))
        joined = ([*before, *row.ids, *after] for row in rows)
        return [Row(ids, [0] * len(ids)) for ids in joined]

    def ids(self, name: str, rows: Sequence[Sequence[int]], most: int | None) -> list[Row]:
        """Return rows of given token ids, each cut to ``most``. Raises InvalidArgument: ids that the model does not
        have, none at all, or more than ``max_seq_len``."""
        found = []
        for number, ids in enumerate(rows):
            field, kept = f"{name}[{number}]", ids if most is None else ids[:most]
            if not kept:
                raise InvalidArgument(field, "must hold at least one token id, got none")
            check_ids(field, kept, self._vocab_size)
            if len(kept) > self.max_seq_len:
                raise self._too_long(field, len(kept))
            found.append(Row(kept, [0] * len(kept)))
        return found

    def answers(self) -> tuple[int, int]:
        """Return the ids of "no" and "yes", which a decoder that reranks answers with. Raises InvalidArgument: the
        vocabulary lacks one."""
        no, yes = (self._tokenizer.token_to_id(word) for word in ("no", "yes"))
        if no is None or yes is None:
            raise InvalidArgument("model", "must have the tokens 'no' and 'yes' to rerank, got a vocabulary without")
        return no, yes

    def _rows(
        self, name: str, texts: Sequence[tuple[str, ...]], most: int | None, *, special: bool, around: int = 0
    ) -> list[Row]:
        """around: tokens that the caller adds to each row."""
        own = self._tokenizer.num_special_tokens_to_add(max(map(len, texts), default=1) > 1) if special else 0
        if most is None:
            self._tokenizer.no_truncation()
        elif most < own + around:  # the library would cut nothing
            problem = f"must be at least {own + around}, the special tokens of an input, got {most}"
            raise InvalidArgument("truncate_prompt_tokens", problem)
        else:
            self._tokenizer.enable_truncation(most - around)
            texts = [tuple(part[: self._max_bytes] for part in parts) for parts in texts]
        for number, parts in enumerate(texts):
            if most is None and sum(len(part.encode()) for part in parts) > self._max_bytes:
                raise self._too_long(f"{name}[{number}]", f"more than {self._max_bytes} bytes")
        inputs = [parts[0] if len(parts) == 1 else parts for parts in texts]
        encodings = self._tokenizer.encode_batch(inputs, add_special_tokens=special)
        for number, encoding in enumerate(encodings):
            count = len(encoding.ids) + around
            if not count:
                raise InvalidArgument(f"{name}[{number}]", "must encode to at least one token, got none")
            if count > self.max_seq_len:
                raise self._too_long(f"{name}[{number}]", count)
        return [Row(encoding.ids, encoding.type_ids) for encoding in encodings]

    def _too_long(self, field: str, got: int | str) -> PromptTooLong:
        problem = f"must have at most {self.max_seq_len} tokens, got {got}; truncate_prompt_tokens=-1 cuts it"
        return PromptTooLong(field, problem)
