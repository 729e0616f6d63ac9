"""What the detokenizer must know of a request, as the tokenizer writes it.

Triton lets a step after a decoupled one read only that step's outputs, so the text passes through the engine unread.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class StreamOptions:
    """Options of one stream.

    stream: send a response per increment of text, else one with all of it.
    echo: the stream begins with the prompt's ids.
    stop: strings that end the output.
    include_stop: leave the matched string in the text.
    hidden_ids: stop ids that end the stream and are not part of the output.
    min_tokens: stop strings count after so many ids.
    timings: report the instants of tokenizer, engine and detokenizer with the last response.
    tokenized_ns: CLOCK_MONOTONIC, the ids were ready; 0 if unknown.
    replayed_ids: ids whose text was sent already, before the stream was cut: an echoed prompt's, then generated ones.
    """

    stream: bool = False
    echo: bool = False
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    hidden_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    min_tokens: int = 0
    timings: bool = False
    tokenized_ns: int = 0
    replayed_ids: tuple[int, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StreamOptions:
        """Parse ``to_json``'s text; an empty one gives the defaults."""
        fields: dict[str, Any] = json.loads(text) if text else {}
        for name, value in fields.items():
            if isinstance(value, list):
                fields[name] = tuple(value)
        return cls(**fields)
