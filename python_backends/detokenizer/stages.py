"""The decoders of the ``tokenizers`` library, one by one, in a form that can be fed piece by piece.

The library decodes a whole list of tokens: every decoder maps a list of strings to a list of strings, and the
text is the last list joined. Seen from a stream, a decoder is one of four kinds:

``Each``          token by token; it may ask whether the token is the first or the last (Replace, Strip,
                  Metaspace, WordPiece, BPEDecoder, and "no decoder", which joins with spaces)
token stages      a list of tokens in, a list of tokens out, with memory (``ByteRuns``, ``Ctc``, ``EachInTurn``)
joins             the tokens become one text (``Concat`` for Fuse and for the end, ``Utf8`` for ByteLevel)
text stages       what is left to do to that one text (``StripText``, ``Substitute``, ``LoneByteToken``, ``Whole``)

A stage gives out what no later token can change and holds back the rest; ``finish`` gives what it held. Where one
decoder's result for a single token is needed, the library's own decoder is asked, so the rules are the library's.
"""

from __future__ import annotations

from codecs import getincrementaldecoder, utf_8_decode
from collections.abc import Callable
from typing import Protocol

REPLACEMENT = "\ufffd"

DecodeTokens = Callable[[list[str]], str]  # the library's Decoder.decode


class TokenStage(Protocol):
    def feed(self, tokens: list[str]) -> list[str]: ...
    def finish(self) -> list[str]: ...


class TextStage(Protocol):
    def feed(self, text: str) -> str: ...
    def finish(self) -> str: ...


# --- token by token ---------------------------------------------------------------------------------------------


class Each:
    """A decoder whose output for a token depends on that token and on being first or last, on nothing else."""

    asks_first = False
    asks_last = False

    def __init__(self, decode: DecodeTokens) -> None:
        self._decode = decode

    def __call__(self, token: str, first: bool, last: bool) -> str:
        return self._decode([token])


class EachFirst(Each):
    """Metaspace drops its mark in the first token only; WordPiece puts a space before all but the first."""

    asks_first = True

    def __call__(self, token: str, first: bool, last: bool) -> str:
        # An empty first token decodes to nothing in both, so what is left is the second token's text.
        return self._decode([token]) if first else self._decode(["", token])


class EachLast(Each):
    """BPEDecoder turns its suffix into a space in all but the last token."""

    asks_last = True

    def __call__(self, token: str, first: bool, last: bool) -> str:
        return self._decode([token]) if last else self._decode([token, ""])


class Spaced(Each):
    """What the library does without a decoder: the tokens joined with spaces."""

    asks_first = True

    def __init__(self) -> None:
        super().__init__("".join)

    def __call__(self, token: str, first: bool, last: bool) -> str:
        return token if first else " " + token


class StripEach(Each):
    """Strip, token by token. The library panics on a token shorter than what it is to lose; here nothing is left."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        super().__init__("".join)
        self._content, self._start, self._stop = content, start, stop

    def __call__(self, token: str, first: bool, last: bool) -> str:
        stage = StripText(self._content, self._start, self._stop)
        return stage.feed(token)


# --- token stages -----------------------------------------------------------------------------------------------


class EachInTurn:
    """An ``Each`` behind a stage that changes the number of tokens. Holds the last if asked for."""

    def __init__(self, each: Each) -> None:
        self._each = each
        self._first = True
        self._held: list[str] = []

    def feed(self, tokens: list[str]) -> list[str]:
        tokens = self._held + tokens
        if self._each.asks_last:
            tokens, self._held = tokens[:-1], tokens[-1:]
        return self._decoded(tokens, last=False)

    def finish(self) -> list[str]:
        return self._decoded(self._held, last=True)

    def _decoded(self, tokens: list[str], last: bool) -> list[str]:
        decoded = []
        for token in tokens:
            decoded.append(self._each(token, self._first, last))
            self._first = False
        return decoded


class Ctc:
    """CTC: a token equal to the one before it is dropped, and so is one of which nothing is left."""

    def __init__(self, decode: DecodeTokens) -> None:
        self._decode = decode
        self._previous: str | None = None

    def feed(self, tokens: list[str]) -> list[str]:
        decoded = []
        for token in tokens:
            if token != self._previous:
                self._previous = token
                decoded.append(self._decode([token]))
        return [token for token in decoded if token]

    def finish(self) -> list[str]:
        return []


_HEX = "0123456789abcdefABCDEF"

# The library reads the two characters with Rust's from_str_radix, which takes either case and a leading plus.
BYTE_TOKENS = {f"<0x{digits}>": int(digits, 16) for digits in [a + b for a in _HEX + "+" for b in _HEX]}

_StrictUtf8 = getincrementaldecoder("utf-8")


class ByteRuns:
    """ByteFallback: a run of tokens like ``<0xE2>`` becomes the text its bytes spell, or, if they are not valid
    UTF-8 as a whole, one U+FFFD for every byte.

    So a run that is valid so far is undecided to its first byte until it ends: one more byte may turn all of it into
    U+FFFD. It is held for exactly that long. A run that is broken can not be mended and is held no longer.

    ``draft`` has what an undecided run spells so far, in parts, oldest first: its complete characters only.
    """

    def __init__(self) -> None:
        self._utf8 = _StrictUtf8("strict")
        self._bytes = 0  # in the undecided run
        self._broken = False
        self._in_run = False
        self.draft: list[str] = []

    def feed(self, tokens: list[str]) -> list[str]:
        if not self._in_run and BYTE_TOKENS.keys().isdisjoint(tokens):
            return tokens
        decided: list[str] = []
        for token in tokens:
            byte = BYTE_TOKENS.get(token)
            if byte is None:
                decided += self.finish()
                decided.append(token)
                continue
            self._in_run = True
            if self._broken:
                decided.append(REPLACEMENT)
                continue
            self._bytes += 1
            try:
                character = self._utf8.decode(bytes((byte,)))
            except UnicodeDecodeError:
                self._broken = True
                decided += [REPLACEMENT] * self._bytes
                self.draft = []
            else:
                if character:
                    self.draft.append(character)
        return decided

    def finish(self) -> list[str]:
        if not self._in_run:
            return []
        if self._broken:
            decided = []
        elif self._utf8.getstate()[0]:  # the run ends inside a character
            decided = [REPLACEMENT] * self._bytes
        else:
            decided = ["".join(self.draft)]
        self._utf8.reset()
        self._bytes, self._broken, self._in_run, self.draft = 0, False, False, []
        return decided


# --- joins ------------------------------------------------------------------------------------------------------


class Concat:
    """Fuse, and the end of every decoder."""

    def feed(self, pieces: list[str]) -> str:
        return "".join(pieces)

    def finish(self) -> str:
        return ""


class Utf8:
    """ByteLevel's second half: bytes to text, a U+FFFD for every longest part of a character that is not one.

    Holds the at most three bytes that may still become a character.
    """

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, pieces: list[bytes]) -> str:
        data = self._pending + b"".join(pieces)
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def finish(self) -> str:
        data, self._pending = self._pending, b""
        return data.decode("utf-8", "replace")


def _byte_of_character() -> dict[str, int]:
    """ByteLevel's alphabet: the printable Latin-1 characters stand for themselves, the rest from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in own}
    others = (byte for byte in range(0x100) if byte not in set(own))
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def byte_level(token: str) -> bytes:
    """ByteLevel's first half. A token with a character outside the alphabet stands for itself."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


class ByteLevelInTurn:
    """``byte_level`` behind a stage that changes the number of tokens."""

    def feed(self, tokens: list[str]) -> list[bytes]:
        return [byte_level(token) for token in tokens]

    def finish(self) -> list[bytes]:
        return []


# --- text stages ------------------------------------------------------------------------------------------------


class StripText:
    """Strip over the whole text: up to ``start`` times ``content`` at its beginning, up to ``stop`` at its end.

    Holds the last ``content`` characters, ``stop`` at most, since the text may end here.
    """

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._start, self._stop = content, start, stop
        self._held = 0  # times content

    def feed(self, text: str) -> str:
        if self._start and text:
            kept = text.lstrip(self._content)
            stripped = min(len(text) - len(kept), self._start)
            self._start = self._start - stripped if stripped == len(text) else 0
            text = text[stripped:]
        if not self._stop:
            return text
        body = text.rstrip(self._content)
        trailing = len(text) - len(body) + (0 if body else self._held)
        before = self._content * self._held if body else ""
        self._held = min(trailing, self._stop)
        return before + body + self._content * (trailing - self._held)

    def finish(self) -> str:
        return ""


class Substitute:
    """Every ``pattern``, from the left and not overlapping, becomes ``content``. Holds what may begin a pattern."""

    def __init__(self, pattern: str, content: str) -> None:
        assert pattern
        self._pattern, self._content = pattern, content
        self._held = ""

    def feed(self, text: str) -> str:
        *done, rest = (self._held + text).split(self._pattern)
        longest = min(len(rest), len(self._pattern) - 1)
        overlaps = (size for size in range(longest, 0, -1) if self._pattern.startswith(rest[-size:]))
        settled = len(rest) - next(overlaps, 0)
        self._held = rest[settled:]
        return self._content.join([*done, rest[:settled]])

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


class LoneByteToken:
    """ByteFallback where there is only one token: is all of the text one byte token?"""

    def __init__(self) -> None:
        self._held: str | None = ""  # None once the text is known to be something else

    def feed(self, text: str) -> str:
        if self._held is None:
            return text
        self._held += text
        if any(token.startswith(self._held) for token in BYTE_TOKENS):
            return ""
        text, self._held = self._held, None
        return text

    def finish(self) -> str:
        held, self._held = self._held or "", None
        byte = BYTE_TOKENS.get(held)
        return held if byte is None else chr(byte) if byte < 0x80 else REPLACEMENT


class Whole:
    """A decoder that may look at all of the text before it says anything: a regular expression, or ByteLevel,
    which reads its alphabet in one way if every character belongs to it and in another if one does not.
    The text is held to the end.
    """

    def __init__(self, decode: DecodeTokens) -> None:
        self._decode = decode
        self._held: list[str] = []

    def feed(self, text: str) -> str:
        self._held.append(text)
        return ""

    def finish(self) -> str:
        held, self._held = self._held, []
        return self._decode(["".join(held)])

    def __copy__(self) -> Whole:
        return Whole(self._decode)  # copies are made for drafts, and no draft gets through


# The library's list, in its order: what WordPiece and CTC call clean-up.
CLEANUP = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
    (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip
