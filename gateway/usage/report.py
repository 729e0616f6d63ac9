"""Reports of a usage database: sums by time, tenant, model and endpoint, and the records behind them."""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from contract.errors import InvalidArgument
from gateway.config.calendar import check_zone, midnight_s, period_at
from gateway.usage import store
from gateway.usage.store import QUARTER_S, SUMS, Filter, UsageRecord

TIMES = ("hour", "day", "month")
LEVELS = ("org", "team", "key")
GROUPS = (*TIMES, *LEVELS, "model", "endpoint")
MOST_ROWS = 10_000
MOST_RECORDS = 1000
PARAMETERS = ("from", "to", "tenant", "model", "endpoint", "time_zone", "format")


def time_of(name: str, text: str, zone: str) -> float:
    """Return the Unix time of a date, or of a date with a time; without an offset in a time zone. Raises
    InvalidArgument."""
    try:
        if len(text) == 10:
            return midnight_s(datetime.date.fromisoformat(text), zone)
        # Python 3.10 reads no Z; in a query a + that is not escaped arrives as a blank.
        found = datetime.datetime.fromisoformat(text.replace("Z", "+00:00").replace(" ", "+"))
        return (found if found.tzinfo else found.replace(tzinfo=ZoneInfo(zone))).timestamp()
    except (ValueError, OverflowError):
        allowed = "a date such as 2026-11-23 or a time such as 2026-11-23T10:00:00+01:00"
        raise InvalidArgument(name, f"must be {allowed}, got {text!r:.80}") from None


def zone_of(given: Mapping[str, str], default: str) -> str:
    """Return the time zone of a query. Raises InvalidArgument."""
    try:
        return check_zone(given.get("time_zone", default))
    except ValueError as exc:
        raise InvalidArgument("time_zone", str(exc)) from None


def filter_of(given: Mapping[str, str], level: str, zone: str, now_s: float) -> Filter:
    """Return the filter of a query: by default of the month so far. Raises InvalidArgument."""
    from_s = time_of("from", given["from"], zone) if "from" in given else period_at("month", zone, now_s).start_s
    to_s = time_of("to", given["to"], zone) if "to" in given else (now_s // QUARTER_S + 1) * QUARTER_S
    if to_s < from_s:
        raise InvalidArgument("to", f"must not be before from, got {given.get('to')!r}")
    return Filter(from_s, to_s, level, given.get("model", ""), given.get("endpoint", ""), given.get("request_id", ""))


def groups_of(text: str) -> tuple[str, ...]:
    """Return what sums are grouped by. Raises InvalidArgument."""
    found = tuple(part.strip() for part in text.split(",")) if text else ()
    for name in found:
        if name not in GROUPS:
            raise InvalidArgument("group_by", f"must be some of {', '.join(GROUPS)}, got {name!r:.80}")
    return tuple(name for name in GROUPS if name in found)


def sums(path: Path, about: Filter, groups: Sequence[str], zone: str) -> list[dict[str, Any]]:
    """Return a row for each group with requests, in order; without groups one row. Blocks.

    Raises: InvalidArgument for times between quarters of an hour, and for too many rows.
    """
    for name, at_s in (("from", about.from_s), ("to", about.to_s)):
        if at_s % QUARTER_S:
            raise InvalidArgument(name, "must be a quarter of an hour; /v1/usage/requests has any time")
    columns = ["start_s"] if set(groups) & set(TIMES) else []
    columns += ["key"] if set(groups) & set(LEVELS) else []
    columns += [name for name in ("model", "endpoint") if name in groups]
    found: dict[tuple[str, ...], list[int]] = {}
    with store.reading(path) as db:
        for row in store.sums(db, about, columns):
            named = dict(zip(columns, row, strict=False))
            place = tuple(_group(name, named, zone) for name in groups)
            total = found.setdefault(place, [0] * len(SUMS))
            for number, value in enumerate(row[len(columns) :]):
                total[number] += value or 0
            if len(found) > MOST_ROWS:
                raise InvalidArgument("group_by", f"must give at most {MOST_ROWS} rows; ask for less time, or fewer")
    return [dict(zip((*groups, *SUMS), (*place, *total), strict=True)) for place, total in sorted(found.items())]


def _group(name: str, row: Mapping[str, Any], zone: str) -> str:
    if name == "hour":
        hour = datetime.datetime.fromtimestamp(row["start_s"], ZoneInfo(zone)).replace(minute=0, second=0)
        return hour.isoformat()
    if name in ("day", "month"):
        return period_at("day" if name == "day" else "month", zone, row["start_s"]).name
    if name in LEVELS:
        return "/".join(row["key"].split("/")[: LEVELS.index(name) + 1])
    return str(row[name])


def requests(path: Path, about: Filter, after: int, most: int, zone: str) -> list[dict[str, Any]]:
    """Return the records of ended requests in the order of their writing, behind number ``after``. Blocks."""
    with store.reading(path) as db:
        return [{"number": number, **_fields(one, zone)} for number, one in store.records(db, about, after, most)]


def _fields(record: UsageRecord, zone: str) -> dict[str, Any]:
    fields = record._asdict()
    at = datetime.datetime.fromtimestamp(fields.pop("time_s"), ZoneInfo(zone))
    return {"time": at.isoformat(timespec="milliseconds"), **fields}


def with_cost(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with ``cost``, a decimal number as text, behind ``micros``."""
    return [{**row, "cost": f"{row['micros'] // 10**6}.{row['micros'] % 10**6:06d}"} for row in rows]


def added(reports: Iterable[Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the rows of several databases as one report's."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in (row for rows in reports for row in rows):
        place = tuple(value for name, value in row.items() if name not in SUMS)
        known = found.setdefault(place, {**row, **dict.fromkeys(SUMS, 0)})
        known.update({name: known[name] + row[name] for name in SUMS})
    return [found[place] for place in sorted(found)]


def as_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Return rows as CSV with a header. A text that a spreadsheet would run as a formula begins with an apostrophe."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(columns)
    for row in rows:
        values = [row[name] for name in columns]
        writer.writerow([f"'{one}" if isinstance(one, str) and one[:1] in "=+-@\t\r" else one for one in values])
    return text.getvalue()
