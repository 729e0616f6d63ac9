"""The text of one generation, ended by a stop string at the token that completes it."""

from __future__ import annotations

from collections.abc import Sequence

from python_backends.detokenizer.decoding import Decoding
from python_backends.detokenizer.stop import StopMatcher, StopStrings


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
        """
        decoding: the tokenizer's decoder.
        stops: the request's stop strings.
        skip_special_tokens: leave special tokens out of the text.
        include_stop: leave the matched stop string in the text.
        armed: look for stop strings from the start.
        """
        self._decoder = decoding.open(skip_special_tokens)
        self._has_stops = bool(stops)
        self._stops = stops
        self._matcher = StopMatcher(stops, include_stop, armed)
        self._unarmed_draft = 0  # characters of the decoder's draft that came before the stream was armed
        self._draft_state: int | None = None  # the matcher's state after the scanned parts of the draft
        self._draft_scanned = 0  # parts of the draft

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, None so far."""
        return self._matcher.stop

    def arm(self) -> None:
        """Look for stop strings from here on."""
        if not self._matcher.armed:
            self._matcher.arm()
            self._draft_scanned = len(self._decoder.draft)
            self._unarmed_draft = sum(map(len, self._decoder.draft))

    def feed(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Return the text these ids add, and how many of them belong to the generation.

        These are all of them, or those up to the one whose text completes a stop string; after a stop, none.
        """
        matcher = self._matcher
        if matcher.stop is not None:
            return "", 0
        if not self._has_stops or not matcher.armed:
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
        return self._match(self._decoder.finish()) + self._matcher.finish()

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
