"""Prompt texts of a wanted length: seeded words, counted by the engine's own tokenizer where there is one."""

from __future__ import annotations

import random
from pathlib import Path

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


class Prompts:
    """Without a tokenizer a word counts as a token; what it really was is in every answer's usage."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def for_engine(cls, folder: Path | None) -> Prompts:
        """Counted by ``folder``/tokenizer.json if that exists."""
        file = folder / "tokenizer.json" if folder else None
        return cls(Tokenizer.from_file(str(file)) if file and file.exists() else None)

    def ids(self, text: str) -> list[int]:
        """As the ensemble's tokenizer encodes it. Needs a tokenizer."""
        return self._tokenizer.encode(text).ids

    def count(self, text: str) -> int:
        return len(self.ids(text)) if self._tokenizer else len(text.split())

    def text(self, rng: random.Random, tokens: int, prefix: str = "") -> str:
        """``prefix`` and random words, ``tokens`` tokens together (the prefix stays whole, and a word is added)."""
        words = prefix.split(" ") if prefix else []
        words.append(rng.choice(WORDS))
        # A vocabulary that swallows words (an unknown run is one token) never gets there; its prompts stay shorter.
        while (missing := tokens - self.count(" ".join(words))) > 0 and len(words) < MOST_WORDS_PER_TOKEN * tokens:
            words += rng.choices(WORDS, k=max(1, missing // 2))
        kept = len(prefix) + (1 if prefix else 0)
        text = " ".join(words)
        # Whole words may have overshot: give back characters from the end, never from the prefix.
        while self.count(text) > tokens and len(text) > kept + 1:
            over = self.count(text) - tokens
            text = text[: max(kept + 1, len(text) - max(1, over))].rstrip() or text[: kept + 1]
        return text
