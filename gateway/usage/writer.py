"""Write what gathers in batches, in a thread: off the event loop, one batch at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from contract.errors import Unavailable

WRITE_S = 0.25  # what was added is on disk so long after it; what kill -9 may lose of records
MOST = 100_000
_LOG = logging.getLogger(__name__)
_Item = TypeVar("_Item")


class Writer(Generic[_Item]):
    """prepare: returns what ``write`` gets for the items of a batch, on the loop. write: blocks; may raise Unavailable.

    lost: called for an item that comes while MOST wait for a database that fails.
    """

    def __init__(
        self,
        prepare: Callable[[list[_Item]], Any],
        write: Callable[[Any], None],
        lost: Callable[[], object] = lambda: None,
    ) -> None:
        self._prepare, self._write, self._lost = prepare, write, lost
        self._items: list[_Item] = []
        self._added = self._written = 0
        self._writing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def add(self, item: _Item) -> None:
        """Add an item, to be written within WRITE_S."""
        if len(self._items) >= MOST:
            self._lost()
            return
        self._items.append(item)
        self._added += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WRITE_S, self._due)

    async def commit(self) -> None:
        """Return once all that was added before is on disk. Raises Unavailable."""
        upto = self._added
        while self._written < upto:
            await asyncio.shield(self._begun())

    async def aclose(self) -> None:
        """Write the rest; log where that cannot be."""
        try:
            await self.commit()
        except Unavailable:
            _LOG.error("%d items of the usage database are lost", len(self._items))
        if self._timer is not None:
            self._timer.cancel()

    def _due(self) -> None:
        self._timer = None
        if self._items:
            self._begun()

    def _begun(self) -> asyncio.Task[None]:
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write_all())
            self._writing.add_done_callback(lambda done: done.cancelled() or done.exception())  # the database logs it
        return self._writing

    async def _write_all(self) -> None:
        batch, self._items = self._items, []
        upto = self._added
        try:
            await asyncio.to_thread(self._write, self._prepare(batch))
            self._written = upto
        except BaseException:
            self._items = batch + self._items
            raise
        finally:
            self._writing = None
            if self._items and self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(WRITE_S, self._due)
