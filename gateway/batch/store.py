"""Files and batches in one SQLite database in WAL mode, which survives restarts and kill -9.

A batch line is either pending or has one result. The result and the batch's counts change in one transaction: after a
crash a finished line is still finished and counted once, and any other is pending. A tenant sees its own rows only.

Every method is one transaction, blocks, and may be called from any thread. SQLite's errors become Unavailable.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from contract.errors import InvalidArgument, NotFound, Overloaded
from contract.generation import Usage
from gateway.database import Database

PURPOSE, OUTPUT_PURPOSE = "batch", "batch_output"
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
_IS_UNFINISHED = f"status IN {UNFINISHED}"  # in SQL the names are written as in Python
_FORGET_LINES = "DELETE FROM lines WHERE batch_id = (SELECT id FROM batches WHERE id = ? AND status = 'validating')"
_VERSION = 1
_PAGE_ROWS = 256  # lines read at once
_UNUSED = Usage(0, 0)
_SCHEMA = """
CREATE TABLE files (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, filename TEXT NOT NULL,
    purpose TEXT NOT NULL, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL,
    whole INTEGER NOT NULL, batch_id TEXT, ok INTEGER);
CREATE INDEX files_by_tenant ON files (tenant, sequence);
CREATE TABLE parts (
    file_id TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (file_id, number)) WITHOUT ROWID;
CREATE TABLE batches (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, key_name TEXT NOT NULL,
    endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL, metadata TEXT NOT NULL,
    webhook_url TEXT NOT NULL, status TEXT NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL,
    in_progress_at INTEGER, finalizing_at INTEGER, completed_at INTEGER, failed_at INTEGER, expired_at INTEGER,
    cancelling_at INTEGER, cancelled_at INTEGER, total INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0, input_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0, output_tokens INTEGER NOT NULL DEFAULT 0,
    errors TEXT NOT NULL DEFAULT '[]', output_file_id TEXT, error_file_id TEXT,
    webhook_attempts INTEGER NOT NULL DEFAULT 0, webhook_due_s REAL);
CREATE INDEX batches_by_tenant ON batches (tenant, sequence);
CREATE INDEX batches_by_status ON batches (status);
CREATE TABLE lines (
    batch_id TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, body BLOB, ok INTEGER, result BLOB,
    PRIMARY KEY (batch_id, number)) WITHOUT ROWID;
CREATE INDEX pending_lines ON lines (batch_id, number) WHERE ok IS NULL;
"""


class FileTooLarge(InvalidArgument):
    """The file is larger than ``max_bytes``."""

    http_status = 413

    def __init__(self, max_bytes: int) -> None:
        super().__init__("file", f"must be at most {max_bytes} bytes")


@dataclass(frozen=True)
class BatchLimits:
    """Bounds of one tenant.

    max_file_bytes: of one file.
    max_files, max_bytes: of all files, results included in the bytes.
    max_batches: unfinished batches.
    keep_s: how long files and finished batches are kept.
    """

    max_file_bytes: int = 100 * 1024 * 1024
    max_files: int = 1000
    max_bytes: int = 2 * 1024**3
    max_batches: int = 16
    keep_s: float = 30 * 86_400.0


@dataclass(frozen=True)
class File:
    """A file. Times in Unix seconds.

    batch_id, ok: set for a result file: the batch whose completed (1) or failed (0) lines it holds.
    """

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int
    batch_id: str | None
    ok: int | None


@dataclass(frozen=True)
class Batch:
    """A batch. Times in Unix seconds.

    key_name: the API key that created it, whose limits apply.
    total: number of lines; completed + failed once it has ended.
    """

    id: str
    tenant: str
    key_name: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: Mapping[str, str]
    webhook_url: str
    status: str
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    total: int
    completed: int
    failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    errors: Sequence[Mapping]
    output_file_id: str | None
    error_file_id: str | None
    webhook_attempts: int


@dataclass(frozen=True)
class Line:
    """One request of a batch.

    number: from 0.
    body: the JSON of its HTTP request.
    """

    batch_id: str
    number: int
    custom_id: str
    body: bytes


_FILE = ", ".join(declared.name for declared in fields(File))
_BATCH = ", ".join(declared.name for declared in fields(Batch))


class BatchStore(Database):
    """Open the database; create it if there is none.

    clock: Unix seconds.
    Raises: InvalidArgument if the path cannot be used.
    """

    def __init__(self, path: Path, limits: BatchLimits = BatchLimits(), clock: Callable[[], float] = time.time) -> None:
        super().__init__(path, "batch database", _SCHEMA, _VERSION)
        self.limits, self._clock = limits, clock
        with self._transaction() as db:
            if "reasoning_tokens" not in {column[1] for column in db.execute("PRAGMA table_info(batches)")}:
                db.execute("ALTER TABLE batches ADD COLUMN reasoning_tokens INTEGER NOT NULL DEFAULT 0")

    # Files.

    def open_file(self, tenant: str, filename: str) -> str:
        """Create a file that is hidden until ``close_file``; return its id. Raises: InvalidArgument (bound reached)."""
        limits, now_s = self.limits, int(self._clock())
        with self._transaction() as db:
            files, used = db.execute("SELECT count(*), total(bytes) FROM files WHERE tenant = ?", (tenant,)).fetchone()
            if files >= limits.max_files:
                raise InvalidArgument("file", f"{files}/{limits.max_files} files are stored; delete files first")
            if used >= limits.max_bytes:
                raise InvalidArgument("file", f"{used:.0f}/{limits.max_bytes} bytes are stored; delete files first")
            file_id = "file-" + secrets.token_hex(12)
            until_s = now_s + int(limits.keep_s)
            values = (file_id, tenant, filename, PURPOSE, now_s, until_s)
            db.execute(
                "INSERT INTO files (id, tenant, filename, purpose, bytes, created_at, expires_at, whole)"
                " VALUES (?, ?, ?, ?, 0, ?, ?, 0)",
                values,
            )
        return file_id

    def append(self, file_id: str, number: int, data: bytes) -> None:
        """Append a part of a file, numbered from 0. Raises: FileTooLarge, InvalidArgument (the tenant's bound)."""
        max_bytes = self.limits.max_bytes
        with self._transaction() as db:
            db.execute("INSERT INTO parts VALUES (?, ?, ?)", (file_id, number, data))
            db.execute("UPDATE files SET bytes = bytes + ? WHERE id = ?", (len(data), file_id))
            size, tenant = db.execute("SELECT bytes, tenant FROM files WHERE id = ?", (file_id,)).fetchone()
            if size > self.limits.max_file_bytes:
                raise FileTooLarge(self.limits.max_file_bytes)
            (others,) = db.execute(
                "SELECT total(bytes) FROM files WHERE tenant = ? AND id <> ?", (tenant, file_id)
            ).fetchone()
            if size + others > max_bytes:
                left = max(0, max_bytes - int(others))
                raise InvalidArgument(
                    "file",
                    f"must be at most {left} bytes, as {others:.0f}/{max_bytes} bytes are stored; delete files first",
                )

    def close_file(self, tenant: str, file_id: str, keep_s: float | None = None) -> File:
        """Make a complete file visible, for ``keep_s`` seconds or ``BatchLimits.keep_s``."""
        max_s = self.limits.keep_s
        with self._transaction() as db:
            db.execute(
                "UPDATE files SET whole = 1, expires_at = created_at + ? WHERE id = ?",
                (int(max_s if keep_s is None else min(keep_s, max_s)), file_id),
            )
            return self._file(db, tenant, file_id)

    def abandon_file(self, file_id: str) -> None:
        """Delete a file that was not received completely."""
        with self._transaction() as db:
            db.execute("DELETE FROM parts WHERE file_id = ?", (file_id,))
            db.execute("DELETE FROM files WHERE id = ? AND whole = 0", (file_id,))

    def file(self, tenant: str, file_id: str) -> File:
        """Raises: NotFound."""
        with self._transaction() as db:
            return self._file(db, tenant, file_id)

    def files(
        self, tenant: str, limit: int, after: str = "", *, purpose: str = "", oldest_first: bool = False
    ) -> tuple[list[File], bool]:
        """Return at most ``limit`` files behind the file ``after``, and whether there are more."""
        with self._transaction() as db:
            where, values = "tenant = ? AND whole = 1", [tenant]
            if purpose:
                where, values = where + " AND purpose = ?", [*values, purpose]
            if after:
                self._file(db, tenant, after)
                sign = ">" if oldest_first else "<"
                where += f" AND sequence {sign} (SELECT sequence FROM files WHERE id = ?)"
                values.append(after)
            order = "ASC" if oldest_first else "DESC"
            rows = db.execute(
                f"SELECT {_FILE} FROM files WHERE {where} ORDER BY sequence {order} LIMIT ?", [*values, limit + 1]
            ).fetchall()
        return [File(*row) for row in rows[:limit]], len(rows) > limit

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Raises: NotFound; InvalidArgument while a batch reads it."""
        with self._transaction() as db:
            self._file(db, tenant, file_id)
            read_by = db.execute(
                "SELECT id FROM batches WHERE input_file_id = ? AND status = 'validating'", (file_id,)
            ).fetchone()
            if read_by:
                raise InvalidArgument("file_id", f"must not be read by a batch; {read_by[0]} still reads it")
            self._drop_file(db, file_id)

    def content(self, tenant: str, file_id: str) -> Iterator[bytes]:
        """Return an iterator of a file's bytes in parts. Raises: NotFound, at once."""
        file = self.file(tenant, file_id)
        return self._parts(file.id) if file.batch_id is None else self._results(file.batch_id, file.ok)

    def _parts(self, file_id: str) -> Iterator[bytes]:
        number = 0
        while True:
            with self._transaction() as db:
                row = db.execute(
                    "SELECT data FROM parts WHERE file_id = ? AND number = ?", (file_id, number)
                ).fetchone()
            if row is None:
                return
            yield row[0]
            number += 1

    def _results(self, batch_id: str, ok: int | None) -> Iterator[bytes]:
        after = -1
        while True:
            with self._transaction() as db:
                rows = db.execute(
                    "SELECT number, result FROM lines WHERE batch_id = ? AND ok = ? AND number > ?"
                    f" ORDER BY number LIMIT {_PAGE_ROWS}",
                    (batch_id, ok, after),
                ).fetchall()
            if not rows:
                return
            yield b"".join(result + b"\n" for _, result in rows)
            after = rows[-1][0]

    # Batches: requests of tenants.

    def create_batch(
        self,
        tenant: str,
        key_name: str,
        *,
        endpoint: str,
        input_file_id: str,
        completion_window: str,
        window_s: float,
        metadata: Mapping[str, str],
        webhook_url: str = "",
    ) -> Batch:
        """Raises: NotFound (no such file), InvalidArgument (not an input), Overloaded (too many unfinished batches)."""
        now_s = int(self._clock())
        with self._transaction() as db:
            if self._file(db, tenant, input_file_id).purpose != PURPOSE:
                raise InvalidArgument("input_file_id", f"must be a file with purpose {PURPOSE}")
            (open_batches,) = db.execute(
                f"SELECT count(*) FROM batches WHERE tenant = ? AND {_IS_UNFINISHED}", (tenant,)
            ).fetchone()
            if open_batches >= self.limits.max_batches:
                raise Overloaded(f"{open_batches}/{self.limits.max_batches} batches are unfinished", 60.0)
            batch_id = "batch_" + secrets.token_hex(12)
            db.execute(
                "INSERT INTO batches (id, tenant, key_name, endpoint, input_file_id, completion_window, metadata,"
                " webhook_url, status, created_at, expires_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'validating', ?, ?)",
                (batch_id, tenant, key_name, endpoint, input_file_id, completion_window, json.dumps(dict(metadata)))
                + (webhook_url, now_s, now_s + int(window_s)),
            )
            return self._batch(db, tenant, batch_id)

    def batch(self, tenant: str, batch_id: str) -> Batch:
        """Raises: NotFound."""
        with self._transaction() as db:
            return self._batch(db, tenant, batch_id)

    def batches(self, tenant: str, limit: int, after: str = "") -> tuple[list[Batch], bool]:
        """Return at most ``limit`` batches behind the batch ``after``, latest first, and whether there are more."""
        with self._transaction() as db:
            where, values = "tenant = ?", [tenant]
            if after:
                self._batch(db, tenant, after)
                where += " AND sequence < (SELECT sequence FROM batches WHERE id = ?)"
                values.append(after)
            rows = db.execute(
                f"SELECT {_BATCH} FROM batches WHERE {where} ORDER BY sequence DESC LIMIT ?", [*values, limit + 1]
            ).fetchall()
        return [_as_batch(row) for row in rows[:limit]], len(rows) > limit

    def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Begin to cancel a batch; safe to call twice. Raises: NotFound, InvalidArgument (it has ended)."""
        with self._transaction() as db:
            batch = self._batch(db, tenant, batch_id)
            if batch.status not in UNFINISHED:
                raise InvalidArgument("batch_id", f"must be an unfinished batch; it is {batch.status}")
            if batch.status in ("validating", "in_progress"):
                self._advance(db, batch_id, batch.status, "cancelling")
            return self._batch(db, tenant, batch_id)

    # Batches: steps of the worker.

    def unfinished(self) -> list[Batch]:
        """Return unfinished batches, oldest first."""
        with self._transaction() as db:
            rows = db.execute(f"SELECT {_BATCH} FROM batches WHERE {_IS_UNFINISHED} ORDER BY sequence")
            return [_as_batch(row) for row in rows]

    def forget_lines(self, batch_id: str) -> None:
        """Delete the lines of an interrupted validation before a new one, unless the batch was validated meanwhile."""
        with self._transaction() as db:
            db.execute(_FORGET_LINES, (batch_id,))

    def add_lines(self, batch_id: str, lines: Iterable[Line]) -> None:
        """Add lines, unless the batch ended during its validation."""
        with self._transaction() as db:
            if db.execute("SELECT 1 FROM batches WHERE id = ? AND status = 'validating'", (batch_id,)).fetchone():
                rows = [(batch_id, line.number, line.custom_id, line.body) for line in lines]
                db.executemany("INSERT INTO lines (batch_id, number, custom_id, body) VALUES (?, ?, ?, ?)", rows)

    def begin(self, batch_id: str) -> None:
        """Start a validated batch, unless it was cancelled meanwhile."""
        with self._transaction() as db:
            total = ", total = (SELECT count(*) FROM lines WHERE batch_id = id)"
            self._advance(db, batch_id, "validating", "in_progress", total)

    def fail(self, batch_id: str, errors: Sequence[Mapping]) -> None:
        """End a batch whose input is invalid; none of its lines runs."""
        with self._transaction() as db:
            now_s = self._clock()
            db.execute(_FORGET_LINES, (batch_id,))
            more = ", errors = ?, webhook_due_s = ?"
            self._advance(db, batch_id, "validating", "failed", more, json.dumps(list(errors)), now_s)

    def pending(self, batch_id: str, after: int, limit: int) -> list[Line]:
        """Return at most ``limit`` lines without a result whose number is above ``after``, in order."""
        with self._transaction() as db:
            rows = db.execute(
                "SELECT batch_id, number, custom_id, body FROM lines"
                " WHERE batch_id = ? AND ok IS NULL AND number > ? ORDER BY number LIMIT ?",
                (batch_id, after, limit),
            )
            return [Line(*row) for row in rows]

    def finish_line(self, line: Line, ok: bool, result: bytes, usage: Usage = _UNUSED) -> bool:
        """Store a line's result: JSON without a line end. Returns False, and changes nothing, if it has one already."""
        tokens = usage.input_tokens, usage.cached_tokens, usage.output_tokens, usage.reasoning_tokens
        with self._transaction() as db:
            done = db.execute(
                "UPDATE lines SET ok = ?, result = ?, body = NULL WHERE batch_id = ? AND number = ? AND ok IS NULL",
                (int(ok), result, line.batch_id, line.number),
            )
            if done.rowcount == 0:
                return False
            db.execute(
                "UPDATE batches SET completed = completed + ?, failed = failed + ?, input_tokens = input_tokens + ?,"
                " cached_tokens = cached_tokens + ?, output_tokens = output_tokens + ?,"
                " reasoning_tokens = reasoning_tokens + ? WHERE id = ?",
                (int(ok), int(not ok), *tokens, line.batch_id),
            )
            return True

    def finalize(self, batch_id: str) -> None:
        """Mark a batch whose lines have all ended and whose result files are not made yet."""
        with self._transaction() as db:
            self._advance(db, batch_id, "in_progress", "finalizing")

    def end(self, batch_id: str, status: str, unserved: Callable[[Line], bytes]) -> None:
        """End a batch and make its result files, each if it has lines.

        status: completed, cancelled or expired.
        unserved: makes the result of a line that did not run, from all but its body.
        """
        now_s = self._clock()
        with self._transaction() as db:
            row = db.execute(f"SELECT {_BATCH} FROM batches WHERE id = ?", (batch_id,)).fetchone()
            batch = _as_batch(row)
            if batch.status not in UNFINISHED:
                return
            left = db.execute(
                "SELECT batch_id, number, custom_id, x'' FROM lines WHERE batch_id = ? AND ok IS NULL", (batch_id,)
            ).fetchall()
            db.executemany(
                "UPDATE lines SET ok = 0, result = ?, body = NULL WHERE batch_id = ? AND number = ?",
                [(unserved(Line(*each)), each[0], each[1]) for each in left],
            )
            made = {ok: self._output_file(db, batch, ok, now_s) for ok in (1, 0)}
            db.execute(
                f"UPDATE batches SET status = ?, {status}_at = ?, total = (SELECT count(*) FROM lines WHERE batch_id"
                " = id), failed = failed + ?, output_file_id = ?, error_file_id = ?, webhook_due_s = ? WHERE id = ?",
                (status, int(now_s), len(left), made[1], made[0], now_s, batch_id),
            )

    def _output_file(self, db: sqlite3.Connection, batch: Batch, ok: int, now_s: float) -> str | None:
        lines, size = db.execute(
            "SELECT count(*), total(length(result) + 1) FROM lines WHERE batch_id = ? AND ok = ?", (batch.id, ok)
        ).fetchone()
        if not lines:
            return None
        file_id = "file-" + secrets.token_hex(12)
        filename = f"{batch.id}_{'output' if ok else 'error'}.jsonl"
        values = (file_id, batch.tenant, filename, OUTPUT_PURPOSE, int(size), int(now_s))
        db.execute(
            "INSERT INTO files (id, tenant, filename, purpose, bytes, created_at, expires_at, whole, batch_id, ok)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, 1, ?, ?)",
            (*values, int(now_s + self.limits.keep_s), batch.id, ok),
        )
        return file_id

    def delete_expired(self) -> None:
        """Delete expired files and batches, and uploads abandoned for a day."""
        now_s = self._clock()
        with self._transaction() as db:
            gone = db.execute(
                "SELECT id FROM files WHERE (expires_at <= ? OR (whole = 0 AND created_at <= ?)) AND id NOT IN"
                " (SELECT input_file_id FROM batches WHERE status = 'validating') LIMIT 100",
                (now_s, now_s - 86_400),
            ).fetchall()
            for (file_id,) in gone:
                self._drop_file(db, file_id)
            old = db.execute(
                f"SELECT id FROM batches WHERE created_at <= ? AND NOT {_IS_UNFINISHED} AND webhook_due_s IS NULL"
                " AND id NOT IN (SELECT batch_id FROM files WHERE batch_id IS NOT NULL) LIMIT 100",
                (now_s - self.limits.keep_s,),
            ).fetchall()
            for (batch_id,) in old:
                db.execute("DELETE FROM lines WHERE batch_id = ?", (batch_id,))
                db.execute("DELETE FROM batches WHERE id = ?", (batch_id,))

    def backlog(self) -> tuple[dict[str, int], int]:
        """Return the number of batches in each unfinished status, and of their lines without a result."""
        with self._transaction() as db:
            rows = db.execute(
                f"SELECT status, count(*), total(total - completed - failed) FROM batches WHERE {_IS_UNFINISHED}"
                " GROUP BY status"
            ).fetchall()
        return {status: count for status, count, _ in rows}, int(sum(left for *_, left in rows))

    # Webhooks.

    def due_webhooks(self) -> list[Batch]:
        """Return ended batches whose webhook is due."""
        with self._transaction() as db:
            db.execute("UPDATE batches SET webhook_due_s = NULL WHERE webhook_due_s IS NOT NULL AND webhook_url = ''")
            rows = db.execute(
                f"SELECT {_BATCH} FROM batches WHERE webhook_due_s <= ? ORDER BY webhook_due_s LIMIT 16",
                (self._clock(),),
            )
            return [_as_batch(row) for row in rows]

    def webhook_called(self, batch_id: str, again_in_s: float | None) -> None:
        """Count an attempt; the next is due in ``again_in_s``, None for never."""
        due_s = None if again_in_s is None else self._clock() + again_in_s
        with self._transaction() as db:
            db.execute(
                "UPDATE batches SET webhook_attempts = webhook_attempts + 1, webhook_due_s = ? WHERE id = ?",
                (due_s, batch_id),
            )

    def _file(self, db: sqlite3.Connection, tenant: str, file_id: str) -> File:
        row = db.execute(
            f"SELECT {_FILE} FROM files WHERE id = ? AND tenant = ? AND whole = 1", (file_id, tenant)
        ).fetchone()
        if row is None:
            raise NotFound(f"no such file: {file_id!r:.100}")
        return File(*row)

    def _batch(self, db: sqlite3.Connection, tenant: str, batch_id: str) -> Batch:
        row = db.execute(f"SELECT {_BATCH} FROM batches WHERE id = ? AND tenant = ?", (batch_id, tenant)).fetchone()
        if row is None:
            raise NotFound(f"no such batch: {batch_id!r:.100}")
        return _as_batch(row)

    def _drop_file(self, db: sqlite3.Connection, file_id: str) -> None:
        shown = db.execute("SELECT batch_id, ok FROM files WHERE id = ?", (file_id,)).fetchone()
        if shown[0] is not None:
            db.execute("DELETE FROM lines WHERE batch_id = ? AND ok = ?", shown)
        db.execute("DELETE FROM parts WHERE file_id = ?", (file_id,))
        db.execute("DELETE FROM files WHERE id = ?", (file_id,))

    def _advance(
        self, db: sqlite3.Connection, batch_id: str, before: str, status: str, also: str = "", *values: object
    ) -> None:
        """Change the status of a batch that still has the status ``before``. also: further assignments, in SQL."""
        db.execute(
            f"UPDATE batches SET status = ?, {status}_at = ?{also} WHERE id = ? AND status = ?",
            (status, int(self._clock()), *values, batch_id, before),
        )


def _as_batch(row: Sequence) -> Batch:
    values = dict(zip(_BATCH.split(", "), row, strict=True))
    return Batch(**values | {name: json.loads(values[name]) for name in ("metadata", "errors")})
