"""Estimate which prompts a replica has in its prefix cache: those that this process sent there, as many as the cached
tokens that the replica reports suggest."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from clients.replica_set import costs
from contract.generation import GenerationRequest

BLOCK_BYTES = 256
MOST_BLOCKS = 256  # of a prompt; what follows has no effect on routing
_LEAST, _FIRST, _MOST = 64, 4096, 65_536  # blocks of a replica


def blocks(request: GenerationRequest) -> tuple[bytes, ...]:
    """Return the hashes of the prompt's whole blocks, each with all blocks before it: bytes[8] each."""
    text = costs.prefix(request, MOST_BLOCKS * BLOCK_BYTES, whole=True).encode(errors="replace")
    hashes, digest = [], b""
    for start in range(0, min(len(text), MOST_BLOCKS * BLOCK_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES):
        digest = hashlib.blake2b(text[start : start + BLOCK_BYTES], digest_size=8, key=digest).digest()
        hashes.append(digest)
    return tuple(hashes)


class PrefixCache:
    """The blocks that one replica probably has cached."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, None] = OrderedDict()  # the least recently used first
        self._most = _FIRST  # how many it keeps, as its reports suggest

    def fraction(self, prompt: Sequence[bytes]) -> float:
        """Return the leading part of a prompt that is cached, 0 to 1."""
        missing = next((place for place, block in enumerate(prompt) if block not in self._blocks), len(prompt))
        return missing / max(1, len(prompt))

    def sent(self, prompt: Sequence[bytes]) -> None:
        """Take note that the replica computes this prompt."""
        for block in reversed(prompt):  # the beginning, which other prompts share, is dropped last
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def reported(self, expected: float, fraction: float) -> None:
        """Learn how much the replica keeps: the part of a prompt expected in its cache, and the reported fraction."""
        if fraction < 0.5 * expected:
            self._most = max(_LEAST, min(self._most, len(self._blocks)) * 4 // 5)
        elif expected:
            self._most = min(_MOST, self._most + len(self._blocks) // 64 + 1)
