"""Complete responses by request key, within a size and an age; and what a client's headers allow the caches to do."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cachetools import TLRUCache

from contract.generation import FinishReason, TokenDelta
from gateway.cache.coalescing import size_bytes

Answer = tuple[TokenDelta, ...]
_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)
HEADER = "x-trident-cache"
_MAX_AGE = re.compile(r"(?:^|[,\s])max-age=(\d{1,9})(?:$|[,\s])")


@dataclass(frozen=True)
class CacheControl:
    """The caching directives of one request.

    enabled: False for ``x-trident-cache: off`` and ``cache-control: no-store``: the request bypasses every cache.
    max_age_s: how old a cached response may be; 0 for ``no-cache``: none is served, the new one is stored.
    """

    enabled: bool = True
    max_age_s: float = math.inf

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> CacheControl:
        """headers: keys in lower case."""
        text = headers.get("cache-control", "").lower()
        directives = {directive.strip() for directive in text.split(",")}
        off = headers.get(HEADER, "").strip().lower() in ("off", "false", "no", "0") or "no-store" in directives
        found = _MAX_AGE.search(text)
        return cls(not off, 0.0 if "no-cache" in directives else float(found[1]) if found else math.inf)


class ResponseCache:
    """A least-recently-used cache of at most ``max_bytes`` of deltas."""

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answers: TLRUCache[str, tuple[Answer, float]] = TLRUCache(
            max_bytes,
            ttu=lambda key, stored, now_s: stored[1] + ttl_s,
            timer=clock,
            getsizeof=lambda stored: answer_bytes(stored[0]),
        )

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
