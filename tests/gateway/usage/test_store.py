"""Records and their sums agree, retention removes what is old, and what was written outlives the process."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import InvalidArgument, Unavailable
from gateway.config.settings import DAY_S, Settings
from gateway.usage import store
from gateway.usage.store import QUARTER_S, SUMS, Filter, UsageRecord, UsageStore

NOW_S = 2_000_000_000.0
KEYS = ("acme/research/alice", "acme/research/bob", "acme/sales/carol", "acmes/team/dave", "")


def record(at_s: float = NOW_S, key: str = KEYS[0], tokens: int = 3, model: str = "demo") -> UsageRecord:
    return UsageRecord(at_s, f"r{at_s}", key, model, "chat", "engine", tokens, 0, 2 * tokens, 7 * tokens)


def opened(tmp_path: Path, **options: int) -> UsageStore:
    kept = {f"usage_{name}": days for name, days in options.items()}
    return UsageStore(Settings(usage_db=tmp_path / "usage", **kept), lambda: NOW_S)


def everything(path: Path, columns: tuple[str, ...] = (), **about: str) -> list[tuple]:
    summed = [*columns, *(f"SUM({name})" for name in SUMS)]
    rest = f"GROUP BY {', '.join(columns)}" if columns else ""
    return list(store.read(path, "quarters", summed, Filter(0, 2 * NOW_S, **about), rest))


def records(path: Path) -> list[UsageRecord]:
    rows = store.read(path, "requests", UsageRecord._fields, Filter(0, 2 * NOW_S), "ORDER BY id")
    return [UsageRecord(*row) for row in rows]


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 5000), st.sampled_from(KEYS), st.integers(0, 100)), max_size=30))
def test_sums_are_those_of_the_records(tmp_path_factory: pytest.TempPathFactory, drawn: list) -> None:
    database = opened(tmp_path_factory.mktemp("db"))
    added = [record(NOW_S - ago, key, tokens) for ago, key, tokens in drawn]
    for start in range(0, len(added), 4):
        database.add(added[start : start + 4])
    (found,) = everything(database.path)
    expected = [len(added), *(sum(getattr(one, name) for one in added) for name in SUMS[1:])]
    assert [value or 0 for value in found] == expected or (not added and found[0] is None)
    for level in ("acme", "acme/research", KEYS[1], "acm"):
        (found,) = everything(database.path, level=level)
        assert (found[0] or 0) == sum(one.key == level or one.key.startswith(f"{level}/") for one in added)
    assert records(database.path) == added
    database.close()


def test_what_is_old_goes_records_before_their_sums(tmp_path: Path) -> None:
    database = opened(tmp_path, keep_days=1, sums_keep_days=3)
    database.add([record(NOW_S - days * DAY_S) for days in (0, 2, 4)])
    assert len(records(database.path)) == 1
    assert everything(database.path)[0][0] == 2
    database.close()


def test_a_quarter_of_an_hour_is_the_finest_sum(tmp_path: Path) -> None:
    database = opened(tmp_path)
    start = NOW_S // QUARTER_S * QUARTER_S
    database.add([record(start), record(start + QUARTER_S - 0.001), record(start + QUARTER_S)])
    rows = everything(database.path, ("start_s",))
    assert [(row[0], row[1]) for row in rows] == [(start, 2), (start + QUARTER_S, 1)]
    database.close()


def test_budgets_are_read_as_they_were_written_and_one_process_has_them(tmp_path: Path) -> None:
    database = opened(tmp_path)
    database.put_budgets([("a", NOW_S, 5, "{}"), ("b", NOW_S, 6, "{}")])
    database.put_budgets([("a", NOW_S, 7, '{"x": [1, 2]}')])
    assert database.budgets() == {"a": (7.0, '{"x": [1, 2]}'), "b": (6.0, "{}")}
    database.lock()
    with pytest.raises(InvalidArgument, match="is used by another gateway"):
        opened(tmp_path).lock()
    database.close()


def test_a_report_of_what_is_no_database_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database, but long enough to be taken for one" * 50)
    for name in ("text", "none"):
        with pytest.raises(Unavailable, match="cannot be read"):
            everything(tmp_path / name)
