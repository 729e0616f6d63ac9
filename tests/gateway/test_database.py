"""A database opens, refuses what it cannot use, and reports SQLite's errors."""

from __future__ import annotations

import sqlite3
from functools import partial
from pathlib import Path

import pytest

from contract.errors import InvalidArgument, Unavailable
from gateway.database import Database

SCHEMA = "CREATE TABLE one (id INTEGER PRIMARY KEY);"


def test_what_was_committed_is_there_after_a_restart_and_a_failed_transaction_is_not(tmp_path: Path) -> None:
    database = Database(tmp_path / "deep" / "db", "test database", SCHEMA, 1)
    with database._transaction() as db:
        db.execute("INSERT INTO one VALUES (1)")
    assert all(file.stat().st_mode & 0o077 == 0 for file in (tmp_path / "deep").iterdir())
    with pytest.raises(Unavailable, match="the test database failed"), database._transaction() as db:
        db.execute("INSERT INTO one VALUES (2)")
        db.execute("INSERT INTO one VALUES (1)")
    database.close()
    with pytest.raises(Unavailable), database._transaction():
        pass
    database = Database(tmp_path / "deep" / "db", "test database", SCHEMA, 1)
    with database._transaction() as db:
        assert db.execute("SELECT id FROM one").fetchall() == [(1,)]
    database.close()


def test_a_transaction_inside_another_is_a_part_of_it() -> None:
    database = Database(None, "test database", SCHEMA, 1)
    with pytest.raises(Unavailable), database._transaction():
        with database._transaction():
            database._execute("INSERT INTO one VALUES (?)", 1)
        database._execute("INSERT INTO one VALUES (?)", 1)
    assert database._execute("SELECT * FROM one") == []
    database.close()


def test_a_database_of_another_version_or_a_path_of_none_is_refused(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "db")
    db.execute("PRAGMA user_version = 2")
    db.close()
    with pytest.raises(InvalidArgument, match="must be a database of version 1, got version 2"):
        Database(tmp_path / "db", "test database", SCHEMA, 1)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidArgument, match="must be usable as the test database"):
        Database(tmp_path / "file" / "db", "test database", SCHEMA, 1)


def test_without_a_path_it_is_in_memory() -> None:
    database = Database(None, "test database", SCHEMA, 1)
    with database._transaction() as db:
        assert db.execute("SELECT count(*) FROM one").fetchone() == (0,)
    database.close()


def test_a_new_database_that_others_make_at_once_is_tried_again(tmp_path: Path, monkeypatch) -> None:
    refusals = ["database is locked"] * 2

    class Contended(sqlite3.Connection):
        """Refuses the journal mode at once, as SQLite does where several connections change it."""

        def execute(self, sql, *values):
            if "journal_mode" in sql and refusals:
                raise sqlite3.OperationalError(refusals.pop())
            return super().execute(sql, *values)

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Contended))
    Database(tmp_path / "db", "test database", SCHEMA, 1).close()
    assert not refusals
    refusals.append("disk I/O error")
    with pytest.raises(InvalidArgument, match="disk I/O error"):
        Database(tmp_path / "other", "test database", SCHEMA, 1)
