"""Share one stream among several readers: identical deterministic requests that run at the same time.

The source is read at the engine's pace into a log; each reader reads the log at its own pace. The source is closed
when the last reader has left. The log is bounded: while all readers are behind, the source waits for the fastest; if
only some are, the beginning of the log is dropped, and a reader that still needs it fails. A stream whose beginning is
dropped cannot be joined.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterable, Callable

from contract.errors import Cancelled, Overloaded
from contract.generation import TokenDelta
from gateway.choices import ChoiceDelta

MAX_BYTES = 4 * 1024 * 1024
JOIN_BYTES = 64 * 1024  # of a stream's beginning that is kept for joining readers: some hundred tokens


def size_bytes(delta: TokenDelta) -> int:
    """Estimate the memory of a delta."""
    numbers = len(delta.token_ids) + len(delta.log_probs) + 3 * sum(map(len, delta.top_log_probs))
    texts = len(delta.text.encode(errors="surrogatepass")) + len(delta.error)
    if delta.sections is not None:  # an upstream's
        texts += 4 * len(delta.sections.reasoning) + sum(
            200 + 4 * len(call.arguments) for call in delta.sections.tool_calls
        )
    return 400 + texts + 32 * numbers


class SharedStream:
    """A source that is read once and followed by many readers, each from any item still in the log.

    Made inside a running event loop.
    source: its ``aclose`` method is called at the end, if it has one.
    max_bytes: bound of the log; the source then waits, or the oldest items are dropped.
    keep_bytes: bytes of items that every reader has read which are kept for readers that join.
    linger_s: how long the stream goes on without readers before the source is closed; 0: at once.
    ended: called once, when the source has ended.
    dropped: items at the beginning that are no longer in the log.
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
        self.done = False
        self.cancelled = False
        self._started = False
        self._task = asyncio.ensure_future(self._run())

    def __len__(self) -> int:
        """Return the number of items so far, dropped ones included."""
        return self.dropped + len(self._log)

    @property
    def readers(self) -> int:
        return len(self._readers)

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
        """Return a reader from item ``start`` on. It counts as a reader until it is read to its end or closed.

        Raises, while it is read: what the source raised; Overloaded if the item it needs is dropped.
        """
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
    """One reader's position in a stream.

    next: number of the item that it reads next.
    failure: the error that ends this reader only, if there is one.
    """

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

    def __len__(self) -> int:
        return len(self._streams)

    def follow(self, key: str, open_source: Callable[[], AsyncIterable[ChoiceDelta]]) -> SharedReader:
        """Read the stream of ``key`` from its start: the one that runs, or a new one of ``open_source``."""
        stream = self._streams.get(key)
        if stream is not None and stream.joinable and not stream.done and stream.readers:
            return stream.follow()

        def ended(over: SharedStream) -> None:
            if self._streams.get(key) is over:
                del self._streams[key]

        stream = self._streams[key] = SharedStream(open_source(), keep_bytes=JOIN_BYTES, ended=ended)
        return stream.follow()
