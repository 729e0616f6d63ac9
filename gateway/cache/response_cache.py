"""Complete responses by request key, within a size and an age."""

from __future__ import annotations

import math
from collections.abc import Callable

from cachetools import TLRUCache

from contract.generation import FinishReason, TokenDelta
from gateway.cache.coalescing import size_bytes

Answer = tuple[TokenDelta, ...]
_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)


class ResponseCache:
    """A least-recently-used cache of deltas.

    max_bytes: bound, of the deltas.
    ttl_s: longest age of a hit.
    clock: seconds.
    """

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answers: TLRUCache[str, tuple[Answer, float]] = TLRUCache(
            max_bytes,
            ttu=lambda key, stored, now_s: stored[1] + ttl_s,
            timer=clock,
            getsizeof=lambda stored: answer_bytes(stored[0]),
        )

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def bytes(self) -> int:
        return int(self._answers.currsize)

    def get(self, key: str, max_age_s: float = math.inf) -> Answer | None:
        """Return the deltas as the engine sent them, or None."""
        answer, stored_s = self._answers.get(key) or (None, 0.0)
        return None if self._clock() - stored_s > max_age_s else answer

    def put(self, key: str, answer: Answer) -> bool:
        """Store a complete response. Returns False for an incomplete one and for one larger than the cache."""
        if is_complete(answer) and answer_bytes(answer) <= self._answers.maxsize:
            self._answers[key] = answer, self._clock()
            return True
        return False


def is_complete(answer: Answer) -> bool:
    """Return whether a response ended by a stop or by its length, without an error."""
    return bool(answer) and answer[-1].finish_reason in _COMPLETE and not any(delta.error for delta in answer)


def answer_bytes(answer: Answer) -> int:
    return sum(map(size_bytes, answer))
