"""The streams of one client, so that closing it ends them as their readers expect: with Cancelled."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol, TypeVar


class Cancellable(Protocol):
    """attempts: calls made so far."""

    attempts: int

    def cancel(self) -> None: ...


Stream = TypeVar("Stream", bound=Cancellable)


class Running:
    """Keeps none of them alive; one that its caller drops is cancelled anyway."""

    def __init__(self) -> None:
        self._streams: weakref.WeakSet = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, stream: Stream) -> Stream:
        with self._lock:
            self._streams.add(stream)
        return stream

    def cancel(self) -> None:
        """Cancels those that were sent. The others have nothing to lose: they are sent when they are read."""
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            if stream.attempts:
                stream.cancel()
