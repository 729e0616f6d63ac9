"""Citations [n] of an answer, checked against the sources; how much of the answer the sources say."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_CITED = re.compile(r"\[(\d{1,3})\]")
_COMMON = frozenset(
    "a an and are as at be by can do does for from has have how if in into is it its not of on or that the their them "
    "then there these this to was what when where which while who why will with you your".split()
)
SUPPORT = 0.4  # of a sentence's words that a source must have


@dataclass(frozen=True)
class Checked:
    """text: the answer, without citations of sources that are not there or say something else.

    cited: numbers of the sources that support a sentence. grounded: share of the answer's words that the sources have.
    """

    text: str
    cited: tuple[int, ...]
    grounded: float


def words(text: str) -> set[str]:
    """Return the words of a text that mean something, in lower case, without endings of the plural."""
    found = re.findall(r"[a-z0-9_]+", text.lower())
    return {word.rstrip("s") for word in found if word not in _COMMON and len(word) > 1}


def check(text: str, sources: Sequence[str]) -> Checked:
    """Check an answer. A sentence without a citation gets that of the source that has most of its words."""
    known = [words(source) for source in sources]
    kept, cited, total, found = [], set(), 0, 0
    for sentence in re.split(r"(?<=[.!?\]])\s+(?!\[)", text.strip()):
        plain = _CITED.sub("", sentence).strip()
        own = words(plain)
        supports = [len(own & source) / len(own) if own else 0.0 for source in known]
        named = {int(number) for number in _CITED.findall(sentence)}
        right = {n for n in named if 1 <= n <= len(known) and supports[n - 1] >= SUPPORT}
        best = max(range(len(known)), key=supports.__getitem__, default=-1)
        if not right and best >= 0 and supports[best] >= SUPPORT:
            right = {best + 1}
        cited |= right
        total, found = total + len(own), found + len(own & set().union(*known))
        kept.append(plain + "".join(f" [{n}]" for n in sorted(right)))
    return Checked(" ".join(kept), tuple(sorted(cited)), found / total if total else 0.0)


def extract(question: str, sources: Sequence[str]) -> str:
    """Return the sentence or line of the sources that has most of a question's words, the earlier ones first."""
    pieces = [piece.strip() for source in sources for piece in re.split(r"(?<=[.!?])\s+|\n", source) if piece.strip()]
    own = words(question)
    return max(pieces, key=lambda piece: len(own & words(piece)), default="")
