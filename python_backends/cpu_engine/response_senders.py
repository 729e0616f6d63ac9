"""The threads that hand responses to Triton: each takes a stream and sends what is pending as one response."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from python_backends.cpu_engine.stream import Stream
from python_backends.ensemble.token_increment import TokenIncrement
from python_backends.triton_io import log_error


class ResponseSenders:
    """Send the responses of queued streams; a stream is queued at most once, so its responses stay in order."""

    def __init__(
        self,
        threads: int,
        on_sent: Callable[[Stream, TokenIncrement], None],
        on_lost: Callable[[Stream, Exception], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """
        threads: number of sender threads.
        on_sent: called after each response.
        on_lost: called when a response could not be sent; the stream has a gap and must end.
        """
        self._queue: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._on_sent = on_sent
        self._on_lost = on_lost
        self._clock_ns = clock_ns
        self._threads = [threading.Thread(target=self._send, name=f"sender-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def put(self, stream: Stream) -> None:
        """Queue the stream. The caller holds the stream's lock."""
        stream.queued = True
        self._queue.put(stream)

    def close(self) -> None:
        """Send what is queued and stop the threads."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout=2)

    def _send(self) -> None:
        while (stream := self._queue.get()) is not None:
            while self._send_pending(stream):
                pass

    def _send_pending(self, stream: Stream) -> bool:
        """Send one response. Return True if the stream ended meanwhile and its last response is still to be sent.

        That response is sent by the same call chain: the next tick would be late, and close() may have queued the
        threads' end already.
        """
        increment: TokenIncrement | None = None
        with stream.lock:
            stream.queued = False
            if stream.closed:
                return False
            refusal = None if stream.responded else stream.error
            if refusal is not None:
                stream.closed = True
            else:
                increment = stream.take(self._clock_ns())
                if increment is None:
                    return False
            # Keeps other sender threads from the stream's later tokens while this one sends.
            stream.queued = True
        try:
            if refusal is not None:
                stream.sink.refuse(refusal)
            elif increment is not None:
                stream.sink.send(increment, stream.request)
        except Exception as exc:  # one response's failure must not end the thread that sends for other streams
            self._lose(stream, exc)
        else:
            if increment is not None:
                self._on_sent(stream, increment)
        with stream.lock:
            stream.queued = False
            return stream.event.last and not stream.closed

    def _lose(self, stream: Stream, problem: Exception) -> None:
        log_error(f"response lost: stream={stream.key} error={problem!r}")
        if not stream.closed:
            self._on_lost(stream, problem)
            return
        try:
            stream.sink.close()
        except Exception as exc:  # there is no other way left to complete the request
            log_error(f"completion lost: stream={stream.key} error={exc!r}")
