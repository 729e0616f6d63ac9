"""From the engine to Triton: a few threads that hand each stream's pending tokens over as one response."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from python_backends.cpu_engine.stream import Chunk, Stream
from python_backends.triton_io import log_error


class ResponseSenders:
    """Streams are put in when due; a stream is in the queue at most once, so its responses keep their order.

    ``on_sent`` hears of every response that left, None standing for a refusal; ``on_lost`` of a stream one of whose
    responses could not leave, which must end because it has a gap now."""

    def __init__(
        self,
        threads: int,
        on_sent: Callable[[Stream, Chunk | None], None],
        on_lost: Callable[[Stream, Exception], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._queue: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._on_sent = on_sent
        self._on_lost = on_lost
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
            while self._send_pending(stream):
                pass

    def _send_pending(self, stream: Stream) -> bool:
        """Sends what the stream has to say. True when its end came meanwhile, which must not wait for the next tick
        nor stand in the queue behind the close of the senders."""
        with stream.lock:
            stream.queued = False
            if stream.closed:
                return False
            if stream.error is not None and not stream.answered:
                stream.closed = True
                chunk = None
            else:
                chunk = stream.take(self._clock_ns())
                if chunk is None:
                    return False
            # While this thread sends, nobody else may take later tokens of the same stream.
            stream.queued = True
        try:
            if chunk is None:
                stream.sink.refuse(stream.error)
            else:
                stream.sink.send(chunk, stream.request)
        except Exception as exc:  # an answer that cannot leave must not take the sender thread with it
            self._lose(stream, exc)
        else:
            self._on_sent(stream, chunk)
        with stream.lock:
            stream.queued = False
            return stream.event.last and not stream.closed

    def _lose(self, stream: Stream, problem: Exception) -> None:
        log_error(f"response of stream {stream.key} was lost: {problem!r}")
        if not stream.closed:
            self._on_lost(stream, problem)
            return
        try:
            stream.sink.close()
        except Exception as exc:  # nothing is left to try
            log_error(f"the end of stream {stream.key} was lost: {exc!r}")

    def close(self) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout=2)
