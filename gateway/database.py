"""One SQLite database in WAL mode, which survives restarts and kill -9."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contract import failpoint
from contract.errors import InvalidArgument, Unavailable

_LOG = logging.getLogger(__name__)
TIMEOUT_S = 30.0  # for other processes that write


class Database:
    """Open the database; create it if there is none. May be used from any thread; SQLite's errors become Unavailable.

    path: None: in memory. name: what errors call it. schema: statements, separated by semicolons, of this version.
    Raises: InvalidArgument if the path cannot be used.
    """

    def __init__(self, path: Path | None, name: str, schema: str, version: int) -> None:
        self.path, self._name = path, name
        self._lock = threading.RLock()
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch(0o600)  # prompts are in it; SQLite gives its other files the same mode
            self._db = sqlite3.connect(
                path or ":memory:", timeout=TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._use_wal()
            for pragma in ("synchronous = FULL", "foreign_keys = ON"):
                self._db.execute(f"PRAGMA {pragma}")
            with self._transaction():
                found = self._db.execute("PRAGMA user_version").fetchone()[0]
                if found == 0:
                    for statement in filter(str.strip, schema.split(";")):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version = {version}")
        except (sqlite3.Error, OSError, Unavailable) as exc:
            raise InvalidArgument(str(path), f"must be usable as the {name}: {exc}") from exc
        if found not in (0, version):
            raise InvalidArgument(str(path), f"must be a database of version {version}, got version {found}")

    def _use_wal(self) -> None:
        """Raises sqlite3.Error. SQLite's own timeout does not cover processes that make one new database at once."""
        until_s = time.monotonic() + TIMEOUT_S
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as exc:
                if "locked" not in str(exc) or time.monotonic() > until_s:
                    raise
            time.sleep(0.01)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit all or nothing; inside another transaction of the thread, be a part of that.

        IMMEDIATE: two processes that read and then write cannot deadlock.
        """
        with self._lock:
            if self._in_transaction():
                yield self._db
                return
            try:
                failpoint.write_to_disk()
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield self._db
                except BaseException:
                    self._db.execute("ROLLBACK")
                    raise
                self._db.execute("COMMIT")
            except (sqlite3.Error, OSError) as exc:
                if self._in_transaction():
                    self._db.execute("ROLLBACK")
                _LOG.warning("%s failed: %s", self._name, exc)  # its path is not for clients
                raise Unavailable(f"the {self._name} failed", 5.0) from exc

    def _execute(self, query: str, *values: object) -> list[Any]:
        """Return the rows of one statement."""
        with self._transaction() as db:
            return db.execute(query, values).fetchall()

    def _in_transaction(self) -> bool:
        try:
            return self._db.in_transaction
        except sqlite3.ProgrammingError:  # the connection is closed
            return False
