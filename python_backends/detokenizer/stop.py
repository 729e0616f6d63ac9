"""Stop strings, found in a text as it grows.

Of all occurrences the one that ends first is the match; of those that end together, the one that starts first. The
result does not depend on how the text is cut. Text is held back only while it may become part of a match. The work per
character is constant (amortised) for any number of stop strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

ROOT = 0


class StopStrings:
    """The stop strings of one request, compiled: an Aho-Corasick automaton over characters.

    A state is the longest suffix of the text that is a prefix of some stop string. Building takes time and memory in
    proportion to the characters of all stop strings.
    """

    def __init__(self, strings: Sequence[str] = ()) -> None:
        """strings: none of them empty, as the tokenizer sends them."""
        self._next: list[dict[str, int]] = [{}]  # state -> character -> longer state
        self._match: list[str | None] = [None]  # state -> the stop string that ends here
        for string in strings:
            self._insert(string)
        self._fallback = [ROOT] * len(self._next)  # state -> the next shorter such suffix
        self._held = [0] * len(self._next)  # state -> characters that may become part of a match
        self._link()

    def __bool__(self) -> bool:
        return bool(self._next[ROOT])

    def held(self, state: int) -> int:
        """Return how many characters at the end of the text may become part of a match."""
        return self._held[state]

    def scan(self, state: int, text: str) -> tuple[int, int, str | None]:
        """Read ``text`` from ``state`` on, up to the first match.

        Return the state, the number of characters read, and the stop string that ends with the last of them.
        """
        if state == ROOT and self._next[ROOT].keys().isdisjoint(text):
            return ROOT, len(text), None
        follow, fallback, match = self._next, self._fallback, self._match
        for read, character in enumerate(text, 1):
            while character not in follow[state] and state != ROOT:
                state = fallback[state]
            state = follow[state].get(character, ROOT)
            if match[state] is not None:
                return state, read, match[state]
        return state, len(text), None

    def _insert(self, string: str) -> None:
        state = ROOT
        for character in string:
            longer = self._next[state].get(character)
            if longer is None:
                longer = self._next[state][character] = len(self._next)
                self._next.append({})
                self._match.append(None)
            state = longer
        self._match[state] = string

    def _link(self) -> None:
        order = [ROOT]  # shorter states first; grows while it is walked
        for state in order:
            for character, longer in self._next[state].items():
                self._fallback[longer] = shorter = self._step(self._fallback[state], character) if state else ROOT
                # Of the stop strings that end here the one that started first is the match.
                self._match[longer] = self._match[longer] or self._match[shorter]
                order.append(longer)
        for state in reversed(order):
            # A match that ends in a longer state includes so many characters of this one.
            for longer in self._next[state].values():
                match = self._match[longer]
                self._held[state] = max(self._held[state], (len(match) if match else self._held[longer]) - 1)
        for state in order:
            self._held[state] = max(self._held[state], self._held[self._fallback[state]])

    def _step(self, state: int, character: str) -> int:
        while character not in self._next[state] and state != ROOT:
            state = self._fallback[state]
        return self._next[state].get(character, ROOT)


class StopMatcher:
    """Look for stop strings in one text.

    While it is not armed, text passes unread: a match lies wholly in text fed after ``arm``.

    stop: the stop string that ended the text, None so far.
    """

    def __init__(self, stops: StopStrings, include_stop: bool = False, armed: bool = True) -> None:
        """include_stop: return the stop string too, so that no text is held back."""
        self._stops = stops
        self._include_stop = include_stop
        self.armed = armed
        self.stop: str | None = None
        self.state = ROOT
        self._held: deque[str] = deque()  # characters

    def arm(self) -> None:
        """Look for stop strings from here on."""
        self.armed = True

    def feed(self, text: str) -> str:
        """Return the text that is certain to lie before the first match, or in it if included; empty after a match."""
        if self.stop is not None:
            return ""
        if not self.armed:
            return text
        self.state, read, self.stop = self._stops.scan(self.state, text)
        if self._include_stop:
            return text[:read]
        kept = len(self.stop) if self.stop is not None else self._stops.held(self.state)
        if not self._held and not kept:
            return text[:read]
        self._held.extend(text[:read])
        return self._release(len(self._held) - kept)

    def finish(self) -> str:
        """Return the text held back, when the text ends without a match."""
        return self._release(len(self._held)) if self.stop is None else ""

    def _release(self, count: int) -> str:
        return "".join([self._held.popleft() for _ in range(count)])
