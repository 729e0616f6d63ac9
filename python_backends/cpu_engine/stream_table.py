"""The live streams of the engine, by key and by request id."""

from __future__ import annotations

from python_backends.cpu_engine.stream import Stream


class StreamTable(dict[int, Stream]):
    """Streams by key; change it with ``add`` and ``remove`` only. Not thread-safe: the engine holds its lock."""

    def __init__(self) -> None:
        super().__init__()
        self._by_request_id: dict[str, set[int]] = {}

    def add(self, stream: Stream) -> None:
        self[stream.key] = stream
        if stream.request.request_id:
            self._by_request_id.setdefault(stream.request.request_id, set()).add(stream.key)

    def remove(self, stream: Stream) -> None:
        """
        Raises:
            KeyError: the stream is not in the table.
        """
        del self[stream.key]
        keys = self._by_request_id.get(stream.request.request_id)
        if keys is not None:
            keys.discard(stream.key)
            if not keys:
                del self._by_request_id[stream.request.request_id]

    def keys_of(self, request_id: str) -> list[int]:
        """Return the keys of the live streams with this request id."""
        return list(self._by_request_id.get(request_id, ()))
