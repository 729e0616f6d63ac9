"""Find markers, such as ``<tool_call>``, in an output as it arrives: by their token ids where they are one token.

A model can also spell a marker's text with ordinary tokens, as when it quotes it. The ids tell which occurrence in the
text is the token.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple, Protocol


class Tokens(Protocol):
    """The served model's vocabulary.

    known: whether there is one; else no id has a text.
    special: ids of special tokens, which a text leaves out unless the request says otherwise.
    """

    known: bool
    special: frozenset[int]

    def id(self, text: str) -> int | None: ...
    def token(self, token_id: int, /) -> tuple[str, list[int] | None]: ...


class Marker(NamedTuple):
    """One occurrence. is_token: whether it is the marker's own token; None if the marker is no token, or unknown."""

    text: str
    is_token: bool | None


@lru_cache(maxsize=64)
def _compiled(markers: tuple[str, ...]) -> tuple[re.Pattern[str], frozenset[str]]:
    """Return what finds the markers, longest first, and all their beginnings: there may be hundreds, as many as special
    tokens."""
    beginnings = (text[:size] for text in markers for size in range(1, len(text)))
    return re.compile("|".join(map(re.escape, markers))), frozenset(beginnings)


class MarkerFinder:
    """Split one output at its markers. skips_special: the text leaves out special tokens; no marker is one then."""

    def __init__(self, markers: Iterable[str], vocabulary: Tokens, skips_special: bool) -> None:
        longest_first = tuple(sorted(markers, key=len, reverse=True))
        self._pattern, self._beginnings = _compiled(longest_first)
        self._longest = len(longest_first[0]) - 1
        self._vocabulary = vocabulary
        self._by_id = {token: text for text in longest_first if (token := vocabulary.id(text)) is not None}
        self._skipped = vocabulary.special if skips_special else frozenset()
        self._tokens = frozenset(self._by_id.values())
        self._found: defaultdict[str, deque[bool]] = defaultdict(deque)  # occurrences in the ids, not yet in the text
        self._spelled = ""  # end of the ordinary tokens' text
        self._held = ""  # end of the text that may begin a marker

    def read_id(self, token_id: int) -> list[Marker]:
        """Return the markers that end with this id. Every id is read before the text that it makes."""
        marker = self._by_id.get(token_id)
        if marker is not None:
            self._found[marker].append(True)
            self._spelled = ""
            return [Marker(marker, True)]
        if not self._vocabulary.known or token_id in self._skipped:
            return []
        pieces, self._spelled = self._split(self._spelled + self._vocabulary.token(token_id)[0])
        found = [piece.text for piece in pieces if isinstance(piece, Marker)]
        for text in found:
            if text in self._tokens:
                self._found[text].append(False)
        return [Marker(text, False if text in self._tokens else None) for text in found]

    def forget(self) -> None:
        """Expect no text of the ids so far."""
        self._found.clear()

    def feed(self, text: str) -> list[str | Marker]:
        """Return the text, split at its markers, that no later text changes."""
        pieces, self._held = self._split(self._held + text)
        return [self._known(piece) if isinstance(piece, Marker) else piece for piece in pieces]

    def finish(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _known(self, marker: Marker) -> Marker:
        found = self._found.get(marker.text)
        return Marker(marker.text, found.popleft()) if found else marker

    def _split(self, text: str) -> tuple[list[str | Marker], str]:
        """Return texts and markers in turn, and the end of the text that may begin a marker."""
        pieces: list[str | Marker] = []
        at = 0
        for match in self._pattern.finditer(text):
            if match.start() > at:
                pieces.append(text[at : match.start()])
            pieces.append(Marker(match[0], None))
            at = match.end()
        held = self._may_begin(text[at:])
        if len(text) - held > at:
            pieces.append(text[at : len(text) - held])
        return pieces, text[len(text) - held :]

    def _may_begin(self, text: str) -> int:
        """Return how many characters at the end of the text may be the beginning of a marker."""
        longest = min(len(text), self._longest)
        return next((size for size in range(longest, 0, -1) if text[-size:] in self._beginnings), 0)
