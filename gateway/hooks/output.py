"""Pass the output of one choice through the filters of hooks, text by text: each section of it has filters of its own.

What filters kept back is given where a section ends, so that text, reasoning and tool calls stay in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from contract.generation import Sections, TokenDelta, ToolCallDelta
from gateway.hooks.call import Call
from gateway.hooks.hook import HookFailed, LoadedHook, WrongValue


@dataclass
class _Filter:
    """One hook's filter of one section.

    found: the hook's own; None to leave the text as it is. kept: text that went in and, as far as is known, did not
    come out, which is given if the filter fails and the hook's rule is to go on without it.
    """

    hook: LoadedHook
    found: Any
    kept: str = ""

    async def feed(self, text: str) -> str:
        if self.found is None or not text:
            return text
        self.kept += text
        given = await self._given("feed", text)
        # A text that was changed cannot be told from one that is kept.
        self.kept = self.kept[len(given) :] if self.kept.startswith(given) else ""
        return given

    async def finish(self) -> str:
        return await self._given("finish") if self.found is not None else ""

    async def _given(self, method: str, *text: str) -> str:
        try:
            given: str = await self.hook.call(method, *text, of=self.found, check=_text)
            return given
        except HookFailed:
            self.found = None
            return self.kept


class ChoiceOutput:
    """The output of one choice."""

    def __init__(self, hooks: Sequence[LoadedHook], call: Call) -> None:
        self._hooks, self._call = hooks, call
        self._section: tuple[str, int] | None = None  # kind, and index of a tool call
        self._filters: list[_Filter] = []

    async def changed(self, delta: TokenDelta) -> TokenDelta:
        """Return a delta as the filters give it, the last one with all that they kept back."""
        parts: list[tuple[str, str | ToolCallDelta]] = []
        for kind, part in delta.parts:
            call = part if isinstance(part, ToolCallDelta) else None
            section = (kind, call.index if call is not None else 0)
            if part and section != self._section:
                await self._finish(parts)
                self._section = section
                self._filters = [await self._filter(hook, kind) for hook in self._hooks]
            text = await self._fed(part.arguments if isinstance(part, ToolCallDelta) else part)
            parts.append((kind, text if call is None else replace(call, arguments=text)))
        if delta.finish_reason:
            await self._finish(parts)
        parts = [(kind, part) for kind, part in parts if part]
        text, reasoning = ("".join(str(part) for kind, part in parts if kind == name) for name in ("text", "reasoning"))
        calls = tuple(part for _, part in parts if isinstance(part, ToolCallDelta))
        sections = Sections(reasoning, calls, tuple(parts)) if reasoning or calls else None
        return replace(delta, text=text, sections=sections)

    async def _filter(self, hook: LoadedHook, kind: str) -> _Filter:
        try:
            part = "arguments" if kind == "call" else kind
            return _Filter(hook, await hook.call("output", part, self._call, check=_filters))
        except HookFailed:
            return _Filter(hook, None)

    async def _fed(self, text: str, first: int = 0) -> str:
        for one in self._filters[first:]:
            text = await one.feed(text)
        return text

    async def _finish(self, parts: list[tuple[str, str | ToolCallDelta]]) -> None:
        rest = ""
        for place, one in enumerate(self._filters):
            rest += await self._fed(await one.finish(), place + 1)
        if rest and self._section is not None:
            kind, index = self._section
            parts.append((kind, ToolCallDelta(index, arguments=rest) if kind == "call" else rest))
        self._filters, self._section = [], None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise WrongValue(f"must return text, got {type(value).__name__}")
    return value


def _filters(value: Any) -> Any:
    if value is not None and not all(callable(getattr(value, name, None)) for name in ("feed", "finish")):
        raise WrongValue(f"must return an object with feed and finish, or None, got {type(value).__name__}")
    return value
