"""Run a retried request once: ``Idempotency-Key`` attaches a retry to the stream of the first attempt, running or
finished, and ``Last-Event-ID`` resumes it after an event.

A key is valid within its tenant only. It belongs to one request: another request with it is rejected.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterable, Callable
from typing import NamedTuple

from cachetools import TTLCache

from contract.errors import InvalidArgument, Overloaded
from gateway.cache.coalescing import MAX_BYTES, SharedReader, SharedStream
from gateway.choices import ChoiceDelta

HEADER, RESUME_HEADER = "Idempotency-Key", "Last-Event-ID"
MAX_KEY_LENGTH = 255


class _Keyed(NamedTuple):
    request: str  # its key
    stream: SharedStream


class Idempotency:
    """The streams of requests with a key. A stream that failed is removed at once, so that a retry is a new attempt.

    clock: seconds.
    ttl_s: how long a finished stream is kept.
    linger_s: how long a stream runs on after its last reader has disconnected.
    max_running: streams that run; a further new key is rejected.
    max_finished, max_bytes: bounds of finished streams; the one that was used longest ago is removed first.
    max_stream_bytes: bound of one stream's log.
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
    ) -> None:
        self._linger_s, self._max_running, self._max_stream_bytes = linger_s, max_running, max_stream_bytes
        self._running: dict[tuple[str, str], _Keyed] = {}
        # A small stream counts as its part of the bytes, so that there are at most ``max_finished``.
        self._finished: TTLCache[tuple[str, str], _Keyed] = TTLCache(
            max_bytes, ttl_s, clock, lambda kept: max(kept.stream.bytes, max_bytes // max_finished)
        )

    def __len__(self) -> int:
        return len(self._running) + len(self._finished)

    def follow(
        self,
        tenant: str,
        key: str,
        request: str,
        open_source: Callable[[], AsyncIterable[ChoiceDelta]],
        start: int = 0,
        recorded: bool = False,
    ) -> SharedReader:
        """Read the stream of ``key`` from item ``start`` on: the existing one, or a new one of ``open_source``.

        request: its request_key. recorded: a new source may begin with what another gateway has recorded.
        Raises: InvalidArgument (the key belongs to another request or is malformed; there is no item before
        ``start``; the beginning is not kept), Overloaded (too many streams run).
        """
        if not 1 <= len(key) <= MAX_KEY_LENGTH or not key.isprintable():
            raise InvalidArgument(HEADER, f"must be 1 to {MAX_KEY_LENGTH} printable characters")
        tenant_key = (tenant, key)
        found = self._running.get(tenant_key) or self._finished.get(tenant_key)
        if found is not None and found.request != request:
            raise InvalidArgument(HEADER, "must not be the key of an earlier, different request")
        if found is not None and not found.stream.cancelled:
            if start > len(found.stream):
                problem = f"must be at most {len(found.stream) - 1}, this stream's last event so far, got {start - 1}"
                raise InvalidArgument(RESUME_HEADER, problem)
            check_kept(found.stream, start)
            return found.stream.follow(start)
        if start and not recorded:
            raise InvalidArgument(RESUME_HEADER, "must be an event of a stream that is still kept")
        if len(self._running) >= self._max_running:
            raise Overloaded(f"{len(self._running)}/{self._max_running} streams with an {HEADER} are running")
        stream = SharedStream(
            open_source(),
            max_bytes=self._max_stream_bytes,
            linger_s=self._linger_s,
            ended=lambda over: self._ended(tenant_key, over),
        )
        self._running[tenant_key] = _Keyed(request, stream)
        return stream.follow(start)

    def _ended(self, tenant_key: tuple[str, str], over: SharedStream) -> None:
        found = self._running.get(tenant_key)
        if found is None or found.stream is not over:
            return
        del self._running[tenant_key]
        if over.complete:
            with contextlib.suppress(ValueError):  # it is larger than all of them may be
                self._finished[tenant_key] = found


def check_kept(stream: SharedStream, start: int) -> None:
    """Raises InvalidArgument for a stream that cannot be read from its beginning, which a reader from ``start`` on
    needs too: what it is sent depends on what came before."""
    if stream.dropped:
        problem = "the beginning of this stream is not kept any more; send the request with a new key"
        raise InvalidArgument(RESUME_HEADER if start else HEADER, problem)
