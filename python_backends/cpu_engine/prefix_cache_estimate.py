"""An estimate of how much of a prompt the engine's prefix cache holds.

OpenVINO GenAI shares full KV blocks between prompts but does not report it. This keeps the chained hashes of the full
blocks of past prompts, as many as the pool holds, and drops the least recently used first. The engine may evict a block
earlier, when running sequences need it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np


class PrefixCacheEstimate:
    """Not thread-safe: the engine holds its lock."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        """
        blocks: size of the KV pool, 0 without prefix caching.
        block_tokens: tokens per block.
        """
        self._capacity = blocks
        self._block_tokens = block_tokens
        self._seen: OrderedDict[int, None] = OrderedDict()

    def cached_tokens(self, input_ids: np.ndarray) -> int:
        """Return the prompt's leading tokens in known full blocks; the last token is always computed."""
        cached = 0
        for digest in self._digests(input_ids[:-1]):
            if digest not in self._seen:
                break
            cached += self._block_tokens
        return cached

    def remember(self, input_ids: np.ndarray) -> None:
        """Record a prompt's full blocks."""
        for digest in self._digests(input_ids):
            self._seen.pop(digest, None)
            self._seen[digest] = None
        while len(self._seen) > self._capacity:
            self._seen.popitem(last=False)

    def clear(self) -> None:
        """Forget all: the engine has a new, empty cache."""
        self._seen.clear()

    def _digests(self, input_ids: np.ndarray) -> Iterator[int]:
        digest = 0
        for start in range(0, input_ids.size - self._block_tokens + 1, self._block_tokens):
            digest = hash((digest, input_ids[start : start + self._block_tokens].tobytes()))
            yield digest
