"""Answers that were given before, whole, by request_key: exact, for a time, within a size."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from cachetools import TLRUCache

from contract.errors import InvalidArgument
from contract.generation import FinishReason, TokenDelta
from gateway.coalescing import size_bytes

Answer = tuple[TokenDelta, ...]
_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)


class ResponseCache:
    """At most ``max_bytes``, least recently used out first; an answer is good for ``ttl_s``. clock: seconds."""

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float]) -> None:
        for name, value in (("max_bytes", max_bytes), ("ttl_s", ttl_s)):
            if not value > 0:
                raise InvalidArgument(name, f"got {value!r}; allowed is more than 0")
        self._answers: TLRUCache[str, Answer] = TLRUCache(
            max_bytes, ttu=lambda key, answer, now_s: now_s + ttl_s, timer=clock, getsizeof=answer_bytes
        )
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def bytes(self) -> int:
        return self._answers.currsize

    def get(self, key: str) -> Answer | None:
        """The deltas as they came from the engine; None if there are none, or no longer."""
        answer = self._answers.get(key)
        if answer is None:
            self.misses += 1
        else:
            self.hits += 1
        return answer

    def put(self, key: str, answer: Answer) -> bool:
        """Keeps an answer that came to its own end; False for others and for those larger than the cache."""
        if whole(answer) and answer_bytes(answer) <= self._answers.maxsize:
            self._answers[key] = answer
            return True
        return False

    async def keep(self, key: str, stream: AsyncIterator[TokenDelta]) -> AsyncIterator[TokenDelta]:
        """``stream`` as it is, kept once it has come to its end. No more is held than the cache may."""
        seen: list[TokenDelta] | None = []
        size = 0
        try:
            async for delta in stream:
                size += size_bytes(delta)
                if size > self._answers.maxsize:
                    seen = None
                if seen is not None:
                    seen.append(delta)
                yield delta
            if seen is not None:
                self.put(key, tuple(seen))
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()


def whole(answer: Answer) -> bool:
    """It came to its own end."""
    return bool(answer) and answer[-1].finish_reason in _WHOLE and not any(delta.error for delta in answer)


def answer_bytes(answer: Answer) -> int:
    return sum(map(size_bytes, answer))
