"""Share one stream among several readers: identical deterministic requests that run at the same time, and retries:
``Idempotency-Key`` attaches one to the stream of the first attempt, running or finished, and ``Last-Event-ID`` resumes
it after an event. A key is valid within its tenant only, and belongs to one request.

The source is read at the engine's pace into a log, which each reader reads at its own, until the last one has left.
While all readers are behind a full log, the source waits for the fastest; if only some are, the beginning of the log is
dropped: a reader that still needs it fails, and no new one can join.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterable, Callable
from typing import NamedTuple

from cachetools import TTLCache

from contract.errors import Cancelled, InvalidArgument, Overloaded
from contract.generation import TokenDelta
from gateway.choices import ChoiceDelta

HEADER, RESUME_HEADER = "Idempotency-Key", "Last-Event-ID"
MAX_KEY_LENGTH = 255
MAX_BYTES = 4 * 1024 * 1024
JOIN_BYTES = 64 * 1024  # of a stream's beginning that is kept for joining readers: some hundred tokens


def size_bytes(delta: TokenDelta) -> int:
    """Estimate the memory of a delta."""
    numbers = len(delta.token_ids) + len(delta.log_probs) + 3 * sum(map(len, delta.top_log_probs))
    texts = len(delta.text.encode(errors="surrogatepass")) + len(delta.error)
    if delta.sections is not None:  # an upstream's
        texts += 4 * len(delta.sections.reasoning)
        texts += sum(200 + 4 * len(call.arguments) for call in delta.sections.tool_calls)
    return 400 + texts + 32 * numbers


class SharedStream:
    """A source that is read once and followed by many readers, each from any item still in the log.

    source: its ``aclose`` method is called at the end, if it has one.
    max_bytes: of the log; then the source waits, or the oldest items are dropped. dropped: how many were.
    keep_bytes: of items that every reader has read, which are kept for readers that join.
    linger_s: how long the stream goes on without readers before the source is closed.
    ended: called once, when the source has ended.
    """

    def __init__(
        self,
        source: AsyncIterable[ChoiceDelta],
        *,
        max_bytes: int = MAX_BYTES,
        keep_bytes: int = MAX_BYTES,
        linger_s: float = 0.0,
        ended: Callable[[SharedStream], None] = lambda stream: None,
    ) -> None:
        self.source = source
        self._max_bytes, self._keep_bytes = max_bytes, keep_bytes
        self._linger_s, self._on_end = linger_s, ended
        self._log: deque[ChoiceDelta] = deque()
        self.dropped = 0
        self._grown = asyncio.Event()
        self._failure: BaseException | None = None
        self._abandoned: asyncio.TimerHandle | None = None
        self._readers: set[SharedReader] = set()
        self._space: asyncio.Event | None = None  # set for the source, which waits while all readers are behind
        self.bytes = 0
        self.done = self.cancelled = self._started = False
        self._task = asyncio.ensure_future(self._run())

    def __len__(self) -> int:
        """Return the number of items so far, dropped ones included."""
        return self.dropped + len(self._log)

    @property
    def complete(self) -> bool:
        """Whether it ended without an error and all of it is in the log."""
        return self.done and self._failure is None and not self.dropped

    @property
    def joinable(self) -> bool:
        """Whether a new reader could read it from its start."""
        return not (self.dropped or self._failure or self.cancelled)

    def deltas(self) -> tuple[ChoiceDelta, ...]:
        return tuple(self._log)

    def follow(self, start: int = 0) -> SharedReader:
        """Return a reader from item ``start`` on, which counts until it is read to its end or closed. It raises what
        the source raised, and Overloaded if the item it needs is dropped."""
        if self._abandoned is not None:
            self._abandoned.cancel()
            self._abandoned = None
        reader = SharedReader(self, start)
        self._readers.add(reader)
        return reader

    def cancel(self) -> None:
        """End the source. Its readers raise Cancelled."""
        if not self.done:
            self.cancelled = True
            if self._started:  # a task that is cancelled before its first step would not run its cleanup
                self._task.cancel()

    async def _run(self) -> None:
        self._started = True
        try:
            if self.cancelled:
                raise asyncio.CancelledError
            async for item in self.source:
                self._append(item)
                if self.bytes > self._max_bytes:
                    await self._make_room()
        except asyncio.CancelledError:
            self._failure = Cancelled("the stream was cancelled")
        except Exception as exc:  # every reader raises it where its response is handled
            self._failure = exc
        finally:
            self.done = True
            with contextlib.suppress(Exception):  # readers raise the first failure, not one of closing
                close = getattr(self.source, "aclose", None)
                if close is not None:
                    await close()
            self.wake()
            self._on_end(self)

    def _append(self, item: ChoiceDelta) -> None:
        self._log.append(item)
        self.bytes += size_bytes(item.delta)
        if self.bytes > self._keep_bytes and self._readers:
            read_by_all = min(reader.next for reader in self._readers)
            while self.bytes > self._keep_bytes and self.dropped < read_by_all:
                self._drop()
        self.wake()

    async def _make_room(self) -> None:
        while self.bytes > self._max_bytes and len(self._log) > 1:
            if self._readers and max(reader.next for reader in self._readers) <= self.dropped:
                self._space = asyncio.Event()
                await self._space.wait()
            else:
                self._drop()

    def _drop(self) -> None:
        self.bytes -= size_bytes(self._log.popleft().delta)
        self.dropped += 1

    def advanced(self) -> None:
        """Resume a source that waits for its readers. Called when a reader has read or left."""
        if self._space is not None:
            self._space.set()
            self._space = None

    def wake(self) -> None:
        """Resume the readers that wait."""
        self._grown.set()
        self._grown = asyncio.Event()

    def leave(self, reader: SharedReader) -> None:
        self._readers.discard(reader)
        self.advanced()
        if self._readers or self.done:
            return
        if self._linger_s <= 0:
            self.cancel()
        else:
            self._abandoned = asyncio.get_running_loop().call_later(self._linger_s, self.cancel)

    async def item(self, number: int, reader: SharedReader) -> ChoiceDelta:
        """Return item ``number`` as soon as it exists. Raises StopAsyncIteration past the end."""
        while number >= len(self) and not self.done and reader.failure is None:
            await self._grown.wait()
        if reader.failure is not None:
            raise reader.failure
        if number < self.dropped:
            raise Overloaded("the client read too slowly: the part of the stream that it needs next was dropped")
        if number < len(self):
            return self._log[number - self.dropped]
        raise self._failure if self._failure is not None else StopAsyncIteration


class SharedReader:
    """One reader's position in a stream. failure: the error that ends this reader only."""

    def __init__(self, stream: SharedStream, start: int) -> None:
        self.stream = stream
        self.failure: BaseException | None = None
        self.next = start
        self._left = False

    def __aiter__(self) -> SharedReader:
        return self

    async def __anext__(self) -> ChoiceDelta:
        if self._left:
            raise StopAsyncIteration
        try:
            item = await self.stream.item(self.next, self)
        except BaseException:
            self.leave()
            raise
        self.next += 1
        self.stream.advanced()
        return item

    def fail(self, error: BaseException) -> None:
        """Make this reader raise ``error`` at its next item."""
        self.failure = self.failure or error
        self.stream.wake()

    def leave(self) -> None:
        """Stop reading. Safe to call twice."""
        if not self._left:
            self._left = True
            self.stream.leave(self)

    async def aclose(self) -> None:
        self.leave()


class Coalescer:
    """The streams that run, by request key."""

    def __init__(self) -> None:
        self._streams: dict[str, SharedStream] = {}

    def follow(self, key: str, open_source: Callable[[], AsyncIterable[ChoiceDelta]]) -> SharedReader:
        """Read the stream of ``key`` from its start: the one that runs, or a new one of ``open_source``."""

        def ended(over: SharedStream) -> None:
            if self._streams.get(key) is over:
                del self._streams[key]

        stream = self._streams.get(key)
        if stream is None or stream.done or not (stream.joinable and stream._readers):
            stream = self._streams[key] = SharedStream(open_source(), keep_bytes=JOIN_BYTES, ended=ended)
        return stream.follow()


class _Keyed(NamedTuple):
    request: str  # its key
    stream: SharedStream


class Idempotency:
    """The streams of requests with a key. A stream that failed is removed at once, so that a retry is a new attempt.

    ttl_s: how long a finished stream is kept. linger_s: how long one runs on after its last reader has disconnected.
    max_running: streams that run; a further new key is rejected.
    max_finished, max_bytes: bounds of finished streams; the one that was used longest ago is removed first.
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
        Raises: InvalidArgument (malformed, of another request, or not kept from its beginning), Overloaded.
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
