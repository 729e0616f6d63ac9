"""Reports group by the hours and days of a time zone, add up databases, and are safe to open in a spreadsheet."""

from __future__ import annotations

import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from contract.errors import InvalidArgument
from gateway.usage import report
from gateway.usage.report import Report
from tests.gateway.usage.test_store import opened, record

BERLIN = "Europe/Berlin"


def at(text: str, zone: str = BERLIN) -> float:
    return datetime.datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    database = opened(tmp_path, keep_days=36_500, sums_keep_days=36_500)
    moments = [
        "2026-10-24T23:59:59",
        "2026-10-25T00:00:00",
        "2026-10-25T02:30:00",
        "2026-10-25T23:59:59",
        "2026-10-26T00:00:00",
    ]
    database.add([record(at(moment)) for moment in moments])
    database.add([record(at("2026-10-25T02:30:00") + 3600)])  # the same hour of the clock, once more
    database.close()
    return tmp_path / "usage"


def sums(path: Path, *paths: Path, level: str = "", **given: str) -> list[dict]:
    given = {"from": "2026-10-24", "to": "2026-10-27", **given}
    return report.sums([path, *paths], given, level, BERLIN).rows


def test_days_and_hours_are_those_of_the_zone(path: Path) -> None:
    days = [(row["day"], row["requests"]) for row in sums(path, group_by="day")]
    assert days == [("2026-10-24", 1), ("2026-10-25", 4), ("2026-10-26", 1)]
    hours = [row["hour"] for row in sums(path, group_by="hour")]
    assert hours[2:4] == ["2026-10-25T02:00:00+01:00", "2026-10-25T02:00:00+02:00"]
    in_india = sums(path, group_by="hour", time_zone="Asia/Kolkata")
    assert in_india[0]["hour"] == "2026-10-25T03:00:00+05:30" and sum(row["requests"] for row in in_india) == 6
    (month,) = sums(path, group_by="org, month")
    assert list(month)[:2] == ["month", "org"]
    assert (month["month"], month["org"], month["requests"]) == ("2026-10", "acme", 6)


def test_a_day_that_is_asked_for_has_its_25_hours(path: Path) -> None:
    given = {"from": "2026-10-25", "to": "2026-10-26"}
    made = report.sums([path], given, "", BERLIN)
    assert made.more["to_s"] - made.more["from_s"] == 25 * 3600 and made.rows[0]["requests"] == 4
    assert sums(path, **given, model="other")[0]["requests"] == 0
    assert sums(path, **given, level="acme/research")[0]["requests"] == 4
    assert sums(path, **given, level="acme/r")[0]["requests"] == 0


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-10-25T10:00:00Z", "2026-10-25T11:00:00"),
        ("2026-10-25T10:00:00 01:00", "2026-10-25T10:00:00"),
        ("2026-10-25T10:00", "2026-10-25T10:00:00"),
    ],
)
def test_times_are_read_with_and_without_an_offset(path: Path, text: str, moment: str) -> None:
    assert report.sums([path], {"from": text}, "", BERLIN).more["from_s"] == at(moment)


@pytest.mark.parametrize("wrong", ["", "2026-02-30", "now", "2026-10-25T25:00"])
def test_what_is_no_time_is_named(path: Path, wrong: str) -> None:
    with pytest.raises(InvalidArgument, match="to: must be a date"):
        sums(path, to=wrong)


@pytest.mark.parametrize("wrong", ["", "-1", "1.5", "x", "9" * 19, "9" * 5000])
def test_what_is_no_number_of_a_record_is_named(path: Path, wrong: str) -> None:
    for name in ("limit", "after"):
        with pytest.raises(InvalidArgument, match=f"{name}: must be an integer from 0 to"):
            report.requests([path], {name: wrong}, "", BERLIN)


def test_by_default_a_report_is_of_the_month_so_far(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.time, "time", lambda: at("2026-11-23T10:07"))
    more = report.sums([path], {}, "acme", BERLIN).more
    assert (more["from_s"], more["to_s"], more["level"]) == (at("2026-11-01T00:00"), at("2026-11-23T10:15"), "acme")


def test_a_beginning_that_is_not_yet_is_named(path: Path) -> None:
    with pytest.raises(InvalidArgument, match="from: must not be after now where there is no to, got '2999-01-01'"):
        report.sums([path], {"from": "2999-01-01"}, "", BERLIN)


def test_databases_are_added_up(path: Path) -> None:
    once, twice = sums(path, group_by="day"), sums(path, path, group_by="day")
    assert [row["requests"] for row in twice] == [2 * row["requests"] for row in once]
    assert twice[0]["cost"] == "0.000042"


def test_a_report_has_a_bounded_number_of_rows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MOST_ROWS", 2)
    with pytest.raises(InvalidArgument, match="group_by: must give at most 2 rows"):
        sums(path, group_by="day")


def test_a_spreadsheet_runs_nothing() -> None:
    rows = [
        {"request_id": "=cmd()", "micros": -1},
        {"request_id": 'a,"b"', "micros": 2},
        {"request_id": "", "micros": 3},
    ]
    text = Report(rows, ("request_id", "micros"), {}).csv()
    assert text == 'request_id,micros\r\n\'=cmd(),-1\r\n"a,""b""",2\r\n,3\r\n'
