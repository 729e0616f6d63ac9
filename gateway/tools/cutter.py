"""Separate tool calls and reasoning from the text of one output, while it arrives.

However the output is split into deltas, what they add up to is the same. Markers, such as ``<tool_call>``, are found by
their token ids where they are one token: a model can also spell a marker with ordinary tokens, as when it quotes it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

from contract.generation import Sections, TokenDelta, ToolCallDelta
from gateway.choices import ChoiceDelta, ChoiceDeltas
from gateway.tools.call_scanner import CallScanner
from gateway.tools.chat_format import END_THINK, MISTRAL, OPEN, THINK, ChatFormat
from gateway.tools.vocabulary import Vocabulary

_TEXT, _REASONING, _BETWEEN, _CALL = "text", "reasoning", "between", "call"
_MISTRAL_ID_LENGTH = 9  # Mistral's templates take no other


class Marker(NamedTuple):
    """One occurrence. is_token: whether it is the marker's own token; None if the marker is no token, or unknown."""

    text: str
    is_token: bool | None


@lru_cache(maxsize=64)
def _compiled(markers: tuple[str, ...]) -> tuple[re.Pattern[str], frozenset[str]]:
    """Return what finds the markers, longest first, and all their beginnings. There may be hundreds of markers."""
    beginnings = (text[:size] for text in markers for size in range(1, len(text)))
    return re.compile("|".join(map(re.escape, markers))), frozenset(beginnings)


class MarkerFinder:
    """Split one output at its markers. skips_special: the text leaves out special tokens; no marker is one then."""

    def __init__(self, markers: Iterable[str], vocabulary: Vocabulary, skips_special: bool) -> None:
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


@dataclass(frozen=True)
class CutterRules:
    """What is cut."""

    format: ChatFormat
    names: Collection[str] = ()  # of the tools; empty: calls stay text
    parallel: bool = True  # whether there may be several calls; else those after the first are left out
    guided: bool = False  # a guide holds the output by its text, so that a marker spelled by other tokens counts too
    reasoning: bool = False  # whether reasoning sections are separated
    drops_special: bool = False  # special tokens come as text, because markers are among them; others are left out here
    begun: tuple[int, ...] = ()  # ids of the output that came before, so that it may begin in a section

    def markers(self, vocabulary: Vocabulary) -> list[str]:
        """Return the texts that begin or end something."""
        family = self.format.family
        found = [family.begin, family.end] if family is not None and self.names else []
        found += [THINK, END_THINK] if self.reasoning else []
        if self.drops_special:
            found += [vocabulary.token(token)[0] for token in vocabulary.special]
        return [text for text in dict.fromkeys(found) if text]


class Cutter:
    """Cut one output. call_id: returns the id of a call by its index."""

    def __init__(self, rules: CutterRules, vocabulary: Vocabulary, call_id: Callable[[int], str]) -> None:
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


class ChoiceCutters:
    """The cutters of a response. response_id: the same for one that is sent again, and then so are its calls' ids."""

    def __init__(self, rules: CutterRules, vocabulary: Vocabulary, response_id: str) -> None:
        self._rules, self._vocabulary, self._response_id = rules, vocabulary, response_id
        self._cutters: dict[int, Cutter] = {}

    def cut(self, item: ChoiceDelta) -> ChoiceDelta:
        choice, delta = item
        cutter = self._cutters.get(choice)
        if cutter is None:
            cutter = Cutter(self._rules, self._vocabulary, partial(self._call_id, choice))
            self._cutters[choice] = cutter
        return ChoiceDelta(choice, cutter.feed(delta))

    def _call_id(self, choice: int, call: int) -> str:
        digest = hashlib.sha256(f"{self._response_id}/{choice}/{call}".encode()).hexdigest()
        return digest[:_MISTRAL_ID_LENGTH] if self._rules.format.tools == MISTRAL else f"call_{digest[:24]}"


class CutDeltas:
    """The deltas of a response, cut into text, tool calls and reasoning. Closing it closes them."""

    def __init__(self, deltas: ChoiceDeltas, cutters: ChoiceCutters) -> None:
        self._deltas, self._cutters = deltas, cutters

    def __aiter__(self) -> CutDeltas:
        return self

    async def __anext__(self) -> ChoiceDelta:
        return self._cutters.cut(await anext(self._deltas))

    async def aclose(self) -> None:
        await self._deltas.aclose()
