"""From the engine to Triton: a few threads that hand each stream's pending tokens over as one response.

A response costs the machine about the same whether it carries one token or sixty (benchmarks/LOG.md), so under
load tokens are coalesced: a stream sends at most once per window, and the window grows with the number of live
streams so that all of them together stay near a fixed rate of responses. Alone, a stream is never held back; its
first token and its end never are.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from python_backends.cpu_engine.stream import Chunk, Stream
from python_backends.triton_io import log_error

# One response costs ~0.3 ms of CPU from here to the socket; spending at most half a core on responses
# means 0.6 ms per live stream.
WINDOW_PER_STREAM_NS = 600_000


def window_ns(live_streams: int, max_window_ns: int) -> int:
    """How long a stream waits between two responses when ``live_streams`` are generating."""
    return min(max_window_ns, max(0, live_streams - 1) * WINDOW_PER_STREAM_NS)


class Outbox:
    """Streams are put in when due; a stream is in the queue at most once, so its responses keep their order."""

    def __init__(
        self, threads: int, on_sent: Callable[[Stream, Chunk | None], None], clock_ns=time.monotonic_ns
    ) -> None:
        self._queue: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._on_sent = on_sent
        self._clock_ns = clock_ns
        self._threads = [threading.Thread(target=self._send, name=f"sender-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def put(self, stream: Stream) -> None:
        """Call with the stream's lock held."""
        stream.queued = True
        self._queue.put(stream)

    def _send(self) -> None:
        while (stream := self._queue.get()) is not None:
            with stream.lock:
                stream.queued = False
                if stream.closed:
                    continue
                if stream.error is not None and not stream.answered:
                    stream.closed = True
                    chunk = None
                else:
                    chunk = stream.take(self._clock_ns())
                    if chunk is None:
                        continue
                # While this thread sends, nobody else may take later tokens of the same stream.
                stream.queued = True
            try:
                if chunk is None:
                    stream.sink.refuse(stream.error)
                else:
                    stream.sink.send(chunk, stream.request)
            except Exception as exc:  # an answer that cannot leave must not take the sender thread with it
                log_error(f"response of stream {stream.key} was lost: {exc}")
            self._on_sent(stream, chunk)
            with stream.lock:
                stream.queued = False
                # The end must not wait for the next tick.
                if stream.event.last and not stream.closed:
                    self.put(stream)

    def close(self) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout=2)
