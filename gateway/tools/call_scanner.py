"""Read a tool call, a JSON object with a name and arguments, while its text arrives."""

from __future__ import annotations

import re

import orjson

from gateway.tools.chat_format import FAMILIES

_BLANK = " \t\r\n"
_NAMES = ("name", *{family.arguments for family in FAMILIES.values()})
_STRING_END = re.compile(r'["\\]')
_STRUCTURE = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r"[\s,}\]]")


class ValueScanner:
    """Find the end of one JSON value. done: whether it is complete. in_string: whether the text so far ends in one."""

    def __init__(self) -> None:
        self.done = self.in_string = False
        self._depth = 0
        self._begun = self._escaped = self._scalar = False

    def feed(self, text: str, at: int) -> int:
        """Read on from ``text[at]``; return where the value ends, or the text."""
        while at < len(text) and not self.done:
            if self._escaped:
                self._escaped = False
                at += 1
            elif self.in_string:
                found = _STRING_END.search(text, at)
                at = found.end() if found else len(text)
                self._escaped = found is not None and found[0] == "\\"
                self.in_string = found is None or self._escaped
                self.done = not self.in_string and self._depth == 0
            elif self._scalar:
                found = _SCALAR_END.search(text, at)
                at = found.start() if found else len(text)
                self.done = found is not None
            else:
                at = self._structure(text, at)
        return at

    def _structure(self, text: str, at: int) -> int:
        if not self._begun:
            self._begun = True
            self._scalar = text[at] not in '"{['
            if self._scalar:
                return at
        found = _STRUCTURE.search(text, at)
        if found is None:
            return len(text)
        self.in_string = found[0] == '"'
        self._depth += (found[0] in "{[") - (found[0] in "}]")
        self.done = found[0] in "}]" and self._depth == 0
        return found.end()


class CallScanner:
    """Read one object. name: "" until it is known. failed: it is no call, and nothing more is read."""

    def __init__(self) -> None:
        self.name = ""
        self.done = self.failed = False
        self._expected = "{"
        self._key = ""
        self._value: ValueScanner | None = None
        self._parts: list[str] = []  # of a key or a value that is needed whole
        self._streams = False  # the value's text belongs to the arguments
        self._has_arguments = False
        self._arguments: list[str] = []

    @property
    def in_string(self) -> bool:
        return self._value is not None and self._value.in_string

    def take_arguments(self) -> str:
        """Return the text of the arguments, as it was written, that came since the last time."""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def feed(self, text: str, at: int = 0) -> int:
        """Read on from ``text[at]``; return where the object ends, or fails, or the text."""
        while at < len(text) and not (self.done or self.failed):
            if self._value is not None:
                end = self._value.feed(text, at)
                (self._arguments if self._streams else self._parts).append(text[at:end])
                at = end
                if self._value.done:
                    self._end_value()
            elif text[at] in _BLANK:
                at += 1
            else:
                at = self._expect(text, at)
        return at

    def _expect(self, text: str, at: int) -> int:
        """Read one character that is no part of a key or a value, or begin one of these."""
        character, expected = text[at], self._expected
        if expected == "value" or (expected == "key" and character == '"'):
            self._value, self._parts = ValueScanner(), []
            is_arguments = expected == "value" and self._key in _NAMES[1:]
            self._streams = is_arguments and character in "{[" and not self._has_arguments
            return at
        if expected == "key" and character == "}":
            self.done = bool(self.name)
            self.failed = not self.name
            if not self._has_arguments:
                self._arguments.append("{}")
        elif expected in "{:" and character == expected:
            self._expected = "key" if expected == "{" else "value"
        elif not (expected == "key" and character == ","):
            self.failed = True
        return at if self.failed else at + 1

    def _end_value(self) -> None:
        whole, self._value = "".join(self._parts), None
        if self._expected == "key":
            self._key, self._expected = _text(whole) or "", ":"
            return
        self._expected = "key"
        if self._key == "name" and not self.name:
            self.name = _text(whole) or ""
            self.failed = not self.name
        elif self._key in _NAMES[1:] and not self._has_arguments and whole != "null":
            self._has_arguments = True
            if not self._streams:
                # Some models write the arguments as a string that holds the JSON text.
                self._arguments.append(_text(whole) or whole)


def _text(value: str) -> str | None:
    """Return the JSON string in ``value``, None if it is none."""
    try:
        found = orjson.loads(value)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, str) else None
