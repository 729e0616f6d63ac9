"""Write the responses of all requests of one gRPC stream, one at a time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import grpc.aio


class ResponseWriter:
    """timeout_s: see ``check``. stalled: whether the client did not read for so long."""

    def __init__(self, context: grpc.aio.ServicerContext, timeout_s: float) -> None:
        self._context, self.timeout_s = context, timeout_s
        self.stalled = False
        self._handler = asyncio.current_task()
        self._waiting: deque[asyncio.Future[None]] = deque()  # for their turns to write
        self._writing = False
        self._writing_since_s = 0.0
        self._began = False

    async def send_metadata(self, headers: Mapping[str, str]) -> None:
        """Send response headers: those of the first request as initial metadata, those of the latest as trailers."""
        self.set_trailers(headers)
        if headers and not self._began:
            await self._send(self._context.send_initial_metadata, tuple(headers.items()))

    def set_trailers(self, headers: Mapping[str, str]) -> None:
        """Replace the trailing metadata, with what became known during the response."""
        if headers:
            self._context.set_trailing_metadata(tuple(headers.items()))

    def write(self, data: bytes) -> Coroutine[Any, Any, None]:
        """Send one serialised response, after those before it."""
        return self._send(self._context.write, data)

    async def _send(self, send: Callable[[Any], Coroutine[Any, Any, None]], what: Any) -> None:
        if self._writing:
            await self._turn()
        self._writing = self._began = True
        self._writing_since_s = time.monotonic()
        try:
            await send(what)
        except grpc.aio.InternalError as exc:  # the client is gone, and the cancellation has not come yet
            raise asyncio.CancelledError from exc
        finally:
            self._writing_since_s = 0.0
            self._writing = bool(self._waiting) and self._pass_on()

    async def _turn(self) -> None:
        """Wait until those before have written. No lock of asyncio's, whose calls cost every token more than this."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was given its turn, and does not take it
                self._writing = self._pass_on()
            raise

    def _pass_on(self) -> bool:
        """Give the next one that waits its turn; return whether there is one."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return True
        return False

    def check(self, now_s: float) -> None:
        """End the stream if the client has not read for ``timeout_s``. now_s: ``time.monotonic()``."""
        if self._writing_since_s and now_s - self._writing_since_s > self.timeout_s:
            self._writing_since_s = 0.0
            self.stalled = True
            if self._handler is not None:
                self._handler.cancel()
