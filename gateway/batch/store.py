"""Files and batches in one SQLite database in WAL mode, which survives restarts and kill -9.

A batch line is either pending or has one result. The result and the batch's counts change in one transaction: after a
crash a finished line is still finished and counted once, and any other is pending. A tenant sees its own rows only.

Every method is one transaction, blocks, and may be called from any thread. SQLite's errors become Unavailable.
"""

from __future__ import annotations

import itertools
import json
import secrets
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
    """Bounds of one tenant's files and unfinished batches. keep_s: of files and of finished batches."""

    max_file_bytes: int = 100 * 1024 * 1024
    max_files: int = 1000
    max_bytes: int = 2 * 1024**3
    max_batches: int = 16
    keep_s: float = 30 * 86_400.0


@dataclass(frozen=True)
class File:
    """Times in Unix seconds. batch_id, ok: of a file of results, a batch's completed (1) or failed (0) lines."""

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
    """Times in Unix seconds. key_name: whose limits apply. total: lines; completed + failed once it has ended."""

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
    """One request of a batch. number: from 0. body: the JSON of its HTTP request."""

    batch_id: str
    number: int
    custom_id: str
    body: bytes


_FILE = ", ".join(declared.name for declared in fields(File))
_BATCH = ", ".join(declared.name for declared in fields(Batch))


class BatchStore(Database):
    """Created if there is none. clock: Unix seconds. Raises: InvalidArgument if the path cannot be used."""

    def __init__(self, path: Path, limits: BatchLimits = BatchLimits(), clock: Callable[[], float] = time.time) -> None:
        super().__init__(path, "batch database", _SCHEMA, _VERSION)
        self.limits, self._clock = limits, clock
        with self._transaction() as db:
            if "reasoning_tokens" not in {column[1] for column in db.execute("PRAGMA table_info(batches)")}:
                db.execute("ALTER TABLE batches ADD COLUMN reasoning_tokens INTEGER NOT NULL DEFAULT 0")

    # Files.

    def open_file(self, tenant: str, filename: str) -> str:
        """Create a file that is hidden until ``close_file``; return its id. Raises: InvalidArgument (bound reached)."""
        limits = self.limits
        with self._transaction():
            [(files, used)] = self._execute("SELECT count(*), total(bytes) FROM files WHERE tenant = ?", tenant)
            if files >= limits.max_files:
                raise InvalidArgument("file", f"{files}/{limits.max_files} files are stored; delete files first")
            if used >= limits.max_bytes:
                raise InvalidArgument("file", f"{used:.0f}/{limits.max_bytes} bytes are stored; delete files first")
            return self._new_file(tenant, filename, 0)

    def append(self, file_id: str, number: int, data: bytes) -> None:
        """Append a part of a file, numbered from 0. Raises: FileTooLarge, InvalidArgument (the tenant's bound)."""
        limits = self.limits
        with self._transaction():
            self._execute("INSERT INTO parts VALUES (?, ?, ?)", file_id, number, data)
            self._execute("UPDATE files SET bytes = bytes + ? WHERE id = ?", len(data), file_id)
            [(size, tenant)] = self._execute("SELECT bytes, tenant FROM files WHERE id = ?", file_id)
            if size > limits.max_file_bytes:
                raise FileTooLarge(limits.max_file_bytes)
            [(used,)] = self._execute("SELECT total(bytes) FROM files WHERE tenant = ?", tenant)
            if used > limits.max_bytes:
                stored = int(used - size)
                problem = f"must be at most {max(0, limits.max_bytes - stored)} bytes, as {stored}/{limits.max_bytes}"
                raise InvalidArgument("file", f"{problem} bytes are stored; delete files first")

    def close_file(self, tenant: str, file_id: str, keep_s: float | None = None) -> File:
        """Make a complete file visible, for ``keep_s`` seconds or ``BatchLimits.keep_s``."""
        kept_s = int(self.limits.keep_s if keep_s is None else min(keep_s, self.limits.keep_s))
        with self._transaction():
            self._execute("UPDATE files SET whole = 1, expires_at = created_at + ? WHERE id = ?", kept_s, file_id)
            return self.file(tenant, file_id)

    def abandon_file(self, file_id: str) -> None:
        """Delete a file that was not received completely."""
        with self._transaction():
            self._execute("DELETE FROM parts WHERE file_id = ?", file_id)
            self._execute("DELETE FROM files WHERE id = ? AND whole = 0", file_id)

    def file(self, tenant: str, file_id: str) -> File:
        """Raises: NotFound."""
        query = f"SELECT {_FILE} FROM files WHERE id = ? AND tenant = ? AND whole = 1"
        for row in self._execute(query, file_id, tenant):
            return File(*row)
        raise NotFound(f"no such file: {file_id!r:.100}")

    def files(
        self, tenant: str, limit: int, after: str = "", *, purpose: str = "", oldest_first: bool = False
    ) -> tuple[list[File], bool]:
        """Return at most ``limit`` files behind the file ``after``, and whether there are more."""
        where, values = "tenant = ? AND whole = 1", [tenant]
        if purpose:
            where, values = where + " AND purpose = ?", [*values, purpose]
        with self._transaction():
            if after:
                values.append(self.file(tenant, after).id)
                where += f" AND sequence {'>' if oldest_first else '<'} (SELECT sequence FROM files WHERE id = ?)"
            query = f"SELECT {_FILE} FROM files WHERE {where} ORDER BY sequence {'ASC' if oldest_first else 'DESC'}"
            rows = self._execute(f"{query} LIMIT ?", *values, limit + 1)
        return [File(*row) for row in rows[:limit]], len(rows) > limit

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Raises: NotFound; InvalidArgument while a batch reads it."""
        with self._transaction():
            self.file(tenant, file_id)
            query = "SELECT id FROM batches WHERE input_file_id = ? AND status = 'validating'"
            for (reader,) in self._execute(query, file_id):
                raise InvalidArgument("file_id", f"must not be read by a batch; {reader} still reads it")
            self._drop_file(file_id)

    def content(self, tenant: str, file_id: str) -> Iterator[bytes]:
        """Return an iterator of a file's bytes in parts. Raises: NotFound, at once."""
        file = self.file(tenant, file_id)
        return self._parts(file.id) if file.batch_id is None else self._results(file.batch_id, file.ok)

    def _parts(self, file_id: str) -> Iterator[bytes]:
        for number in itertools.count():
            rows = self._execute("SELECT data FROM parts WHERE file_id = ? AND number = ?", file_id, number)
            if not rows:
                return
            yield rows[0][0]

    def _results(self, batch_id: str, ok: int | None) -> Iterator[bytes]:
        after = -1
        query = "SELECT number, result FROM lines WHERE batch_id = ? AND ok = ? AND number > ? ORDER BY number"
        while rows := self._execute(f"{query} LIMIT {_PAGE_ROWS}", batch_id, ok, after):
            yield b"".join(result + b"\n" for _, result in rows)
            after = rows[-1][0]

    # Batches: requests of tenants.

    def create_batch(
        self, tenant: str, key_name: str, *, window_s: float, metadata: Mapping[str, str], **fields: str
    ) -> Batch:
        """fields: the other texts of the request. Raises: NotFound, InvalidArgument (not an input), Overloaded."""
        now_s, batch_id = int(self._clock()), "batch_" + secrets.token_hex(12)
        values: dict[str, object] = {"webhook_url": "", **fields, "id": batch_id, "tenant": tenant}
        values |= {"key_name": key_name, "metadata": json.dumps(dict(metadata)), "status": "validating"}
        values |= {"created_at": now_s, "expires_at": now_s + int(window_s)}
        with self._transaction():
            if self.file(tenant, fields["input_file_id"]).purpose != PURPOSE:
                raise InvalidArgument("input_file_id", f"must be a file with purpose {PURPOSE}")
            query = f"SELECT count(*) FROM batches WHERE tenant = ? AND {_IS_UNFINISHED}"
            [(unfinished,)] = self._execute(query, tenant)
            if unfinished >= self.limits.max_batches:
                raise Overloaded(f"{unfinished}/{self.limits.max_batches} batches are unfinished", 60.0)
            places = ", ".join("?" * len(values))
            self._execute(f"INSERT INTO batches ({', '.join(values)}) VALUES ({places})", *values.values())
            return self.batch(tenant, batch_id)

    def batch(self, tenant: str, batch_id: str) -> Batch:
        """Raises: NotFound."""
        for batch in self._batches("WHERE id = ? AND tenant = ?", batch_id, tenant):
            return batch
        raise NotFound(f"no such batch: {batch_id!r:.100}")

    def batches(self, tenant: str, limit: int, after: str = "") -> tuple[list[Batch], bool]:
        """Return at most ``limit`` batches behind the batch ``after``, latest first, and whether there are more."""
        where, values = "WHERE tenant = ?", [tenant]
        with self._transaction():
            if after:
                values.append(self.batch(tenant, after).id)
                where += " AND sequence < (SELECT sequence FROM batches WHERE id = ?)"
            found = self._batches(f"{where} ORDER BY sequence DESC LIMIT ?", *values, limit + 1)
        return found[:limit], len(found) > limit

    def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Begin to cancel a batch; safe to call twice. Raises: NotFound, InvalidArgument (it has ended)."""
        with self._transaction():
            batch = self.batch(tenant, batch_id)
            if batch.status not in UNFINISHED:
                raise InvalidArgument("batch_id", f"must be an unfinished batch; it is {batch.status}")
            if batch.status in ("validating", "in_progress"):
                self._advance(batch_id, batch.status, "cancelling")
            return self.batch(tenant, batch_id)

    # Batches: steps of the worker.

    def unfinished(self) -> list[Batch]:
        """Return unfinished batches, oldest first."""
        return self._batches(f"WHERE {_IS_UNFINISHED} ORDER BY sequence")

    def forget_lines(self, batch_id: str) -> None:
        """Delete the lines of an interrupted validation before a new one, unless the batch was validated meanwhile."""
        self._execute(_FORGET_LINES, batch_id)

    def add_lines(self, batch_id: str, lines: Iterable[Line]) -> None:
        """Add lines, unless the batch ended during its validation."""
        with self._transaction() as db:
            if self._execute("SELECT 1 FROM batches WHERE id = ? AND status = 'validating'", batch_id):
                rows = [(batch_id, line.number, line.custom_id, line.body) for line in lines]
                db.executemany("INSERT INTO lines (batch_id, number, custom_id, body) VALUES (?, ?, ?, ?)", rows)

    def begin(self, batch_id: str) -> None:
        """Start a validated batch, unless it was cancelled meanwhile."""
        total = ", total = (SELECT count(*) FROM lines WHERE batch_id = id)"
        self._advance(batch_id, "validating", "in_progress", total)

    def fail(self, batch_id: str, errors: Sequence[Mapping]) -> None:
        """End a batch whose input is invalid; none of its lines runs."""
        with self._transaction():
            self._execute(_FORGET_LINES, batch_id)
            more = json.dumps(list(errors)), self._clock()
            self._advance(batch_id, "validating", "failed", ", errors = ?, webhook_due_s = ?", *more)

    def pending(self, batch_id: str, after: int, limit: int) -> list[Line]:
        """Return at most ``limit`` lines without a result whose number is above ``after``, in order."""
        query = "SELECT batch_id, number, custom_id, body FROM lines WHERE batch_id = ? AND ok IS NULL AND number > ?"
        return [Line(*row) for row in self._execute(f"{query} ORDER BY number LIMIT ?", batch_id, after, limit)]

    def finish_line(self, line: Line, ok: bool, result: bytes, usage: Usage = _UNUSED) -> bool:
        """Store a line's result: JSON without a line end. Returns False, and changes nothing, if it has one already."""
        tokens = usage.input_tokens, usage.cached_tokens, usage.output_tokens, usage.reasoning_tokens
        with self._transaction() as db:
            done = db.execute(
                "UPDATE lines SET ok = ?, result = ?, body = NULL WHERE batch_id = ? AND number = ? AND ok IS NULL",
                (int(ok), result, line.batch_id, line.number),
            )
            if done.rowcount:
                counts = "completed", "failed", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"
                added = ", ".join(f"{name} = {name} + ?" for name in counts)
                values = (int(ok), int(not ok), *tokens, line.batch_id)
                self._execute(f"UPDATE batches SET {added} WHERE id = ?", *values)
            return bool(done.rowcount)

    def finalize(self, batch_id: str) -> None:
        """Mark a batch whose lines have all ended and whose result files are not made yet."""
        self._advance(batch_id, "in_progress", "finalizing")

    def end(self, batch_id: str, status: str, unserved: Callable[[Line], bytes]) -> None:
        """End a batch: completed, cancelled or expired. unserved: makes the result of a line that did not run."""
        now_s = self._clock()
        with self._transaction() as db:
            [batch] = self._batches("WHERE id = ?", batch_id)
            if batch.status not in UNFINISHED:
                return
            query = "SELECT batch_id, number, custom_id, x'' FROM lines WHERE batch_id = ? AND ok IS NULL"
            left = [Line(*row) for row in self._execute(query, batch_id)]
            db.executemany(
                "UPDATE lines SET ok = 0, result = ?, body = NULL WHERE batch_id = ? AND number = ?",
                [(unserved(line), batch_id, line.number) for line in left],
            )
            made = {ok: self._output_file(batch, ok) for ok in (1, 0)}
            self._execute(
                f"UPDATE batches SET status = ?, {status}_at = ?, total = (SELECT count(*) FROM lines WHERE batch_id"
                " = id), failed = failed + ?, output_file_id = ?, error_file_id = ?, webhook_due_s = ? WHERE id = ?",
                *(status, int(now_s), len(left), made[1], made[0], now_s, batch_id),
            )

    def _output_file(self, batch: Batch, ok: int) -> str | None:
        query = "SELECT count(*), total(length(result) + 1) FROM lines WHERE batch_id = ? AND ok = ?"
        [(lines, size)] = self._execute(query, batch.id, ok)
        filename = f"{batch.id}_{'output' if ok else 'error'}.jsonl"
        return self._new_file(batch.tenant, filename, int(size), batch.id, ok) if lines else None

    def delete_expired(self) -> None:
        """Delete expired files and batches, and uploads abandoned for a day."""
        now_s = self._clock()
        with self._transaction():
            gone = self._execute(
                "SELECT id FROM files WHERE (expires_at <= ? OR (whole = 0 AND created_at <= ?)) AND id NOT IN"
                " (SELECT input_file_id FROM batches WHERE status = 'validating') LIMIT 100",
                *(now_s, now_s - 86_400),
            )
            for (file_id,) in gone:
                self._drop_file(file_id)
            old = self._execute(
                f"SELECT id FROM batches WHERE created_at <= ? AND NOT {_IS_UNFINISHED} AND webhook_due_s IS NULL"
                " AND id NOT IN (SELECT batch_id FROM files WHERE batch_id IS NOT NULL) LIMIT 100",
                now_s - self.limits.keep_s,
            )
            for (batch_id,) in old:
                self._execute("DELETE FROM lines WHERE batch_id = ?", batch_id)
                self._execute("DELETE FROM batches WHERE id = ?", batch_id)

    def backlog(self) -> tuple[dict[str, int], int]:
        """Return the number of batches in each unfinished status, and of their lines without a result."""
        counts = "SELECT status, count(*), total(total - completed - failed) FROM batches"
        rows = self._execute(f"{counts} WHERE {_IS_UNFINISHED} GROUP BY status")
        return {status: count for status, count, _ in rows}, int(sum(left for *_, left in rows))

    # Webhooks.

    def due_webhooks(self) -> list[Batch]:
        """Return ended batches whose webhook is due."""
        with self._transaction():
            unset = "UPDATE batches SET webhook_due_s = NULL WHERE webhook_due_s IS NOT NULL AND webhook_url = ''"
            self._execute(unset)
            return self._batches("WHERE webhook_due_s <= ? ORDER BY webhook_due_s LIMIT 16", self._clock())

    def webhook_called(self, batch_id: str, again_in_s: float | None) -> None:
        """Count an attempt; the next is due in ``again_in_s``, None for never."""
        due_s = None if again_in_s is None else self._clock() + again_in_s
        counted = "UPDATE batches SET webhook_attempts = webhook_attempts + 1, webhook_due_s = ? WHERE id = ?"
        self._execute(counted, due_s, batch_id)

    def _new_file(self, tenant: str, filename: str, size: int, *result: object) -> str:
        """result: batch_id and ok of a file of results, which is whole at once; none for an upload."""
        file_id, now_s = "file-" + secrets.token_hex(12), int(self._clock())
        values = (file_id, tenant, filename, OUTPUT_PURPOSE if result else PURPOSE, size, now_s)
        self._execute(
            f"INSERT INTO files ({_FILE}, whole) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *(*values, now_s + int(self.limits.keep_s), *(result or (None, None)), bool(result)),
        )
        return file_id

    def _batches(self, which: str, *values: object) -> list[Batch]:
        """which: WHERE, ORDER BY and LIMIT of the query."""
        found = []
        for row in self._execute(f"SELECT {_BATCH} FROM batches {which}", *values):
            columns = dict(zip(_BATCH.split(", "), row, strict=True))
            found.append(Batch(**columns | {name: json.loads(columns[name]) for name in ("metadata", "errors")}))
        return found

    def _drop_file(self, file_id: str) -> None:
        [shown] = self._execute("SELECT batch_id, ok FROM files WHERE id = ?", file_id)
        if shown[0] is not None:
            self._execute("DELETE FROM lines WHERE batch_id = ? AND ok = ?", *shown)
        self._execute("DELETE FROM parts WHERE file_id = ?", file_id)
        self._execute("DELETE FROM files WHERE id = ?", file_id)

    def _advance(self, batch_id: str, before: str, status: str, also: str = "", *values: object) -> None:
        """Change the status of a batch that still has the status ``before``. also: further assignments, in SQL."""
        query = f"UPDATE batches SET status = ?, {status}_at = ?{also} WHERE id = ? AND status = ?"
        self._execute(query, status, int(self._clock()), *values, batch_id, before)
