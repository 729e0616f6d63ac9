"""One engine stream, many readers: identical deterministic requests that are under way at the same time.

The stream runs at the engine's pace into a log; every reader follows the log at its own. The engine is cancelled
when the last reader has left. What the log may hold is bounded: when all readers are behind, the engine waits for the
fastest; when one is, the log's beginning is dropped, and a reader that had not read it yet is cut off. Nobody can join
any more once the beginning is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from contract.errors import Cancelled, Overloaded
from contract.generation import TokenDelta

Source = AsyncIterator[TokenDelta]
MAX_BYTES = 4 * 1024 * 1024
JOIN_BYTES = 64 * 1024  # of its beginning that a stream keeps for those who join: some hundred tokens


def size_bytes(delta: TokenDelta) -> int:
    """About what a delta takes in memory."""
    numbers = len(delta.token_ids) + len(delta.log_probs) + 3 * sum(map(len, delta.top_log_probs))
    return 400 + len(delta.text.encode(errors="surrogatepass")) + len(delta.error) + 32 * numbers


class SharedStream:
    """A source that is read once and can be followed by many, from the start or from where they were.

    size: about how many bytes an item takes. keep_bytes: how much of what all have read is kept for others. linger_s:
    how long it goes on without any reader before the source is cancelled; 0 is at once. Made inside a running event
    loop. ``ended`` is called once, when the source is over.
    """

    def __init__(
        self,
        source: Source,
        *,
        size: Callable[[Any], int] = size_bytes,
        max_bytes: int = MAX_BYTES,
        keep_bytes: int = MAX_BYTES,
        linger_s: float = 0.0,
        ended: Callable[[SharedStream], None] = lambda stream: None,
    ) -> None:
        self.source = source
        self._size, self._max_bytes, self._keep_bytes = size, max_bytes, keep_bytes
        self._linger_s, self._ended = linger_s, ended
        self._log: deque[TokenDelta] = deque()
        self._dropped = 0  # deltas that are no longer in the log
        self._grown = asyncio.Event()
        self._failure: BaseException | None = None
        self._lonely: asyncio.TimerHandle | None = None
        self._reading: set[SharedReader] = set()
        self._moved: asyncio.Event | None = None  # what the source waits for while all readers are behind
        self.bytes = 0
        self.done = False
        self.cancelled = False
        self._started = False
        self._pump = asyncio.ensure_future(self._run())

    def __len__(self) -> int:
        """Deltas so far, the dropped ones included."""
        return self._dropped + len(self._log)

    @property
    def readers(self) -> int:
        return len(self._reading)

    @property
    def complete(self) -> bool:
        """It came to its end without an error and all of it is in the log."""
        return self.done and self._failure is None and not self._dropped

    @property
    def joinable(self) -> bool:
        """A new reader would get all of it, unless it ends badly."""
        return not (self._dropped or self._failure or self.cancelled)

    def deltas(self) -> tuple[TokenDelta, ...]:
        return tuple(self._log)

    def follow(self, start: int = 0) -> SharedReader:
        """The deltas from number ``start`` on. Counted as a reader from this call, so close it, by reading to the
        end or by ``aclose``. Raises what the source raised, Overloaded if the log's beginning is gone."""
        if self._lonely is not None:
            self._lonely.cancel()
            self._lonely = None
        reader = SharedReader(self, start)
        self._reading.add(reader)
        return reader

    def cancel(self) -> None:
        """Ends the source, whoever reads. Readers are told Cancelled."""
        if not self.done:
            self.cancelled = True
            if self._started:  # a task that is cancelled before its first step never takes one, not even to clean up
                self._pump.cancel()

    async def _run(self) -> None:
        self._started = True
        try:
            if self.cancelled:
                raise asyncio.CancelledError
            async for delta in self.source:
                self._append(delta)
                if self.bytes > self._max_bytes:
                    await self._make_room()
        except asyncio.CancelledError:
            self._failure = Cancelled("the stream was cancelled")
        except Exception as exc:  # whatever it is, the readers are told and raise it where it is answered
            self._failure = exc
        finally:
            self.done = True
            with contextlib.suppress(Exception):  # the readers hear of the first failure, not of the closing
                close = getattr(self.source, "aclose", None)
                if close is not None:
                    await close()
            self._wake()
            self._ended(self)

    def _append(self, delta: TokenDelta) -> None:
        self._log.append(delta)
        self.bytes += self._size(delta)
        if self.bytes > self._keep_bytes and self._reading:
            read_by_all = min(reader.next for reader in self._reading)
            while self.bytes > self._keep_bytes and self._dropped < read_by_all:
                self._drop()
        self._wake()

    async def _make_room(self) -> None:
        while self.bytes > self._max_bytes and len(self._log) > 1:
            if self._reading and max(reader.next for reader in self._reading) <= self._dropped:
                self._moved = asyncio.Event()
                await self._moved.wait()
            else:
                self._drop()

    def _drop(self) -> None:
        self.bytes -= self._size(self._log.popleft())
        self._dropped += 1

    def moved(self) -> None:
        """A reader has read, left or come."""
        if self._moved is not None:
            self._moved.set()
            self._moved = None

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()

    def left(self, reader: SharedReader) -> None:
        self._reading.discard(reader)
        self.moved()
        if self._reading or self.done:
            return
        if self._linger_s <= 0:
            self.cancel()
        else:
            self._lonely = asyncio.get_running_loop().call_later(self._linger_s, self.cancel)

    async def _at(self, number: int, reader: SharedReader) -> TokenDelta | None:
        """Delta ``number`` as soon as there is one; None past the end."""
        while number >= len(self) and not self.done and reader.failure is None:
            await self._grown.wait()
        if reader.failure is not None:
            raise reader.failure
        if number < self._dropped:
            raise Overloaded("the reader was too slow: the part of the stream it needs next is no longer kept")
        if number < len(self):
            return self._log[number - self._dropped]
        if self._failure is not None:
            raise self._failure
        return None


class SharedReader:
    """One reader's place in a stream. ``failure`` is what ended it alone, others read on."""

    def __init__(self, stream: SharedStream, start: int) -> None:
        self.stream = stream
        self.failure: BaseException | None = None
        self.next = start  # the number of the delta it reads next
        self._left = False

    def __aiter__(self) -> SharedReader:
        return self

    async def __anext__(self) -> TokenDelta:
        if self._left:
            raise StopAsyncIteration
        try:
            delta = await self.stream._at(self.next, self)
        except BaseException:
            self.leave()
            raise
        if delta is None:
            self.leave()
            raise StopAsyncIteration
        self.next += 1
        self.stream.moved()
        return delta

    def fail(self, error: BaseException) -> None:
        """Whoever reads is told ``error``."""
        self.failure = self.failure or error
        self.stream._wake()

    def leave(self) -> None:
        """Safe to call twice."""
        if not self._left:
            self._left = True
            self.stream.left(self)

    async def aclose(self) -> None:
        self.leave()


class Coalescer:
    """The streams under way, by key (see request_key). ``joined`` counts readers that cost no engine work."""

    def __init__(self, max_bytes: int = MAX_BYTES, size: Callable[[Any], int] = size_bytes) -> None:
        self._max_bytes, self._size = max_bytes, size
        self._streams: dict[str, SharedStream] = {}
        self.joined = 0

    def __len__(self) -> int:
        return len(self._streams)

    def follow(self, key: str, open_source: Callable[[], Source]) -> SharedReader:
        """The stream of ``key`` from its start: the one under way, or a new one of ``open_source``."""
        stream = self._streams.get(key)
        if stream is not None and stream.joinable and not stream.done and stream.readers:
            self.joined += 1
            return stream.follow()

        def ended(over: SharedStream) -> None:
            if self._streams.get(key) is over:
                del self._streams[key]

        stream = self._streams[key] = SharedStream(
            open_source(), size=self._size, max_bytes=self._max_bytes, keep_bytes=JOIN_BYTES, ended=ended
        )
        return stream.follow()
