"""Where keys that are made while the gateway runs are kept: a SQLite file, or the Redis that gateways share.

Both keep documents by name, read and written whole; one that was never written is empty. All raise Unavailable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from gateway.admission.shared_state import SharedState
from gateway.database import Database

Result = TypeVar("Result")
Change = Callable[[bytes], tuple[bytes, Result]]  # from a document to another one, and what to return
_SCHEMA = "CREATE TABLE documents (name TEXT PRIMARY KEY, body BLOB NOT NULL)"


class FileDocuments(Database):
    """Documents in a SQLite file, for the processes of one machine. Raises: InvalidArgument if it cannot be used."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "database of keys", _SCHEMA, 1)

    async def read(self, name: str) -> bytes:
        return await asyncio.to_thread(self._changed, name, None)

    async def change(self, name: str, change: Change[Result]) -> Result:
        """Write what ``change`` makes of a document, as if no other process wrote. It may be called several times."""
        return await asyncio.to_thread(self._changed, name, change)

    def _changed(self, name: str, change: Change[Any] | None) -> Any:
        with self._transaction() as db:
            body = (db.execute("SELECT body FROM documents WHERE name = ?", (name,)).fetchone() or (b"",))[0]
            if change is None:
                return body
            made, result = change(body)
            db.execute("INSERT OR REPLACE INTO documents VALUES (?, ?)", (name, made))
        return result


class RedisDocuments:
    """Documents in Redis; see FileDocuments. state: belongs to the caller, who closes it."""

    def __init__(self, state: SharedState) -> None:
        self._state = state

    async def read(self, name: str) -> bytes:
        return await self._state.call(lambda: self._state.redis.get(f"trident:{{identity}}:{name}")) or b""

    async def change(self, name: str, change: Change[Result]) -> Result:
        key = f"trident:{{identity}}:{name}"

        async def run(pipe: Any) -> Result:
            made, result = change(await pipe.get(key) or b"")
            pipe.multi()
            pipe.set(key, made)
            return result

        made: Result = await self._state.call(lambda: self._state.redis.transaction(run, key, value_from_callable=True))
        return made

    def close(self) -> None:
        pass
