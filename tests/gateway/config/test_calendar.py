"""Days and months are those of a time zone, however long they are, and every moment is in exactly one."""

from __future__ import annotations

import datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.calendar import check_zone, period_at

ZONES = [
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "Asia/Kolkata",
    "Australia/Lord_Howe",
    "Africa/Cairo",
    "America/Sao_Paulo",
]


def at(text: str, zone: str = "UTC") -> float:
    return datetime.datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


@pytest.mark.parametrize(
    ("zone", "moment", "day", "hours"),
    [
        ("Europe/Berlin", "2026-03-29T12:00", "2026-03-29", 23),
        ("Europe/Berlin", "2026-10-25T02:30", "2026-10-25", 25),
        ("Australia/Lord_Howe", "2026-10-04T12:00", "2026-10-04", 23.5),
        ("Africa/Cairo", "2026-04-24T01:00", "2026-04-24", 23),  # midnight does not exist
        ("UTC", "2028-02-29T23:59", "2028-02-29", 24),
        ("Pacific/Apia", "2011-12-31T00:00", "2011-12-31", 24),  # the 30th did not exist
    ],
)
def test_a_day_has_as_many_hours_as_its_clocks_show(zone: str, moment: str, day: str, hours: float) -> None:
    found = period_at("day", zone, at(moment, zone))
    assert (found.name, (found.end_s - found.start_s) / 3600) == (day, hours)


@pytest.mark.parametrize(
    ("moment", "days"), [("2026-02-11", 28), ("2028-02-29", 29), ("2026-04-30", 30), ("2026-12-31", 31)]
)
def test_a_month_has_28_to_31_days(moment: str, days: int) -> None:
    found = period_at("month", "UTC", at(f"{moment}T23:59:59"))
    assert (found.name, (found.end_s - found.start_s) / 86_400) == (moment[:7], days)


def test_a_moment_is_in_another_day_elsewhere() -> None:
    moment = at("2026-11-30T23:30")
    assert period_at("day", "Europe/Berlin", moment).name == "2026-12-01"
    assert period_at("month", "Europe/Berlin", moment).name == "2026-12"
    assert period_at("month", "America/New_York", moment).name == "2026-11"


def test_a_date_that_comes_twice_is_one_day() -> None:
    """Until 2011 the clocks of St. John's went back over midnight, at 0:01."""
    zone, first = "America/St_Johns", at("2010-11-07T00:00:30", "America/St_Johns")
    names = [period_at("day", zone, first + minutes * 60).name for minutes in (-2, 0, 30, 90)]
    assert names == ["2010-11-06", "2010-11-07", "2010-11-07", "2010-11-07"]


@given(st.integers(0, 4_000_000_000), st.sampled_from(ZONES), st.sampled_from(["day", "month"]))
def test_every_moment_is_in_one_period_and_the_next_begins_where_it_ends(moment: int, zone: str, length: str) -> None:
    found = period_at(length, zone, moment)
    assert found.start_s <= moment < found.end_s
    after, before = period_at(length, zone, found.end_s), period_at(length, zone, found.start_s - 1)
    assert after.start_s == found.end_s and before.end_s == found.start_s
    assert before.name < found.name < after.name


@pytest.mark.parametrize("name", ["Berlin", "", "../etc/passwd", "Europe", 3, "/etc/localtime"])
def test_what_is_no_zone_is_refused(name: object) -> None:
    with pytest.raises(ValueError, match="must be an IANA time zone"):
        check_zone(name)
