"""A stream of deltas that comes when the test says so and remembers how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from contract.generation import FinishReason, TokenDelta
from gateway.choices import ChoiceDelta


class ScriptedSource:
    """``deltas`` at once, then it waits for ``go`` before the last of them if ``hold`` is set, then raises ``failure``
    if there is one."""

    def __init__(self, deltas: Iterable[ChoiceDelta], *, hold: bool = False, failure: Exception | None = None) -> None:
        self._deltas, self._failure = list(deltas), failure
        self.go = asyncio.Event()
        if not hold:
            self.go.set()
        self.closed = False
        self.opened = 0

    def __call__(self) -> AsyncIterator[ChoiceDelta]:
        self.opened += 1
        return self._stream()

    async def _stream(self) -> AsyncIterator[ChoiceDelta]:
        try:
            for number, delta in enumerate(self._deltas):
                if number == len(self._deltas) - 1:
                    await self.go.wait()
                yield delta
                await asyncio.sleep(0)
            if self._failure is not None:
                raise self._failure
        finally:
            self.closed = True


def words(count: int, end: FinishReason | None = FinishReason.STOP) -> list[TokenDelta]:
    texts = [TokenDelta(text=f"w{number} ", token_ids=(number,)) for number in range(count)]
    return [*texts[:-1], TokenDelta(text=f"w{count - 1} ", token_ids=(count - 1,), finish_reason=end)]
