"""What the database promises: one result for a line, counts that agree with it, tenants that see their own."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import InvalidArgument, NotFound, Overloaded, Unavailable
from contract.generation import Usage
from gateway.batch.store import Batch, BatchLimits, BatchStore, FileTooLarge, Line


def uploaded(store: BatchStore, data: bytes = b"{}\n", tenant: str = "a") -> str:
    file_id = store.open_file(tenant, "in.jsonl")
    store.append(file_id, 0, data)
    return store.close_file(tenant, file_id).id


def created(store: BatchStore, tenant: str = "a", **more: object) -> Batch:
    expected = {
        "endpoint": "/v1/completions",
        "input_file_id": uploaded(store, tenant=tenant),
        "completion_window": "24h",
        "window_s": 86_400.0,
        "metadata": {"k": "ü"},
    }
    return store.create_batch(tenant, "", **{**expected, **more})


def begun(store: BatchStore, count: int, **more: object) -> tuple[Batch, list[Line]]:
    batch = created(store, **more)
    store.add_lines(batch.id, [Line(batch.id, n, f"line-{n}", b"{}") for n in range(count)])
    store.begin(batch.id)
    return batch, store.pending(batch.id, -1, count)


def unserved(line: Line) -> bytes:
    return b"unserved " + line.custom_id.encode()


def read(store: BatchStore, file_id: str | None, tenant: str = "a") -> list[bytes]:
    return b"".join(store.content(tenant, file_id)).splitlines() if file_id else []


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=40), st.integers(0, 40))
@settings(max_examples=30, deadline=None)
def test_every_line_has_one_result_whatever_comes_twice_and_when_it_reopens(tmp_path_factory, finishes, reopen_at):
    path = tmp_path_factory.mktemp("db") / "b"
    store = BatchStore(path)
    batch, lines = begun(store, 10)
    first: dict[int, bool] = {}
    for step, (number, ok) in enumerate(finishes):
        if step == reopen_at:
            store.close()
            store = BatchStore(path)
        fresh = store.finish_line(lines[number], ok, b"result of try %d" % step, Usage(1, 2))
        assert fresh is (number not in first)
        first.setdefault(number, ok)
        now = store.batch("a", batch.id)
        assert (now.completed, now.failed) == (sum(first.values()), len(first) - sum(first.values()))
        assert (now.input_tokens, now.output_tokens) == (len(first), 2 * len(first))
        assert [line.number for line in store.pending(batch.id, -1, 99)] == sorted(set(range(10)) - first.keys())
    store.end(batch.id, "cancelled", unserved)
    over = store.batch("a", batch.id)
    assert over.total == over.completed + over.failed == 10
    assert len(read(store, over.output_file_id)) == over.completed
    assert len(read(store, over.error_file_id)) == over.failed
    assert store.file("a", over.error_file_id).bytes == len(b"".join(store.content("a", over.error_file_id))) or (
        over.error_file_id is None
    )
    store.end(batch.id, "completed", unserved)
    assert store.batch("a", batch.id) == over
    store.close()


def test_lines_finished_from_many_threads_are_counted_once(tmp_path: Path):
    store = BatchStore(tmp_path / "b")
    batch, lines = begun(store, 20)
    fresh: list[int] = []

    def finish() -> None:
        fresh.extend(line.number for line in lines if store.finish_line(line, True, b"{}"))

    threads = [threading.Thread(target=finish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(fresh) == list(range(20)) and store.batch("a", batch.id).completed == 20


def test_two_processes_may_open_one_database(tmp_path: Path):
    one, other = BatchStore(tmp_path / "b"), BatchStore(tmp_path / "b")
    batch = created(one)
    assert other.batch("a", batch.id).metadata == {"k": "ü"}
    assert other.cancel("a", batch.id).status == one.batch("a", batch.id).status == "cancelling"


def test_tenants_see_their_own_only(tmp_path: Path):
    store = BatchStore(tmp_path / "b")
    batch = created(store)
    for look in (
        lambda: store.file("b", batch.input_file_id),
        lambda: store.content("b", batch.input_file_id),
        lambda: store.delete_file("b", batch.input_file_id),
        lambda: store.batch("b", batch.id),
        lambda: store.cancel("b", batch.id),
        lambda: store.batches("b", 10, batch.id),
        lambda: store.files("b", 10, batch.input_file_id),
        lambda: created(store, "b", input_file_id=batch.input_file_id),
    ):
        with pytest.raises(NotFound, match="no such"):
            look()
    assert store.files("b", 10)[0] == [store.file("b", store.files("b", 10)[0][0].id)]
    assert store.batches("b", 10) == ([], False)


def test_bounds_are_held_and_named(tmp_path: Path):
    store = BatchStore(tmp_path / "b", BatchLimits(max_file_bytes=10, max_files=2, max_bytes=15, max_batches=1))
    file_id = store.open_file("a", "x")
    store.append(file_id, 0, b"x" * 10)
    with pytest.raises(FileTooLarge, match="at most 10 bytes"):
        store.append(file_id, 1, b"x")
    with pytest.raises(NotFound):
        store.file("a", file_id)  # not before it is whole
    store.abandon_file(file_id)
    created(store)
    with pytest.raises(Overloaded, match="1/1 batches are unfinished"):
        created(store)
    with pytest.raises(InvalidArgument, match="2/2 files are stored"):
        uploaded(store)
    store.delete_file("a", store.files("a", 9, oldest_first=False)[0][0].id)
    uploaded(store, b"x" * 10)
    full = BatchStore(tmp_path / "c", BatchLimits(max_bytes=15))
    uploaded(full, b"x" * 15)
    with pytest.raises(InvalidArgument, match="15/15 bytes are stored"):
        uploaded(full)


def test_uploads_at_once_stay_within_the_bytes_of_their_tenant(tmp_path: Path):
    store = BatchStore(tmp_path / "b", BatchLimits(max_file_bytes=12, max_bytes=15))
    first, second, other = (store.open_file(tenant, "x") for tenant in ("a", "a", "b"))
    store.append(first, 0, b"x" * 4)
    store.append(second, 0, b"x" * 6)
    with pytest.raises(InvalidArgument, match="^file: must be at most 9 bytes, as 6/15 bytes are stored; delete files"):
        store.append(first, 1, b"x" * 6)
    store.append(first, 1, b"x" * 5)
    store.append(other, 0, b"x" * 12)
    assert [store.close_file("a", file_id).bytes for file_id in (first, second)] == [9, 6]


def test_a_file_that_is_being_read_stays_and_an_output_is_no_input(tmp_path: Path):
    store = BatchStore(tmp_path / "b")
    batch = created(store)
    with pytest.raises(InvalidArgument, match="still reads it"):
        store.delete_file("a", batch.input_file_id)
    store.add_lines(batch.id, [Line(batch.id, 0, "x", b"{}")])
    store.begin(batch.id)
    store.delete_file("a", batch.input_file_id)
    store.end(batch.id, "expired", unserved)
    over = store.batch("a", batch.id)
    assert over.status == "expired" and over.expired_at and read(store, over.error_file_id) == [b"unserved x"]
    with pytest.raises(InvalidArgument, match="purpose batch"):
        created(store, input_file_id=over.error_file_id)
    store.delete_file("a", over.error_file_id)
    with pytest.raises(NotFound):
        store.file("a", over.error_file_id)


def test_a_validation_that_was_overtaken_adds_nothing(tmp_path: Path):
    store = BatchStore(tmp_path / "b")
    batch = created(store)
    store.cancel("a", batch.id)
    store.add_lines(batch.id, [Line(batch.id, 0, "x", b"{}")])
    store.begin(batch.id)
    store.end(batch.id, "cancelled", unserved)
    over = store.batch("a", batch.id)
    assert (over.status, over.total, over.output_file_id, over.error_file_id) == ("cancelled", 0, None, None)
    with pytest.raises(InvalidArgument, match="is cancelled"):
        store.cancel("a", batch.id)


def test_a_second_validation_of_a_batch_that_runs_leaves_its_lines(tmp_path: Path):
    store = BatchStore(tmp_path / "b")
    batch, lines = begun(store, 3)
    store.forget_lines(batch.id)
    store.fail(batch.id, [{"code": "input_file_missing"}])
    assert store.pending(batch.id, -1, 9) == lines
    assert store.batch("a", batch.id).status == "in_progress"


def test_what_was_kept_long_enough_goes(tmp_path: Path, clock):
    store = BatchStore(tmp_path / "b", BatchLimits(keep_s=1e6), clock)
    batch, [line] = begun(store, 1)
    store.finish_line(line, True, b"{}")
    store.end(batch.id, "completed", unserved)
    left_behind = store.open_file("a", "never whole")
    store.append(left_behind, 0, b"x")
    clock.advance(9e5)
    store.delete_expired()
    assert read(store, store.batch("a", batch.id).output_file_id) == [b"{}"]
    assert store.due_webhooks() == []  # it has none, and is then waited for no longer
    clock.advance(2e5)
    for _ in range(2):
        store.delete_expired()
    assert store.batches("a", 9) == ([], False) and store.files("a", 9) == ([], False)
    with sqlite3.connect(tmp_path / "b") as db:
        assert [db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("files", "parts", "lines")] == (
            [0, 0, 0]
        )


def test_a_database_of_before_reasoning_was_counted_goes_on(tmp_path: Path):
    store = BatchStore(tmp_path / "b")
    batch, [line] = begun(store, 1)
    store.close()
    with sqlite3.connect(tmp_path / "b") as db:
        db.execute("ALTER TABLE batches DROP COLUMN reasoning_tokens")
    store = BatchStore(tmp_path / "b")
    assert store.finish_line(line, True, b"{}", Usage(5, 4, 1, 3))
    found = store.batch("a", batch.id)
    assert (found.input_tokens, found.cached_tokens, found.output_tokens, found.reasoning_tokens) == (5, 1, 4, 3)


def test_a_database_that_cannot_be_used_is_named(tmp_path: Path):
    (tmp_path / "text").write_text("this is no database, and long enough to be looked at as one")
    with pytest.raises(InvalidArgument, match="text: must be usable"):
        BatchStore(tmp_path / "text")
    with pytest.raises(InvalidArgument, match="must be usable"):
        BatchStore(tmp_path / "text" / "below")
    with sqlite3.connect(tmp_path / "later") as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(InvalidArgument, match="got version 99"):
        BatchStore(tmp_path / "later")
    store = BatchStore(tmp_path / "b")
    store.close()
    with pytest.raises(Unavailable, match="batch database failed"):
        store.unfinished()
