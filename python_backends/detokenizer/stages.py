"""The decoders of the ``tokenizers`` library that we support, each in a form that can be fed token by token.

The library decodes a whole list of tokens: every decoder maps a list of strings to a list of strings, and the text is
the last list joined. For a stream, a decoder is one of four kinds:

``Each``          one token at a time; the result may depend on being the first (Replace, Strip, Metaspace)
token stages      a list of tokens in, a list of tokens out, with memory (``ByteRuns``, ``EachInTurn``)
joins             the tokens become one text (``Concat`` for Fuse and for the end, ``Utf8`` for ByteLevel)
text stages       change that one text (``StripText``, ``Substitute``)

A stage returns what no later token can change and holds the rest; ``finish`` returns what it held. Where the result for
one token is needed, the library's own decoder computes it, so that its rules apply.
"""

from __future__ import annotations

from codecs import getincrementaldecoder, utf_8_decode
from collections.abc import Callable
from typing import Protocol, TypeVar

REPLACEMENT = "\ufffd"

Each = Callable[[str, bool], str]  # of a token, and whether it is the first
_T = TypeVar("_T")


class Stage(Protocol[_T]):
    """A decoder of lists of tokens, between tokens and the join, or of text, after it."""

    def feed(self, given: _T, /) -> _T: ...
    def finish(self) -> _T: ...


def strip_each(content: str, start: int, stop: int) -> Each:
    """Return Strip. The library panics on a token shorter than what it strips; here nothing is left of that token."""
    return lambda token, first: StripText(content, start, stop).feed(token)


def metaspace(decode: Callable[[list[str]], str]) -> Each:
    """Return Metaspace, which removes its mark from the first token. decode: the library's."""
    # An empty first token decodes to nothing, so the result is the second token's text.
    return lambda token, first: decode([token] if first else ["", token])


class EachInTurn:
    """An ``Each`` after a stage that changes the number of tokens."""

    def __init__(self, each: Each) -> None:
        self._each = each
        self._first = True

    def feed(self, tokens: list[str]) -> list[str]:
        decoded = [self._each(token, self._first and not place) for place, token in enumerate(tokens)]
        self._first = self._first and not tokens
        return decoded

    def finish(self) -> list[str]:
        return []


_HEX = "0123456789abcdefABCDEF"

# The library reads the two characters with Rust's from_str_radix, which takes either case and a leading plus.
BYTE_TOKENS = {f"<0x{digits}>": int(digits, 16) for digits in [a + b for a in _HEX + "+" for b in _HEX]}

_StrictUtf8 = getincrementaldecoder("utf-8")


class ByteRuns:
    """ByteFallback: a run of tokens like ``<0xE2>`` becomes the text of its bytes, or, if the run is not valid UTF-8
    as a whole, one U+FFFD for every byte.

    A run that is valid so far is undecided until it ends, because one more byte can turn all of it into U+FFFD. It is
    held until then. An invalid run stays invalid and is not held.

    draft: the complete characters of the undecided run, in parts, oldest first.
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


class Concat:
    """Fuse, and the end of every decoder."""

    def feed(self, tokens: list[str]) -> str:
        return "".join(tokens)

    def finish(self) -> str:
        return ""


class Utf8:
    """ByteLevel's second half: bytes to text, with one U+FFFD for each maximal invalid part. Holds up to three bytes
    that may become a character."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, tokens: list[bytes]) -> str:
        data = self._pending + b"".join(tokens)
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def finish(self) -> str:
        data, self._pending = self._pending, b""
        return data.decode("utf-8", "replace")


def _byte_of_character() -> dict[str, int]:
    """ByteLevel's alphabet: printable Latin-1 characters stand for themselves, the other bytes from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in own}
    others = (byte for byte in range(0x100) if byte not in set(own))
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
CHARACTER_OF_BYTE = {byte: character for character, byte in _BYTE_OF_CHARACTER.items()}


def byte_level(token: str) -> bytes:
    """Return the bytes that a token of ByteLevel's alphabet stands for; any other token is its own UTF-8."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


class StripText:
    """Strip over the whole text: up to ``start`` times ``content`` at its start, up to ``stop`` at its end. Holds the
    last ``content`` characters, ``stop`` at most, since the text may end here."""

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
    """Replace every ``pattern``, from the left and not overlapping, with ``content``. Holds what may start one."""

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
