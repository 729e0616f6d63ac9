"""Stored responses, their items and the conversations they make, in one SQLite database or in memory.

A tenant sees its own. A response expires ``response_keep_s`` after it, or the last one that continues it, was stored;
beyond the bounds of a tenant those used longest ago go first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from contract.errors import InvalidArgument, NotFound
from gateway.config.settings import Settings
from gateway.database import Database

_VERSION = 1
_SCHEMA = """
CREATE TABLE responses (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, id TEXT NOT NULL, previous INTEGER,
    expires_s REAL NOT NULL, bytes INTEGER NOT NULL, body BLOB NOT NULL, UNIQUE (tenant, id));
CREATE INDEX responses_by_age ON responses (tenant, expires_s, sequence, bytes);
CREATE INDEX responses_by_expiry ON responses (expires_s);
CREATE TABLE items (
    response INTEGER NOT NULL REFERENCES responses ON DELETE CASCADE, number INTEGER NOT NULL, id TEXT NOT NULL,
    output INTEGER NOT NULL, body BLOB NOT NULL, PRIMARY KEY (response, number)) WITHOUT ROWID;
CREATE INDEX items_by_id ON items (id);
"""
# The response :id of :tenant, and those that it continues.
_CHAIN = """
WITH RECURSIVE chain (sequence, previous, bytes, depth) AS (
    SELECT sequence, previous, bytes, 0 FROM responses WHERE tenant = :tenant AND id = :id AND expires_s > :now
    UNION ALL SELECT one.sequence, one.previous, one.bytes, depth + 1
    FROM responses AS one JOIN chain ON one.sequence = chain.previous)
"""


class ResponseStore(Database):
    """Every method is one transaction and blocks. clock: Unix seconds."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        super().__init__(settings.response_db, "response database", _SCHEMA, _VERSION)
        self._settings, self._clock = settings, clock

    def put(self, tenant: str, inputs: Sequence[Mapping[str, Any]], response: Mapping[str, Any]) -> None:
        """Store a response that has ended, once. inputs: its request's own items, without those before."""
        body = orjson.dumps(response)
        items = [(one["id"], 0, orjson.dumps(one)) for one in inputs]
        items += [(one["id"], 1, orjson.dumps(one)) for one in response["output"]]
        size, now_s = len(body) + sum(len(data) for *_, data in items), self._clock()
        expires_s = now_s + self._settings.response_keep_s
        named = {"tenant": tenant, "id": response["previous_response_id"], "now": now_s, "expires": expires_s}
        with self._transaction() as db:
            found = db.execute(f"{_CHAIN} SELECT sequence FROM chain WHERE depth = 0", named).fetchone()
            # One that was deleted meanwhile keeps a place that never fits: the conversation cannot go on.
            previous = found[0] if found else -1 if named["id"] else None
            added = db.execute(
                "INSERT OR IGNORE INTO responses (tenant, id, previous, expires_s, bytes, body)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (tenant, response["id"], previous, expires_s, size, body),
            )
            if not added.rowcount:
                return
            rows = ((added.lastrowid, number, *item) for number, item in enumerate(items))
            db.executemany("INSERT INTO items (response, number, id, output, body) VALUES (?, ?, ?, ?, ?)", rows)
            renewed = "UPDATE responses SET expires_s = :expires WHERE sequence IN (SELECT sequence FROM chain)"
            db.execute(f"{_CHAIN} {renewed}", named)
            db.execute("DELETE FROM responses WHERE expires_s <= ?", (now_s,))
            [(count, used)] = self._execute("SELECT count(*), total(bytes) FROM responses WHERE tenant = ?", tenant)
            oldest = db.execute(
                "SELECT sequence, bytes FROM responses WHERE tenant = ? AND sequence < ? ORDER BY expires_s, sequence",
                (tenant, added.lastrowid),
            )
            gone = []
            while count > self._settings.response_max or used > self._settings.response_max_bytes:
                row = oldest.fetchone()
                if row is None:  # the new one alone is larger: it stays until the next
                    break
                gone.append(row[:1])
                count, used = count - 1, used - row[1]
            db.executemany("DELETE FROM responses WHERE sequence = ?", gone)

    def get(self, tenant: str, response_id: str) -> bytes:
        """Return the JSON of a response. Raises: NotFound."""
        where = "WHERE tenant = ? AND id = ? AND expires_s > ?"
        rows = self._execute(f"SELECT body FROM responses {where}", tenant, response_id, self._clock())
        if not rows:
            raise _not_found(response_id)
        return bytes(rows[0][0])

    def delete(self, tenant: str, response_id: str) -> None:
        """Delete a response and its items. What continues it can be read, and not continued. Raises: NotFound."""
        with self._transaction():
            self.get(tenant, response_id)
            self._execute("DELETE FROM responses WHERE tenant = ? AND id = ?", tenant, response_id)

    def conversation(self, tenant: str, response_id: str) -> list[dict[str, Any]]:
        """Return the items of a response and all before it. Raises: InvalidArgument: not stored, or too large."""
        most, problem = self._settings.max_body_bytes, ""
        chain, items = self._read(tenant, response_id, f"WHERE (SELECT sum(bytes) FROM chain) <= {most}")
        if not chain:
            problem = f"must be the id of a stored response, got {response_id!r:.100}"
        elif chain[-1][0] is not None:
            problem = f"must be of a whole conversation; a response before {response_id!r:.100} is gone"
        elif sum(size for _, size in chain) > most:
            problem = f"must be of a conversation of at most {most} bytes"
        if problem:
            raise InvalidArgument("previous_response_id", problem)
        return items

    def inputs(self, tenant: str, response_id: str) -> list[dict[str, Any]]:
        """Return the items that a response was made of, in order, as far as they are stored. Raises: NotFound."""
        chain, items = self._read(tenant, response_id, "WHERE depth > 0 OR NOT output")
        if not chain:
            raise _not_found(response_id)
        return items

    def resolved(self, tenant: str, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the items, with stored ones in place of references to them. Raises: InvalidArgument."""
        found, size, most = [], 0, self._settings.max_body_bytes
        query = "SELECT items.body FROM items JOIN responses ON sequence = response WHERE items.id = ? AND tenant = ?"
        with self._transaction():
            for number, item in enumerate(items):
                if item["type"] == "item_reference":
                    rows = self._execute(f"{query} AND expires_s > ? LIMIT 1", item["id"], tenant, self._clock())
                    size += sum(len(body) for (body,) in rows)
                    if not rows or size > most:
                        problem = f"must be of a stored item, of at most {most} bytes together, got {item['id']!r:.100}"
                        raise InvalidArgument(f"input.{number}.id", problem)
                    item = orjson.loads(rows[0][0])
                found.append(item)
        return found

    def _read(self, tenant: str, response_id: str, which: str) -> tuple[list[Any], list[dict[str, Any]]]:
        """Return (previous, bytes) of each response of a conversation, newest first, and its items, oldest first."""
        named = {"tenant": tenant, "id": response_id, "now": self._clock()}
        with self._transaction() as db:
            chain = db.execute(f"{_CHAIN} SELECT previous, bytes FROM chain ORDER BY depth", named).fetchall()
            joined = f"FROM chain JOIN items ON response = sequence {which} ORDER BY depth DESC, number"
            rows = db.execute(f"{_CHAIN} SELECT body {joined}", named).fetchall()
        return chain, [orjson.loads(row[0]) for row in rows]


def _not_found(response_id: str) -> NotFound:
    return NotFound(f"no such response: {response_id!r:.100}")
