"""Reports group by the hours and days of a time zone, add up databases, and are safe to open in a spreadsheet."""

from __future__ import annotations

import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from contract.errors import InvalidArgument
from gateway.usage import report
from gateway.usage.store import Filter, UsageStore
from tests.gateway.usage.test_store import record

BERLIN = "Europe/Berlin"


def at(text: str, zone: str = BERLIN) -> float:
    return datetime.datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    database = UsageStore(tmp_path / "usage", 36_500, 36_500)
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


def test_days_and_hours_are_those_of_the_zone(path: Path) -> None:
    about = Filter(at("2026-10-24T00:00"), at("2026-10-27T00:00"))
    days = [(row["day"], row["requests"]) for row in report.sums(path, about, ("day",), BERLIN)]
    assert days == [("2026-10-24", 1), ("2026-10-25", 4), ("2026-10-26", 1)]
    hours = [row["hour"] for row in report.sums(path, about, ("hour",), BERLIN)]
    assert hours[2:4] == ["2026-10-25T02:00:00+01:00", "2026-10-25T02:00:00+02:00"]
    in_india = report.sums(path, about, ("hour",), "Asia/Kolkata")
    assert in_india[0]["hour"] == "2026-10-25T03:00:00+05:30" and sum(row["requests"] for row in in_india) == 6
    (month,) = report.sums(path, about, ("month", "org"), BERLIN)
    assert (month["month"], month["org"], month["requests"]) == ("2026-10", "acme", 6)


def test_a_day_that_is_asked_for_has_its_25_hours(path: Path) -> None:
    given = {"from": "2026-10-25", "to": "2026-10-26"}
    about = report.filter_of(given, "", BERLIN, 0.0)
    assert about.to_s - about.from_s == 25 * 3600
    (row,) = report.sums(path, about, (), BERLIN)
    assert row["requests"] == 4
    (row,) = report.sums(path, about._replace(model="other"), (), BERLIN)
    assert row["requests"] == 0


def test_times_are_read_with_and_without_an_offset() -> None:
    assert report.time_of("to", "2026-10-25T10:00:00Z", BERLIN) == at("2026-10-25T11:00:00")
    assert report.time_of("to", "2026-10-25T10:00:00 01:00", "UTC") == at("2026-10-25T10:00:00")
    assert report.time_of("to", "2026-10-25T10:00", BERLIN) == at("2026-10-25T10:00:00")
    for wrong in ("", "2026-02-30", "now", "2026-10-25T25:00"):
        with pytest.raises(InvalidArgument, match="to: must be a date"):
            report.time_of("to", wrong, BERLIN)


def test_by_default_a_report_is_of_the_month_so_far() -> None:
    about = report.filter_of({}, "acme", BERLIN, at("2026-11-23T10:07"))
    assert (about.from_s, about.to_s, about.level) == (at("2026-11-01T00:00"), at("2026-11-23T10:15"), "acme")


def test_databases_are_added_up(path: Path) -> None:
    about = Filter(at("2026-10-24T00:00"), at("2026-10-27T00:00"))
    once = report.sums(path, about, ("day",), BERLIN)
    twice = report.added([once, once])
    assert [row["requests"] for row in twice] == [2 * row["requests"] for row in once]
    assert report.with_cost(twice)[0]["cost"] == "0.000042"


def test_a_spreadsheet_runs_nothing() -> None:
    rows = [{"request_id": "=cmd()", "micros": -1}, {"request_id": 'a,"b"', "micros": 2}]
    assert report.as_csv(rows, ("request_id", "micros")) == 'request_id,micros\r\n\'=cmd(),-1\r\n"a,""b""",2\r\n'
