"""Make prompt texts of a given number of tokens: random words, or passages of this project's pages."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Self

WORDS = (
    "the of and to in is that for it with as was on be at by this are from or an have not they which one you were all "
    "her she there would their we him been has when who will no more if out so up said what its about than into them "
    "can only other time new some could these two may first then do any like my now over such our man me even most "
    "made after also did many before must through years where much your way well down should because each just those "
    "people how too little state good very make world still see own men work long here get both between life being "
    "under never day same another know while last might us great old year off come since against go came right used"
).split()


MOST_WORDS_PER_TOKEN = 4
PAGES = Path(__file__).resolve().parents[1] / "docs"


class PromptSource(Protocol):
    def text(self, rng: random.Random, tokens: int, prefix: str = "") -> str:
        """Return a prompt of ``tokens`` tokens that begins with ``prefix``."""


class Prompts:
    """Prompts of random words. Without a tokenizer a word counts as a token; the answers' usage has the real count."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def for_engine(cls, folder: Path | None) -> Self:
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
        more = self._words(rng)
        words += more(1)
        # With a vocabulary that maps unknown words to one token the loop would not end; its prompts stay shorter.
        while (missing := tokens - self.count(" ".join(words))) > 0 and len(words) < MOST_WORDS_PER_TOKEN * tokens:
            words += more(max(1, missing // 2))
        kept = len(prefix) + (1 if prefix else 0)
        text = " ".join(words)
        # Whole words may overshoot: remove characters from the end, never from the prefix.
        while (over := self.count(text) - tokens) > 0 and len(text) > kept + 1:
            text = text[: max(kept + 1, len(text) - over)].rstrip() or text[: kept + 1]
        return text

    def _words(self, rng: random.Random) -> Callable[[int], list[str]]:
        """Return what makes so many further words of one prompt."""
        return lambda count: rng.choices(WORDS, k=count)


class Passages(Prompts):
    """Prompts of real text, in which drafts are accepted as in service: passages of ``docs/`` from a random word on."""

    def _words(self, rng: random.Random) -> Callable[[int], list[str]]:
        known = _page_words()
        first = rng.randrange(len(known))
        following = (known[n % len(known)] for n in itertools.count(first))
        return lambda count: list(itertools.islice(following, count))


@cache
def _page_words() -> list[str]:
    return [word for page in sorted(PAGES.glob("*.md")) for word in page.read_text(encoding="utf-8").split(" ")]


KINDS: dict[str, type[Prompts]] = {"words": Prompts, "text": Passages}
