"""The same request sent twice is answered once: ``Idempotency-Key`` attaches a retry to the stream of the first try,
running or finished, and ``Last-Event-ID`` goes on where the reader was. The engine hears of neither.

A key means something within its tenant only. It belongs to one request: with another one it is refused.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from contract.errors import InvalidArgument, Overloaded
from gateway.cache.coalescing import MAX_BYTES, SharedReader, SharedStream, Source, size_bytes

HEADER, RESUME_HEADER = "Idempotency-Key", "Last-Event-ID"
MAX_KEY_LENGTH = 255


@dataclass(eq=False)
class _Known:
    request: str
    stream: SharedStream
    forget_s: float = math.inf


class Idempotency:
    """The streams that had a key: those that run, and those that ended within the last ``ttl_s`` seconds.

    linger_s: how long a stream goes on after its last reader has dropped, for that one to come back. Of finished
    streams, ``max_finished`` are kept and ``max_bytes`` in all, the oldest go first; ``max_running`` run, and the
    next new key is refused. Streams that failed are forgotten at once, so that the retry is a new try.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        ttl_s: float = 600.0,
        linger_s: float = 30.0,
        max_running: int = 10_000,
        max_finished: int = 10_000,
        max_bytes: int = 256 * 1024 * 1024,
        max_stream_bytes: int = MAX_BYTES,
        size: Callable[[Any], int] = size_bytes,
    ) -> None:
        self._clock, self._ttl_s, self._linger_s, self._size = clock, ttl_s, linger_s, size
        self._max_running, self._max_finished = max_running, max_finished
        self._max_bytes, self._max_stream_bytes = max_bytes, max_stream_bytes
        self._running: dict[tuple[str, str], _Known] = {}
        self._finished: OrderedDict[tuple[str, str], _Known] = OrderedDict()  # in the order they are forgotten
        self._bytes = 0
        self.attached = 0

    def __len__(self) -> int:
        return len(self._running) + len(self._finished)

    def follow(
        self, tenant: str, key: str, request: str, open_source: Callable[[], Source], start: int = 0
    ) -> SharedReader:
        """The stream of ``key`` from delta ``start`` on: the one there is, or a new one of ``open_source``.

        request: its request_key. Raises InvalidArgument (the key is that of another request, or not a key; there is
        no delta before ``start``), Overloaded (too many streams run).
        """
        if not 1 <= len(key) <= MAX_KEY_LENGTH or not key.isprintable():
            raise InvalidArgument(HEADER, f"allowed are 1 to {MAX_KEY_LENGTH} printable characters")
        self._forget()
        place = (tenant, key)
        known = self._running.get(place) or self._finished.get(place)
        if known is not None and known.request != request:
            raise InvalidArgument(HEADER, "was used for another request before; every request needs a key of its own")
        if known is not None and not known.stream.cancelled:
            if start > len(known.stream):
                problem = f"got {start - 1}; the last event of this stream so far is {len(known.stream) - 1}"
                raise InvalidArgument(RESUME_HEADER, problem)
            self.attached += 1
            return known.stream.follow(start)
        if start:
            raise InvalidArgument(RESUME_HEADER, "there is no such stream, or no longer; send the request without it")
        if len(self._running) >= self._max_running:
            raise Overloaded(f"{len(self._running)} streams with an {HEADER} are under way, no more are taken")
        stream = SharedStream(
            open_source(),
            size=self._size,
            max_bytes=self._max_stream_bytes,
            linger_s=self._linger_s,
            ended=lambda over: self._ended(place, over),
        )
        self._running[place] = _Known(request, stream)
        return stream.follow()

    def _ended(self, place: tuple[str, str], over: SharedStream) -> None:
        known = self._running.get(place)
        if known is None or known.stream is not over:
            return
        del self._running[place]
        if over.complete:
            known.forget_s = self._clock() + self._ttl_s
            self._finished[place] = known
            self._bytes += over.bytes
            self._forget()

    def _forget(self) -> None:
        now_s = self._clock()
        while self._finished:
            oldest = next(iter(self._finished.values()))
            too_much = len(self._finished) > self._max_finished or self._bytes > self._max_bytes
            if oldest.forget_s > now_s and not too_much:
                return
            self._bytes -= self._finished.popitem(last=False)[1].stream.bytes
