"""TensorRT-LLM's word lists, INT32[1, 2, L]: row 0 the ids of all words, row 1 inclusive end offsets, then -1."""

from __future__ import annotations

import numpy as np

from contract.errors import InvalidArgument


def decode_word_list(name: str, array: np.ndarray | None) -> list[tuple[int, ...]]:
    """Return the words, each as its ids; no words for an absent or empty tensor.

    Raises:
        InvalidArgument: the tensor is not a word list.
    """
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
    """Return INT32[1, 2, L], the inverse of decode_word_list; L is 0 without words.

    No word may be empty: its end would equal the one before it, which engines refuse.
    """
    assert all(words), "a word list holds an empty word"
    ids = [token for word in words for token in word]
    offsets = np.cumsum([len(word) for word in words], dtype=np.int32).tolist()
    return np.array([[ids, offsets + [-1] * (len(ids) - len(offsets))]], dtype=np.int32).reshape(1, 2, len(ids))
