"""Messages between the workers of one gateway and their parent: pickled, over a socket pair that no one else has."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Callable
from typing import Any, cast

_LENGTH = struct.Struct("<I")


class Frames(asyncio.Protocol):
    """One end of a connection. received: gets the parts of each message. lost: called once, when the other end is
    gone."""

    def __init__(self, received: Callable[..., None], lost: Callable[[], None]) -> None:
        self._received, self._lost = received, lost
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    async def connect(self, end: socket.socket) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            message = pickle.loads(memoryview(self._buffer)[_LENGTH.size : end])  # noqa: S301 - from our own process
            del self._buffer[:end]
            self._received(*message)

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, *message: Any) -> None:
        """Send a message; nothing once the other end is gone."""
        if self._transport is not None and self.open:
            data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
            self._transport.write(_LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
