"""A hook that removes personal data from prompts and outputs: addresses of e-mail and IP, telephone numbers, IBANs,
payment cards whose check digit is right, and secrets (contract/redaction.py has the patterns).

    [hooks.personal_data]
    use = "examples.hooks.personal_data:PersonalData"
    options = { keep = ["IP"] }      # kinds that may stay; none by default
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from contract.errors import InvalidArgument
from contract.generation import GenerationRequest
from contract.redaction import PATTERNS, redact
from gateway.hooks.call import Call

# What may stand on both sides of a blank inside a number, and what stands in no pattern.
_JOINED = re.compile(r"[A-Z0-9().+-]")
_APART = re.compile(r"[^\w\s.%+\-@:/=~()]")
# The fields of a message that are no text (None), where the protocol has them: arguments may have others so named.
_MESSAGE: dict[str, Any] = {
    "role": None,
    "name": None,
    "tool_call_id": None,
    "content": {"type": None},
    "tool_calls": {"id": None, "type": None, "function": {"name": None}},
}


class PersonalData:
    """Removes personal data. keep: names of patterns that are left alone."""

    def __init__(self, keep: Sequence[str] = ()) -> None:
        if unknown := set(keep) - PATTERNS.keys():
            raise ValueError(f"keep must hold names of {', '.join(PATTERNS)}, got {', '.join(sorted(unknown))}")
        patterns = {name: pattern for name, pattern in PATTERNS.items() if name not in keep}
        self._redact: Callable[[str], str] = lambda text: redact(text, patterns)

    def request(self, request: GenerationRequest, call: Call) -> GenerationRequest:
        if request.input_ids is not None:
            raise InvalidArgument("prompt", "must be text: personal data cannot be removed from token ids")
        if request.messages is None:
            return replace(request, text_input=self._redact(request.text_input or ""))
        return replace(request, messages=tuple(self._inside(message, _MESSAGE) for message in request.messages))

    def output(self, part: str, call: Call) -> StreamedText:
        if part == "arguments":  # whole ones, so that they stay JSON
            return StreamedText(self._in_json, lambda text: 0)
        return StreamedText(self._redact, last_cut)

    def _in_json(self, text: str) -> str:
        try:
            return json.dumps(self._inside(json.loads(text), {}), ensure_ascii=False)
        except ValueError:  # the output was cut
            return self._redact(text)

    def _inside(self, value: Any, fields: Mapping[str, Any], name: str = "") -> Any:
        """Return a JSON value without personal data. fields: as _MESSAGE, of the objects in it. name: its key."""
        if isinstance(value, dict):
            known = {key: fields.get(key, {}) for key in value}
            return {key: value[key] if of is None else self._inside(value[key], of, key) for key, of in known.items()}
        if isinstance(value, list | tuple):
            return [self._inside(inner, fields) for inner in value]
        if isinstance(value, str):
            return self._in_json(value) if name == "arguments" else self._redact(value)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return redacted if number and (redacted := self._redact(str(value))) != str(value) else value


class StreamedText:
    """Redacts a text that arrives in parts: however it is divided, the result is that of the whole text."""

    def __init__(self, redacted: Callable[[str], str], cut: Callable[[str], int]) -> None:
        """cut: returns the place before which a text is ready."""
        self._redacted, self._cut, self._kept = redacted, cut, ""

    def feed(self, text: str) -> str:
        self._kept += text
        cut = self._cut(self._kept)
        ready, self._kept = self._kept[:cut], self._kept[cut:]
        return self._redacted(ready)

    def finish(self) -> str:
        return self._redacted(self._kept) if self._kept else ""


def last_cut(text: str) -> int:
    """Return the last place of a text that no pattern reaches across, whatever follows."""
    keys = [(key.start(), key.end()) for key in PATTERNS["PRIVATE_KEY"].finditer(text)]  # over several lines
    for place in range(len(text), 0, -1):
        if any(start < place < end or place == end == len(text) for start, end in keys):
            continue
        before, after = text[place - 1], text[place : place + 1]
        if after.isspace():
            following = text[place + 1 : place + 2]
            apart = not _JOINED.match(before) or (bool(following.strip()) and not _JOINED.match(following))
            if after == "\n" or (apart and not before.isspace() and not text.endswith("earer", 0, place)):
                return place
        elif _APART.match(before) and "://" not in text[:place].split()[-1]:
            return place
    return 0
