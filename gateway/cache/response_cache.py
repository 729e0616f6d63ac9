"""Answers that were given before, whole, by request_key: exact, for a time, within a size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from cachetools import TLRUCache

from contract.errors import InvalidArgument
from contract.generation import FinishReason, TokenDelta
from gateway.cache.coalescing import size_bytes

Answer = tuple[TokenDelta, ...]
_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True)
class _Kept:
    answer: Answer
    at_s: float


class ResponseCache:
    """At most ``max_bytes``, least recently used out first; an answer is good for ``ttl_s``. clock: seconds."""

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float]) -> None:
        for name, value in (("max_bytes", max_bytes), ("ttl_s", ttl_s)):
            if not value > 0:
                raise InvalidArgument(name, f"got {value!r}; allowed is more than 0")
        self._clock = clock
        self._answers: TLRUCache[str, _Kept] = TLRUCache(
            max_bytes,
            ttu=lambda key, kept, now_s: kept.at_s + ttl_s,
            timer=clock,
            getsizeof=lambda kept: answer_bytes(kept.answer),
        )
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def bytes(self) -> int:
        return self._answers.currsize

    def get(self, key: str, max_age_s: float = math.inf) -> Answer | None:
        """The deltas as they came from the engine; None if there are none, or no longer."""
        kept = self._answers.get(key)
        if kept is None or self._clock() - kept.at_s > max_age_s:
            self.misses += 1
            return None
        self.hits += 1
        return kept.answer

    def put(self, key: str, answer: Answer) -> bool:
        """Keeps an answer that came to its own end; False for others and for those larger than the cache."""
        if whole(answer) and answer_bytes(answer) <= self._answers.maxsize:
            self._answers[key] = _Kept(answer, self._clock())
            return True
        return False


def whole(answer: Answer) -> bool:
    """It came to its own end."""
    return bool(answer) and answer[-1].finish_reason in _WHOLE and not any(delta.error for delta in answer)


def answer_bytes(answer: Answer) -> int:
    return sum(map(size_bytes, answer))
