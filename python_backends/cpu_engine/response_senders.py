"""The engine's lock, and the threads that hand to Triton what became due under it.

A step's responses are handed over together when the lock is released, so that a step wakes one thread, not one for each
response, and the one that sent last: what it needs is still in the caches. A stream is with one thread at a time, and
only Triton's call, which waits for the server, is made without the lock.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from contract.errors import TridentError
from python_backends.cpu_engine.stream import Stream
from python_backends.ensemble.token_increment import TokenIncrement
from python_backends.triton_io import log_error

# Streams that one thread takes at once: what comes meanwhile for the last of them waits until all are sent.
_TOGETHER = 32


class ResponseSenders:
    """Send the responses of the streams that are put under the lock; those of one stream stay in order. As a context
    manager it is the lock."""

    def __init__(
        self,
        threads: int,
        on_sent: Callable[[Sequence[tuple[Stream, TokenIncrement]]], None],
        on_lost: Callable[[Stream, Exception], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """
        on_sent: called under the lock after responses were sent, refusals left out.
        on_lost: called under the lock when a response could not be sent; the stream has a gap and must end.
        """
        self._lock = threading.RLock()
        self.sent = 0  # responses
        self._due: list[Stream] = []
        self._waiting: deque[list[Stream]] = deque()  # for a thread
        self._idle: list[queue.SimpleQueue[list[Stream] | None]] = []  # threads by their inbox; the last sent last
        self._closed = False
        self._on_sent = on_sent
        self._on_lost = on_lost
        self._clock_ns = clock_ns
        self._threads = [threading.Thread(target=self._run, name=f"sender-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        if self._due:
            for start in range(0, len(self._due), _TOGETHER):
                streams = self._due[start : start + _TOGETHER]
                if self._idle:
                    self._idle.pop().put(streams)
                else:
                    self._waiting.append(streams)
            self._due = []
        self._lock.release()

    def put(self, stream: Stream) -> None:
        """Send what is pending of the stream. The caller holds the lock."""
        if stream.queued:
            stream.due_again = True
        else:
            stream.queued = True
            self._due.append(stream)

    def flush(self, streams: Iterable[Stream]) -> None:
        """Send the tokens that wait for the end of the window. The caller holds the lock."""
        for stream in streams:
            if stream.due(flush=True):
                self.put(stream)

    def close(self) -> None:
        """Send what is queued and stop the threads."""
        with self._lock:
            self._closed = True
            for inbox in self._idle:
                inbox.put(None)
            self._idle = []
        for thread in self._threads:
            thread.join(timeout=2)

    def _run(self) -> None:
        inbox: queue.SimpleQueue[list[Stream] | None] = queue.SimpleQueue()
        while True:
            with self._lock:
                streams = self._waiting.popleft() if self._waiting else None
                if streams is None and self._closed:
                    return
                if streams is None:
                    self._idle.append(inbox)
            if streams is None and (streams := inbox.get()) is None:
                return
            self._send(streams)

    def _send(self, streams: Sequence[Stream]) -> None:
        contents: list[tuple[Stream, TokenIncrement | TridentError]] = []
        sent: list[tuple[Stream, TokenIncrement]] = []
        with self._lock:
            now_ns = self._clock_ns()
            for stream in streams:
                stream.due_again = False
                content = stream.refusal() or stream.take(now_ns)
                if content is not None:
                    contents.append((stream, content))
        for stream, content in contents:
            try:
                if isinstance(content, TokenIncrement):
                    stream.sink.send(content, stream.request)
                    sent.append((stream, content))
                else:
                    stream.sink.refuse(content)
            except Exception as exc:  # one response's failure must not end the thread that sends for other streams
                self._lose(stream, exc)
        with self._lock:
            self.sent += len(sent)
            self._on_sent(sent)
            again = []
            for stream in streams:
                stream.queued = stream.due_again and not stream.closed
                if stream.queued:
                    again.append(stream)
            if again:
                self._waiting.append(again)

    def _lose(self, stream: Stream, problem: Exception) -> None:
        log_error(f"response lost: stream={stream.key} error={problem!r}")
        if not stream.closed:
            with self._lock:
                self._on_lost(stream, problem)
            return
        try:
            stream.sink.close()
        except Exception as exc:  # there is no other way left to complete the request
            log_error(f"completion lost: stream={stream.key} error={exc!r}")
