"""What the tokenizer, the engines and the detokenizer write and read alike among a request's tensors.

TensorRT-LLM's word lists are INT32[1, 2, L]: row 0 has the ids of all words, row 1 inclusive end offsets, then -1.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from contract.errors import InvalidArgument
from contract.generation import Guide
from python_backends.triton_io import Inputs


@dataclass(frozen=True)
class StreamOptions:
    """What the detokenizer must know of a request, as the tokenizer writes it.

    Triton lets a step after a decoupled one read only that step's outputs, so they pass through the engine unread.

    stream: send a response per increment of text, else one with all of it.
    echo: the stream begins with the prompt's ids.
    stop: strings that end the output.
    include_stop: leave the matched string in the text.
    hidden_ids: stop ids that end the stream and are not part of its text.
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


def read_guide(inputs: Inputs, min_tokens: int, ends: bool) -> Guide | None:
    """Return the guide, None without one.

    ends: the request has ids that end it.
    Raises InvalidArgument: it is malformed, or contradicts the rest of the request.
    """
    kind, text = inputs.text("guided_decoding_guide_type"), inputs.text("guided_decoding_guide")
    if not kind:
        if text:
            raise InvalidArgument("guided_decoding_guide_type", "must be sent with guided_decoding_guide, got none")
        return None
    guide = Guide(kind, text or "").validate()
    # Beyond the grammar's end nothing is left to generate but the end.
    if not ends:
        raise InvalidArgument("ignore_eos", "must be false with a guide (and end_id not -1), got true")
    if min_tokens:
        problem = f"must be 0 with a guide, which decides where the output ends, got {min_tokens}"
        raise InvalidArgument("min_tokens", problem)
    return guide


def decode_word_list(name: str, array: np.ndarray | None) -> list[tuple[int, ...]]:
    """Return the words, each as its ids; no words for an absent or empty tensor. Raises InvalidArgument: the tensor is
    not a word list."""
    if array is None or array.size == 0:
        return []
    if array.size % 2:
        raise InvalidArgument(name, f"must hold two rows of the same length, got {array.size} values")
    ids, offsets = array.reshape(2, -1).tolist()
    words, start = [], 0
    for index, end in enumerate(offsets):
        if end == -1:
            if any(later != -1 for later in offsets[index:]):
                raise InvalidArgument(name, f"row 1 must hold -1 only at its end, got one at position {index}")
            break
        if not start < end <= len(ids):
            raise InvalidArgument(name, f"row 1 must hold rising offsets up to {len(ids)}, got {end} after {start}")
        words.append(tuple(ids[start:end]))
        start = end
    return words


def encode_word_list(words: list[tuple[int, ...]]) -> np.ndarray:
    """Return INT32[1, 2, L], the inverse of decode_word_list; L is 0 without words. No word may be empty: its end would
    equal the one before it, which engines refuse."""
    assert all(words), "a word list holds an empty word"
    ids = [token for word in words for token in word]
    offsets = np.cumsum([len(word) for word in words], dtype=np.int32).tolist()
    return np.array([[ids, offsets + [-1] * (len(ids) - len(offsets))]], dtype=np.int32).reshape(1, 2, len(ids))
