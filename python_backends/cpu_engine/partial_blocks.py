"""Tell which prompts must not start in the same step: OpenVINO GenAI's prefix cache would mix them up (2026.4.1).

The cache has the last block of an ended text, and of a prompt from its first step on, even if it is only partly filled.
Two different prompts that begin with all ids of such a text and start in one step are both given that block, and write
into it what follows in their own. A step apart each gets its own.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from python_backends.limits import BLOCK_TOKENS


class PartialBlocks:
    """The texts whose last block is cached in part, and the prompts that start in the next step.

    most: texts that are remembered, the latest ones; the cache has no more blocks.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._texts: OrderedDict[int, None] = OrderedDict()  # hashes of all ids
        self._starting: list[np.ndarray] = []

    def ended(self, ids: np.ndarray) -> None:
        """Take note of a text that the cache may hold: all ids that were computed."""
        if len(ids) % BLOCK_TOKENS:
            self._texts[hash(ids.tobytes())] = None
            if len(self._texts) > self._most:
                self._texts.popitem(last=False)

    def add(self, ids: np.ndarray) -> bool:
        """Add a prompt to the next step; return False, and add nothing, if it must start after that step."""
        if self._texts and any(self._mixed_up(ids, other) for other in self._starting):
            return False
        self._starting.append(ids)
        return True

    def stepped(self) -> None:
        """Take note that the added prompts start: while they run, the cache has their blocks already."""
        for ids in self._starting:
            self.ended(ids)
        self._starting.clear()

    def _mixed_up(self, one: np.ndarray, other: np.ndarray) -> bool:
        """Return whether a cached text ends in the block in which the prompts begin to differ, before they do."""
        shorter = min(len(one), len(other))
        differing = np.flatnonzero(one[:shorter] != other[:shorter])
        common = int(differing[0]) if differing.size else shorter
        if len(one) == len(other) == common:
            return False
        first = common // BLOCK_TOKENS * BLOCK_TOKENS + 1
        return any(hash(one[:length].tobytes()) in self._texts for length in range(first, common + 1))
