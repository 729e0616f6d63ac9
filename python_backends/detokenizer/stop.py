"""Stop strings, found in a text as it grows.

Of all occurrences the one that ends first is the match; of those that end together, the one that starts first. The
result does not depend on how the text is cut. Text is held back only while it may become part of a match. The work per
character is constant (amortised) for any number of stop strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from python_backends.detokenizer.decoding import Decoding

ROOT = 0


class StopStrings:
    """The stop strings of one request, compiled: an Aho-Corasick automaton over characters.

    A state is the longest suffix of the text that is a prefix of some stop string. Building takes time and memory in
    proportion to the characters of all stop strings.

    held: by state, how many characters at the end of the text may become part of a match.
    """

    def __init__(self, strings: Sequence[str] = ()) -> None:
        """strings: none of them empty, as the tokenizer sends them."""
        self._next: list[dict[str, int]] = [{}]  # state -> character -> longer state
        self._match: list[str | None] = [None]  # state -> the stop string that ends here
        for string in strings:
            state = ROOT
            for character in string:
                longer = self._next[state].setdefault(character, len(self._next))
                if longer == len(self._next):
                    self._next.append({})
                    self._match.append(None)
                state = longer
            self._match[state] = string
        self._fallback = [ROOT] * len(self._next)  # state -> the next shorter such suffix
        self.held = [0] * len(self._next)
        self._link()

    def __bool__(self) -> bool:
        return bool(self._next[ROOT])

    def scan(self, state: int, text: str) -> tuple[int, int, str | None]:
        """Read ``text`` from ``state`` on, up to the first match. Return the state, the number of characters read, and
        the stop string that ends with the last of them."""
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
                self.held[state] = max(self.held[state], (len(match) if match else self.held[longer]) - 1)
        for state in order:
            self.held[state] = max(self.held[state], self.held[self._fallback[state]])

    def _step(self, state: int, character: str) -> int:
        while character not in self._next[state] and state != ROOT:
            state = self._fallback[state]
        return self._next[state].get(character, ROOT)


class StopMatcher:
    """Look for stop strings in one text. stop: the stop string that ended the text, None so far."""

    def __init__(self, stops: StopStrings, include_stop: bool = False) -> None:
        """include_stop: return the stop string too, so that no text is held back."""
        self._stops = stops
        self._include_stop = include_stop
        self.stop: str | None = None
        self.state = ROOT
        self._held: deque[str] = deque()  # characters

    def feed(self, text: str) -> str:
        """Return the text that is certain to lie before the first match, or in it if included; empty after a match."""
        if self.stop is not None:
            return ""
        self.state, read, self.stop = self._stops.scan(self.state, text)
        if self._include_stop:
            return text[:read]
        kept = len(self.stop) if self.stop is not None else self._stops.held[self.state]
        if not self._held and not kept:
            return text[:read]
        self._held.extend(text[:read])
        return self._release(len(self._held) - kept)

    def finish(self) -> str:
        """Return the text held back, when the text ends without a match."""
        return self._release(len(self._held)) if self.stop is None else ""

    def _release(self, count: int) -> str:
        return "".join([self._held.popleft() for _ in range(count)])


class TextStream:
    """Decode ids and look for stop strings in their text.

    A stop string is found with the first id after which the text, if it ended there, would contain it. So a stop
    string of byte tokens (a newline is one in Llama 2's vocabulary) ends the generation with that token, although its
    text is undecided until the next one. An incomplete character is never matched.

    A stream that is not armed looks for no stop string, and the text of the ids fed before ``arm`` is never part of a
    match; ``min_tokens`` needs this. To arm it inside an increment, feed the increment's ids in two parts.
    """

    def __init__(
        self,
        decoding: Decoding,
        stops: StopStrings,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        armed: bool = True,
    ) -> None:
        """include_stop: leave the matched stop string in the text. armed: look for stop strings from the start."""
        self._decoder = decoding.open(skip_special_tokens)
        self._stops, self._has_stops = stops, bool(stops)
        self._armed = armed
        self._matcher = StopMatcher(stops, include_stop)
        self._unarmed_draft = 0  # characters of the decoder's draft that came before the stream was armed
        self._draft_state: int | None = None  # the matcher's state after the scanned parts of the draft
        self._draft_scanned = 0  # parts of the draft

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, None so far."""
        return self._matcher.stop

    def arm(self) -> None:
        """Look for stop strings from here on."""
        if not self._armed:
            self._armed = True
            self._draft_scanned = len(self._decoder.draft)
            self._unarmed_draft = sum(map(len, self._decoder.draft))

    def feed(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Return the text these ids add, and how many of them belong to the generation. These are all of them, or those
        up to the one whose text completes a stop string; after a stop, none."""
        matcher = self._matcher
        if matcher.stop is not None:
            return "", 0
        if not self._armed or not self._has_stops:
            return self._decoder.feed(token_ids), len(token_ids)
        texts = []
        for consumed, token_id in enumerate(token_ids, 1):
            text = self._decoder.feed((token_id,))
            if text:
                texts.append(self._match(text))
            if not self._decoder.draft:
                self._draft_state, self._draft_scanned = None, 0
            elif matcher.stop is None and self._draft_matches():
                texts.append(self._match("".join(self._decoder.draft)))
            if matcher.stop is not None:
                return "".join(texts), consumed
        return "".join(texts), len(token_ids)

    def finish(self) -> str:
        """Return the rest of the text after the last id; it may still complete a stop string."""
        if self._matcher.stop is not None:
            return ""
        text = self._decoder.finish()
        return self._match(text) + self._matcher.finish() if self._armed else text

    def _match(self, text: str) -> str:
        unarmed, self._unarmed_draft = text[: self._unarmed_draft], 0
        return unarmed + self._matcher.feed(text[len(unarmed) :])

    def _draft_matches(self) -> bool:
        """Whether the draft completes a stop string. Scans each part of the draft once."""
        draft = self._decoder.draft
        state = self._matcher.state if self._draft_state is None else self._draft_state
        for part in draft[self._draft_scanned :]:
            state, _, stop = self._stops.scan(state, part)
            if stop is not None:
                return True
        self._draft_state, self._draft_scanned = state, len(draft)
        return False
