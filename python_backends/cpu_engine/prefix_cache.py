"""OpenVINO GenAI's prefix cache (2026.4.1): what it holds of a prompt, and which it would mix up or read in part.

The cache has the last block of a text even if it is only partly filled: of an ended text, of a prompt, and of what a
running sequence has computed so far. Two different prompts that begin with all ids of such a text are both given that
block when they are added, and write into it what follows in their own. Once the first has started, it has its own, and
the second gets another. A prompt may start some steps after it was added, when those before it have more tokens than a
step reads; its first token tells that it has.

A prompt of which a step reads a part has the cache tell that the block in which the part ends is full. When it is
cancelled then, every later prompt that begins with these ids finds a block that was never computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from contract.scheduling import BLOCK_TOKENS

_TEXTS_PER_BLOCK = 8


class PrefixCacheEstimate:
    """An estimate of how much of a prompt the cache holds. Not thread-safe: the engine holds its lock.

    OpenVINO GenAI shares full KV blocks between prompts but does not report it. This keeps the chained hashes of the
    full blocks of past prompts, as many as the pool holds, and drops the least recently used first. The engine may
    evict a block earlier, when running sequences need it.
    """

    def __init__(self, blocks: int, block_tokens: int = BLOCK_TOKENS) -> None:
        """blocks: size of the KV pool, 0 without prefix caching. block_tokens: tokens per block."""
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


class PartialBlocks:
    """The texts whose last block may be cached in part, and the prompts that have no token yet.

    blocks: of the cache, 0 if there is none. It may keep a text longer than others that came later, so that more are
        remembered than it has blocks.
    """

    def __init__(self, blocks: int) -> None:
        self._most = _TEXTS_PER_BLOCK * blocks
        self._texts: OrderedDict[int, None] = OrderedDict()  # hashes of all ids that were computed
        self._live: dict[int, tuple[np.ndarray, list[int]]] = {}  # prompt and generated ids

    def add(self, id: int, prompt: np.ndarray) -> bool:
        """Add a sequence; return False, and add nothing, if another one must start before."""
        if self._most:
            for other, generated in self._live.values():
                computed = generated[:-1]
                same = len(other) + len(computed) <= len(prompt) and np.array_equal(prompt[: len(other)], other)
                if same and prompt[len(other) :][: len(computed)].tolist() == computed:
                    self._remember(prompt[: len(other) + len(computed)])
        if any(self._mixed_up(prompt, other) for at, (other, _) in self._live.items() if self.starts(at)):
            return False
        self._live[id] = prompt, []
        return True

    def starts(self, id: int) -> bool:
        """Return whether the cache may have a block of a sequence's prompt under a text that is not in it. It is so
        until its first token, and for a prompt that ends with a block until its second."""
        if not self._most or id not in self._live:
            return False
        prompt, generated = self._live[id]
        return len(generated) < (1 if len(prompt) % BLOCK_TOKENS else 2)

    def shared(self, prompt: np.ndarray, other: np.ndarray) -> int:
        """Return how many tokens of a prompt, in whole blocks, the cache has once another prompt is read."""
        return _common(prompt[:-1], other) // BLOCK_TOKENS * BLOCK_TOKENS if self._most else 0

    def generated(self, id: int, token_ids: Sequence[int]) -> None:
        """Take note of what a step added to a sequence."""
        self._live[id][1].extend(token_ids)

    def end(self, id: int) -> None:
        """Take note that a sequence has left its pipeline, which may keep its text."""
        if id in self._live:
            prompt, generated = self._live.pop(id)
            self._remember(np.concatenate([prompt, np.array(generated[:-1], prompt.dtype)]))  # the last is not computed

    def _remember(self, text: np.ndarray) -> None:
        if len(text) % BLOCK_TOKENS:
            self._texts[hash(text.tobytes())] = None
            self._texts.move_to_end(hash(text.tobytes()))
            if len(self._texts) > self._most:
                self._texts.popitem(last=False)

    def _mixed_up(self, one: np.ndarray, other: np.ndarray) -> bool:
        """Return whether a cached text ends in the block in which the prompts begin to differ, before they do."""
        common = _common(one, other)
        if len(one) == len(other) == common:
            return False
        first = common // BLOCK_TOKENS * BLOCK_TOKENS + 1
        return any(hash(one[:length].tobytes()) in self._texts for length in range(first, common + 1))


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Return with how many ids both begin."""
    shorter = min(len(one), len(other))
    differing = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differing[0]) if differing.size else shorter
