"""Make prompt texts of a given number of tokens: seeded words, counted by the engine's tokenizer if there is one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

WORDS = (
    "the of and to in is that for it with as was on be at by this are from or an have not they which one you were all "
    "her she there would their we him been has when who will no more if out so up said what its about than into them "
    "can only other time new some could these two may first then do any like my now over such our man me even most "
    "made after also did many before must through years where much your way well down should because each just those "
    "people how too little state good very make world still see own men work long here get both between life being "
    "under never day same another know while last might us great old year off come since against go came right used"
).split()


MOST_WORDS_PER_TOKEN = 4


class PromptSource(Protocol):
    def text(self, rng: random.Random, tokens: int, prefix: str = "") -> str:
        """Return a prompt of ``tokens`` tokens that begins with ``prefix``."""


class Prompts:
    """Prompts of random words. Without a tokenizer a word counts as a token; the answers' usage has the real count."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def for_engine(cls, folder: Path | None) -> Prompts:
        """Count tokens by ``folder``/tokenizer.json if that exists."""
        file = folder / "tokenizer.json" if folder else None
        return cls(Tokenizer.from_file(str(file)) if file and file.exists() else None)

    def ids(self, text: str) -> list[int]:
        """Encode as the ensemble's tokenizer does. Needs a tokenizer."""
        assert self._tokenizer is not None, "there is a tokenizer"
        return self._tokenizer.encode(text).ids

    def count(self, text: str) -> int:
        return len(self.ids(text)) if self._tokenizer else len(text.split())

    def text(self, rng: random.Random, tokens: int, prefix: str = "") -> str:
        """Join ``prefix`` and random words, ``tokens`` tokens together, at least one word besides the prefix."""
        words = prefix.split(" ") if prefix else []
        words.append(rng.choice(WORDS))
        # With a vocabulary that maps unknown words to one token the loop would not end; its prompts stay shorter.
        while (missing := tokens - self.count(" ".join(words))) > 0 and len(words) < MOST_WORDS_PER_TOKEN * tokens:
            words += rng.choices(WORDS, k=max(1, missing // 2))
        kept = len(prefix) + (1 if prefix else 0)
        text = " ".join(words)
        # Whole words may overshoot: remove characters from the end, never from the prefix.
        while self.count(text) > tokens and len(text) > kept + 1:
            over = self.count(text) - tokens
            text = text[: max(kept + 1, len(text) - max(1, over))].rstrip() or text[: kept + 1]
        return text
