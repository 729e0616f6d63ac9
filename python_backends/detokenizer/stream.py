"""The text of one generation: ids in, text out, ended by a stop string at the token that completes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from python_backends.detokenizer.decoding import Decoding
from python_backends.detokenizer.stop import StopMatcher, StopStrings


class TextPiece(NamedTuple):
    """What one feed adds.

    text: new text, possibly empty. consumed: how many of the ids fed belong to the generation, which is all of them,
    or those up to and including the one whose text completed the stop string. stop: that stop string, or None.
    """

    text: str
    consumed: int
    stop: str | None


class TextStream:
    """Decodes ids and looks for stop strings in their text.

    A stop string is found with the first id after which the text, if it ended there, would contain it. So a stop
    string of byte tokens (a newline is one in Llama 2's vocabulary) ends the generation at once, although its text
    is undecided until the next token. An incomplete character is never taken for text.

    While the stream is not armed no stop string is looked for, and the text that the ids fed before ``arm`` spell is
    never part of a match; that is what ``min_tokens`` needs. To arm it inside a chunk, feed the chunk in two.
    """

    def __init__(
        self,
        decoding: Decoding,
        stops: StopStrings,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        armed: bool = True,
    ) -> None:
        self._stream = decoding.open(skip_special_tokens)
        self._has_stops = bool(stops)
        self._stops = stops
        self._matcher = StopMatcher(stops, include_stop, armed)
        self._exempt = 0  # characters of the decoder's draft that came before the stream was armed
        self._foreseen: int | None = None  # the matcher's state after the draft, as far as it was looked at
        self._looked_at = 0  # parts of the draft

    def arm(self) -> None:
        if not self._matcher.armed:
            self._matcher.arm()
            self._looked_at = len(self._stream.draft)
            self._exempt = sum(map(len, self._stream.draft))

    def feed(self, token_ids: Sequence[int]) -> TextPiece:
        """The text these ids add. After a stop nothing is consumed and nothing added."""
        matcher = self._matcher
        if matcher.stop is not None:
            return TextPiece("", 0, matcher.stop)
        if not self._has_stops or not matcher.armed:
            return TextPiece(self._stream.feed(token_ids), len(token_ids), None)
        texts = []
        for consumed, token_id in enumerate(token_ids, 1):
            text = self._stream.feed((token_id,))
            if text:
                texts.append(self._match(text))
            if not self._stream.draft:
                self._foreseen, self._looked_at = None, 0
            elif matcher.stop is None and self._draft_matches():
                texts.append(self._match("".join(self._stream.draft)))
            if matcher.stop is not None:
                return TextPiece("".join(texts), consumed, matcher.stop)
        return TextPiece("".join(texts), len(token_ids), None)

    def finish(self) -> TextPiece:
        """The rest of the text, when no more ids come. A stop string may still be completed by it."""
        if self._matcher.stop is not None:
            return TextPiece("", 0, self._matcher.stop)
        text = self._match(self._stream.finish()) + self._matcher.finish()
        return TextPiece(text, 0, self._matcher.stop)

    def _match(self, text: str) -> str:
        exempt, self._exempt = text[: self._exempt], 0
        return exempt + self._matcher.feed(text[len(exempt) :])

    def _draft_matches(self) -> bool:
        """Whether the draft completes a stop string, each part of it looked at once."""
        draft = self._stream.draft
        state = self._matcher.state if self._foreseen is None else self._foreseen
        for part in draft[self._looked_at :]:
            state, _, stop = self._stops.scan(state, part)
            if stop is not None:
                return True
        self._foreseen, self._looked_at = state, len(draft)
        return False
