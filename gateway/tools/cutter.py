"""Separate tool calls and reasoning from the text of one output, while it arrives.

However the output is split into deltas, what they add up to is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from contract.generation import Sections, TokenDelta, ToolCallDelta
from gateway.tools.call_scanner import CallScanner
from gateway.tools.chat_format import END_THINK, OPEN, THINK, ChatFormat
from gateway.tools.markers import Marker, MarkerFinder, Tokens

_TEXT, _REASONING, _BETWEEN, _CALL = "text", "reasoning", "between", "call"


@dataclass(frozen=True)
class CutterRules:
    """What is cut.

    names: of the tools; empty: calls stay text.
    parallel: whether there may be several calls; else those after the first are left out.
    guided: a guide holds the output to the format by its text, so that a marker spelled by other tokens counts too.
    reasoning: whether reasoning sections are separated.
    drops_special: special tokens come as text, because markers are among them; the others are left out here.
    begun: ids of the output that came before what is cut, so that it may begin in a section.
    """

    format: ChatFormat
    names: Collection[str] = ()
    parallel: bool = True
    guided: bool = False
    reasoning: bool = False
    drops_special: bool = False
    begun: tuple[int, ...] = ()

    def markers(self, vocabulary: Tokens) -> list[str]:
        """Return the texts that begin or end something."""
        family = self.format.family
        found = [family.begin, family.end] if family is not None and self.names else []
        found += [THINK, END_THINK] if self.reasoning else []
        if self.drops_special:
            found += [vocabulary.token(token)[0] for token in vocabulary.special]
        return [text for text in dict.fromkeys(found) if text]


class Cutter:
    """Cut one output. call_id: returns the id of a call by its index."""

    def __init__(self, rules: CutterRules, vocabulary: Tokens, call_id: Callable[[int], str]) -> None:
        self._rules, self._family, self._call_id = rules, rules.format.family, call_id
        self._finder = MarkerFinder(rules.markers(vocabulary), vocabulary, not rules.drops_special)
        self._knows_ids = vocabulary.known
        opened = rules.reasoning and rules.format.reasoning == OPEN
        self._counting = self._trims = opened  # trims: blanks at the beginning of a section are left out
        self._reasoning_tokens = self._ids = self._characters = self._reasoning_characters = 0
        for token_id in rules.begun:
            markers = self._finder.read_id(token_id)
            self._count(markers)
            self._trims = bool(markers)
        self._finder.forget()
        self._state = _REASONING if self._counting else _TEXT
        self._passes = self._has_ids = False  # passes: the output was cut elsewhere
        self._blank = ""  # blanks that are part of the text if more of it follows
        self._gap = ""  # blanks that stood between two texts, which a section separates
        self._wrote = False  # there is text
        self._began = False  # something other than blanks came
        self._raw: str | None = None  # becomes text if what begins here is no call
        self._bare = False
        self._scanner = CallScanner()
        self._named = False  # the call's first delta was sent
        self._calls_begun = 0
        self._parts: list[tuple[str, str | ToolCallDelta]] = []

    def feed(self, delta: TokenDelta) -> TokenDelta:
        """Return the delta with what is certain of its parts, and the rest in later ones."""
        # An upstream sends no ids, and has cut its output already.
        self._passes = self._passes or delta.sections is not None or bool(delta.text and not self._fed(delta))
        if self._passes:
            return delta
        for token_id in delta.token_ids:
            self._count(self._finder.read_id(token_id))
        for piece in self._finder.feed(delta.text):
            self._read(piece)
        self._ids += len(delta.token_ids)
        self._characters += len(delta.text)
        usage = delta.usage
        if delta.finish_reason:
            self._finish()
            if not self._knows_ids:  # their share of the text
                self._reasoning_tokens = self._ids * self._reasoning_characters // max(1, self._characters)
            if usage is not None and self._reasoning_tokens:
                usage = dataclasses.replace(usage, reasoning_tokens=self._reasoning_tokens)
        parts, self._parts = self._parts, []
        text = "".join(part for kind, part in parts if kind == _TEXT and isinstance(part, str))
        reasoning = "".join(part for kind, part in parts if kind == _REASONING and isinstance(part, str))
        calls = tuple(part for _, part in parts if isinstance(part, ToolCallDelta))
        sections = Sections(reasoning, calls, tuple(parts)) if reasoning or calls else None
        return dataclasses.replace(delta, text=text, usage=usage, sections=sections)

    def _fed(self, delta: TokenDelta) -> bool:
        """Return whether any delta so far had ids."""
        self._has_ids = self._has_ids or bool(delta.token_ids)
        return self._has_ids

    def _count(self, markers: Sequence[Marker]) -> None:
        """Count one id of the output, which ends these markers."""
        self._reasoning_tokens += self._counting
        for marker in markers:
            if marker.text in (THINK, END_THINK) and self._is_real(marker):
                self._counting = marker.text == THINK

    def _is_real(self, marker: Marker) -> bool:
        return marker.is_token is not False or self._rules.guided

    def _read(self, piece: str | Marker) -> None:
        if isinstance(piece, str):
            self._read_text(piece)
        elif not self._is_real(piece) or not self._switch(piece):
            self._read_text(piece.text)

    def _switch(self, marker: Marker) -> bool:
        """Enter or leave a section; return False if the marker is text here."""
        text, family = marker.text, self._family
        if self._state == _REASONING:
            if text == END_THINK:
                self._enter(_TEXT)
                self._began = False
            return text == END_THINK or self._is_dropped(marker)
        if self._state == _CALL and self._scanner.in_string and (self._rules.guided or not marker.is_token):
            return False
        if text == THINK and self._rules.reasoning:
            self._leave_call()
            self._enter(_REASONING)
        elif family is not None and text == family.begin:
            self._leave_call()
            self._enter(_BETWEEN)
            self._raw, self._bare = text, False
        elif family is not None and text == family.end and self._state != _TEXT:
            if self._raw is None:
                self._leave_call()
                self._enter(_TEXT)
            else:
                self._raw += text
                self._leave_call()
        else:
            return self._is_dropped(marker)
        return True

    def _is_dropped(self, marker: Marker) -> bool:
        return self._rules.drops_special and bool(marker.is_token)

    def _enter(self, state: str) -> None:
        if self._wrote and self._state == _TEXT:
            self._gap = self._gap or self._blank
        self._state, self._trims, self._blank, self._began = state, True, "", True

    def _leave_call(self) -> None:
        """End a call. What looked like the beginning of one and is none becomes text."""
        raw, self._raw = self._raw, None
        self._calls_begun += self._named
        self._named = False
        if self._state in (_CALL, _BETWEEN):
            self._enter(_TEXT)
        if raw is not None:
            self._trims = False
            self._write(_TEXT, raw)

    def _read_text(self, text: str) -> None:
        at = 0
        while at < len(text):
            if self._state == _REASONING:
                self._reasoning_characters += len(text) - at
                return self._write(_REASONING, text[at:])
            if self._state == _CALL:
                at = self._read_call(text, at)
            elif self._state == _BETWEEN:
                at = self._read_between(text, at)
            elif self._is_bare_call(text[at:]):
                raw = self._blank
                self._enter(_BETWEEN)
                self._raw, self._bare = raw, True
            else:
                return self._write(_TEXT, text[at:])

    def _is_bare_call(self, text: str) -> bool:
        family = self._family
        may_be = family is not None and family.bare and self._rules.names and not self._began
        return bool(may_be) and text.lstrip().startswith("{")

    def _read_between(self, text: str, at: int) -> int:
        """Read what stands before, between and after the objects of a section."""
        assert self._family is not None
        if text[at] == "{":
            self._state, self._scanner, self._raw = _CALL, CallScanner(), self._raw or ""
        elif text[at] in self._family.between:
            self._raw = None if self._raw is None else self._raw + text[at]
            return at + 1
        else:
            self._leave_call()
        return at

    def _read_call(self, text: str, at: int) -> int:
        scanner = self._scanner
        end = scanner.feed(text, at)
        if self._raw is not None:
            self._raw += text[at:end]
            if scanner.name and self._bare and scanner.name not in self._rules.names:
                scanner.failed = True
            elif scanner.name:
                self._named, self._raw = True, None
                self._add(self._call_id(self._calls_begun), scanner.name)
        if self._named and (arguments := scanner.take_arguments()):
            self._add(arguments=arguments)
        if scanner.failed:
            self._leave_call()
        elif scanner.done:
            self._state, self._named = _BETWEEN, False
            self._calls_begun += 1
        return end

    def _add(self, call_id: str = "", name: str = "", arguments: str = "") -> None:
        index, last = self._calls_begun, self._parts[-1][1] if self._parts else None
        if isinstance(last, ToolCallDelta) and last.index == index:
            self._parts[-1] = _CALL, dataclasses.replace(last, arguments=last.arguments + arguments)
        elif not index or self._rules.parallel:
            self._parts.append((_CALL, ToolCallDelta(index, call_id, name, arguments)))

    def _write(self, kind: str, text: str) -> None:
        """Add text to the content or the reasoning; blanks at its end wait for what follows."""
        text = self._blank + text
        if self._trims:
            if kind == _TEXT and self._wrote:
                self._gap = self._gap or text[: text[:1].isspace()]
            text = text.lstrip()
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        if shown:
            if kind == _TEXT:
                shown, self._gap, self._wrote = self._gap + shown, "", True
            self._parts.append((kind, shown))
            self._trims, self._began = False, True

    def _finish(self) -> None:
        rest = self._finder.finish()
        # After a call the beginning of a marker is one that the limit has cut.
        if not (self._calls_begun and self._trims) and not (self._state == _BETWEEN and self._raw is None):
            self._read_text(rest)
        self._leave_call()
        if self._state == _TEXT:
            self._parts.append((_TEXT, self._blank))
