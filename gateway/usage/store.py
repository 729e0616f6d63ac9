"""The usage database: a record of each ended request, their sums by quarters of an hour, and the day and month budgets.

Quarters of an hour, since hours and days of every time zone are made of whole ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from contract.errors import InvalidArgument, Unavailable
from gateway.config.settings import DAY_S, Settings
from gateway.database import Database

QUARTER_S = 900
PURGE_S = 3600.0
_VERSION = 1
_SCHEMA = """
CREATE TABLE requests (
    id INTEGER PRIMARY KEY AUTOINCREMENT, time_s REAL NOT NULL, request_id TEXT NOT NULL, key TEXT NOT NULL,
    model TEXT NOT NULL, endpoint TEXT NOT NULL, source TEXT NOT NULL, prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, micros INTEGER NOT NULL);
CREATE INDEX requests_by_time ON requests (time_s);
CREATE INDEX requests_by_request ON requests (request_id);
CREATE TABLE quarters (
    start_s INTEGER NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL, endpoint TEXT NOT NULL, requests INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    micros INTEGER NOT NULL, PRIMARY KEY (start_s, key, model, endpoint)) WITHOUT ROWID;
CREATE TABLE budgets (bucket TEXT PRIMARY KEY, ends_s REAL NOT NULL, spent REAL NOT NULL, leases TEXT NOT NULL)
    WITHOUT ROWID;
"""
_INTO_QUARTERS = """
INSERT INTO quarters VALUES (?, ?, ?, ?, 1, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET requests = requests + 1,
    prompt_tokens = prompt_tokens + excluded.prompt_tokens, cached_tokens = cached_tokens + excluded.cached_tokens,
    completion_tokens = completion_tokens + excluded.completion_tokens, micros = micros + excluded.micros"""


class UsageRecord(NamedTuple):
    """One ended request. time_s: of its reservation, Unix time. key: its level, such as ``acme/research/alice``.

    source: ``engine``, or where a reused answer comes from. cached_tokens: of the prompt, at a price of their own.
    micros: what it cost, in millionths of the currency.
    """

    time_s: float
    request_id: str
    key: str
    model: str
    endpoint: str
    source: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    micros: int


SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "micros")


class Filter(NamedTuple):
    """What a report is of. from_s, to_s: Unix time, the end excluded. level: with all below it; "" for all.

    model, endpoint, request_id: "" for all.
    """

    from_s: float
    to_s: float
    level: str = ""
    model: str = ""
    endpoint: str = ""
    request_id: str = ""


class UsageStore(Database):
    """Every method blocks. settings: the file, and how long records and their sums are kept. clock: Unix seconds."""

    path: Path

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        super().__init__(settings.usage_db, "usage database", _SCHEMA, _VERSION)
        self._settings, self._clock = settings, clock
        self._purge_s = 0.0

    def lock(self) -> int:
        """Return the descriptor that holds the lock of the budgets; the kernel releases it when the process ends.

        Raises: InvalidArgument if another process has it.
        """
        descriptor = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            problem = "is used by another gateway; give each its own, and share budgets with [budgets] redis"
            raise InvalidArgument(str(self.path), problem) from None
        return descriptor

    def add(self, records: Collection[UsageRecord]) -> None:
        """Add records, and them to their sums, all or none."""
        columns, places = ", ".join(UsageRecord._fields), ", ".join("?" * len(UsageRecord._fields))
        with self._transaction() as db:
            db.executemany(f"INSERT INTO requests ({columns}) VALUES ({places})", records)
            db.executemany(
                _INTO_QUARTERS,
                [
                    (int(one.time_s // QUARTER_S) * QUARTER_S, one.key, one.model, one.endpoint, *one[-4:])
                    for one in records
                ],
            )
            if (now_s := self._clock()) >= self._purge_s:
                self._purge_s, settings = now_s + PURGE_S, self._settings
                db.execute("DELETE FROM requests WHERE time_s < ?", (now_s - settings.usage_keep_days * DAY_S,))
                db.execute("DELETE FROM quarters WHERE start_s < ?", (now_s - settings.usage_sums_keep_days * DAY_S,))
                db.execute("DELETE FROM budgets WHERE ends_s < ?", (now_s - DAY_S,))

    def put_budgets(self, rows: Iterable[tuple[str, float, float, str]]) -> None:
        """Write budgets: bucket, end of its day or month, what was spent of it, reservations as JSON."""
        with self._transaction() as db:
            db.executemany("INSERT OR REPLACE INTO budgets VALUES (?, ?, ?, ?)", rows)

    def budgets(self) -> dict[str, tuple[float, str]]:
        """Return what is spent and reserved of each budget, as it was written."""
        return {row[0]: (row[2], row[3]) for row in self._execute("SELECT * FROM budgets")}


def read(path: Path, table: str, columns: Sequence[str], about: Filter, rest: str, *values: Any) -> Iterator[tuple]:
    """Yield rows of ``requests`` or ``quarters``, beside gateways that write them. rest: of the query, behind the
    filter. Raises: Unavailable."""
    time_column = "time_s" if table == "requests" else "start_s"
    parts = [f"{time_column} >= ?", f"{time_column} < ?"]
    filtered: list[Any] = [about.from_s, about.to_s]
    if about.level:  # '0' is the next character behind '/'
        parts.append("(key = ? OR (key >= ? AND key < ?))")
        filtered += [about.level, f"{about.level}/", f"{about.level}0"]
    for name in ("model", "endpoint", "request_id"):
        if value := getattr(about, name):
            parts.append(f"{name} = ?")
            filtered.append(value)
    query = f"SELECT {', '.join(columns)} FROM {table} WHERE {' AND '.join(parts)} {rest}"
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30.0)) as db:
            yield from db.execute(query, [*filtered, *values])
    except sqlite3.Error as exc:
        raise Unavailable(f"the usage database cannot be read: {exc}", 5.0) from exc
