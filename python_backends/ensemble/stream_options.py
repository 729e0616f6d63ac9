"""What the tokenizer wants the detokenizer to know of a request. An ensemble may not feed the detokenizer from
anything but the engine (Triton's rule for steps after a decoupled one), so it rides through the engine unopened."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class StreamOptions:
    """stream: a response per piece of text, else one with all of it. echo: the prompt's ids come first in the stream.
    stop: strings to match on text. include_stop: leave the match in the text. hidden_ids: stop ids that end the stream
    and are not part of the output. min_tokens: no stop string counts before so many ids. timings: report the
    instants of tokenizer, engine and detokenizer with the end. tokenized_ns: when the ids were ready on the monotonic
    clock, 0 if unknown."""

    stream: bool = False
    echo: bool = False
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    hidden_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    min_tokens: int = 0
    timings: bool = False
    tokenized_ns: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StreamOptions:
        fields = json.loads(text) if text else {}
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
