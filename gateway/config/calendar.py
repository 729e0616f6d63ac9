"""Days and months of a time zone, as spans of Unix time. A day may have 23 or 25 hours, a month 28 to 31 days."""

from __future__ import annotations

import datetime
from typing import Literal, NamedTuple
from zoneinfo import ZoneInfo

Length = Literal["day", "month"]


class Period(NamedTuple):
    """name: ``2026-11-23`` or ``2026-11``. start_s, end_s: Unix time; the end belongs to the next one."""

    name: str
    start_s: float
    end_s: float


def check_zone(name: object) -> str:
    """Return the name of a time zone. Raises ValueError with what is allowed."""
    try:
        if isinstance(name, str) and name:
            return ZoneInfo(name).key
    except (OSError, ValueError, KeyError):  # of a folder, of a name that is a path, of one that is not known
        pass
    raise ValueError(f"must be an IANA time zone such as Europe/Berlin, got {name!r:.100}")


_latest: dict[tuple[Length, str], Period] = {}


def period_at(length: Length, zone: str, at_s: float) -> Period:
    """Return the day or month of a time zone that contains a time."""
    found = _latest.get((length, zone))
    if found is None or not found.start_s <= at_s < found.end_s:
        date = datetime.datetime.fromtimestamp(at_s, ZoneInfo(zone)).date()
        found = _period(length, zone, date.replace(day=1) if length == "month" else date)
        if at_s >= found.end_s:  # clocks that go back over midnight show yesterday's date once more
            found = _period(length, zone, _after(length, date))
        _latest[length, zone] = found
    return found


def _period(length: Length, zone: str, first: datetime.date) -> Period:
    start_s, end_s = (midnight_s(date, zone) for date in (first, _after(length, first)))
    return Period(first.isoformat()[: 7 if length == "month" else 10], start_s, end_s)


def _after(length: Length, date: datetime.date) -> datetime.date:
    if length == "day":
        return date + datetime.timedelta(days=1)
    return (date.replace(day=1) + datetime.timedelta(days=31)).replace(day=1)


def midnight_s(date: datetime.date, zone: str) -> float:
    """Return when a date begins; where clocks skip midnight, when they do, and where it comes twice, the first."""
    return datetime.datetime(date.year, date.month, date.day, tzinfo=ZoneInfo(zone)).timestamp()
