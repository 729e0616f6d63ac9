"""How much of a prompt the engine's prefix cache already holds.

OpenVINO GenAI shares full KV blocks between prompts but tells nobody; this shadow remembers the chained hashes of
the full blocks that went through, as many as the pool can hold, least recently used first out. It is an estimate:
the engine may evict earlier when running sequences need the blocks.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np


class PrefixCacheEstimate:
    def __init__(self, blocks: int, block_tokens: int) -> None:
        self._capacity = blocks
        self._block_tokens = block_tokens
        self._seen: OrderedDict[int, None] = OrderedDict()

    def cached_tokens(self, input_ids: np.ndarray) -> int:
        """Leading tokens of the prompt in full blocks seen before; the last token is always computed."""
        cached = 0
        for digest in self._digests(input_ids[:-1]):
            if digest not in self._seen:
                break
            cached += self._block_tokens
        return cached

    def remember(self, input_ids: np.ndarray) -> None:
        for digest in self._digests(input_ids):
            self._seen.pop(digest, None)
            self._seen[digest] = None
        while len(self._seen) > self._capacity:
            self._seen.popitem(last=False)

    def _digests(self, input_ids: np.ndarray):
        digest = 0
        for start in range(0, input_ids.size - self._block_tokens + 1, self._block_tokens):
            digest = hash((digest, input_ids[start : start + self._block_tokens].tobytes()))
            yield digest
