"""Reports of usage databases: sums by time, tenant, model and endpoint, and the records behind them."""

from __future__ import annotations

import csv
import datetime
import io
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from contract.errors import InvalidArgument
from gateway.config.calendar import check_zone, midnight_s, period_at
from gateway.config.rules import integer
from gateway.usage import store
from gateway.usage.store import QUARTER_S, SUMS, Filter, UsageRecord

TIMES = ("hour", "day", "month")
LEVELS = ("org", "team", "key")
GROUPS = (*TIMES, *LEVELS, "model", "endpoint")
FILTERS = ("from", "to", "tenant", "model", "endpoint", "time_zone")
MOST_ROWS = 10_000
_RUN = ("=", "+", "-", "@", "\t", "\r")  # with which a text begins that a spreadsheet would run
MOST_RECORDS = 1000


class Report(NamedTuple):
    """rows: by the names in ``columns``. more: further fields of the whole."""

    rows: list[dict[str, Any]]
    columns: tuple[str, ...]
    more: dict[str, Any]

    def csv(self) -> str:
        """Return it as CSV with a header. A text that a spreadsheet would run begins with an apostrophe."""
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(self.columns)
        for row in self.rows:
            values = [row[name] for name in self.columns]
            writer.writerow([f"'{one}" if isinstance(one, str) and one.startswith(_RUN) else one for one in values])
        return text.getvalue()


def sums(paths: Sequence[Path], given: Mapping[str, str], level: str, zone: str) -> Report:
    """Return a row for each group with requests, in order, of all databases together; blocks.

    given: parameters by FILTERS, and ``group_by``; by default one sum of the month so far. level: "" for all.
    zone: the default of ``time_zone``.
    Raises: InvalidArgument; Unavailable.
    """
    zone, about = _filter(given, level, zone)
    for name, at_s in (("from", about.from_s), ("to", about.to_s)):
        if at_s % QUARTER_S:
            raise InvalidArgument(name, "must be a quarter of an hour; only lists of requests have any time")
    if about.request_id:
        raise InvalidArgument("request_id", "is allowed only for lists of requests")
    named = [part.strip() for part in given.get("group_by", "").split(",") if part]
    for name in named:
        if name not in GROUPS:
            raise InvalidArgument("group_by", f"must be some of {', '.join(GROUPS)}, got {name!r:.80}")
    groups = tuple(name for name in GROUPS if name in named)
    columns = [("start_s", TIMES), ("key", LEVELS), ("model", ("model",)), ("endpoint", ("endpoint",))]
    stored = [column for column, names in columns if set(names) & set(groups)]
    found: dict[tuple[str, ...], list[int]] = {}
    summed = [*stored, *(f"SUM({name})" for name in SUMS)]
    rest = f"GROUP BY {', '.join(stored)}" if stored else ""
    for row in chain.from_iterable(store.read(path, "quarters", summed, about, rest) for path in paths):
        values = dict(zip(stored, row, strict=False))
        total = found.setdefault(tuple(_group(name, values, zone) for name in groups), [0] * len(SUMS))
        total[:] = [had + (more or 0) for had, more in zip(total, row[len(stored) :], strict=True)]
        if len(found) > MOST_ROWS:
            raise InvalidArgument("group_by", f"must give at most {MOST_ROWS} rows: fewer names, or less time")
    rows = [dict(zip((*groups, *SUMS), (*place, *total), strict=True)) for place, total in sorted(found.items())]
    return Report([_with_cost(row) for row in rows], (*groups, *SUMS, "cost"), about._asdict())


def requests(
    paths: Sequence[Path], given: Mapping[str, str], level: str, zone: str, most: int = MOST_RECORDS
) -> Report:
    """Return the records of ended requests, of each database in the order of their writing; blocks.

    given: parameters by FILTERS, ``request_id``, ``limit`` and ``after``, the number of a record. most: of ``limit``.
    Otherwise as ``sums``.
    """
    zone, about = _filter(given, level, zone)
    limit, after = (
        integer("limit", given.get("limit", str(most)), most),
        integer("after", given.get("after", "0"), 2**62),
    )
    rows, columns, rest = [], ("id", *UsageRecord._fields), "AND id > ? ORDER BY id LIMIT ?"
    for row in chain.from_iterable(store.read(path, "requests", columns, about, rest, after, limit) for path in paths):
        at = datetime.datetime.fromtimestamp(row[1], ZoneInfo(zone)).isoformat(timespec="milliseconds")
        rows.append(_with_cost({"number": row[0], "time": at, **dict(zip(columns[2:], row[2:], strict=True))}))
    more = {"has_more": len(rows) >= limit > 0, "last": rows[-1]["number"] if rows else after}
    return Report(rows, ("number", "time", *UsageRecord._fields[1:], "cost"), more)


def _with_cost(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "cost": f"{row['micros'] // 10**6}.{row['micros'] % 10**6:06d}"}


def _group(name: str, row: Mapping[str, Any], zone: str) -> str:
    if name == "hour":
        return datetime.datetime.fromtimestamp(row["start_s"], ZoneInfo(zone)).replace(minute=0).isoformat()
    if name in TIMES:
        return period_at("day" if name == "day" else "month", zone, row["start_s"]).name
    if name in LEVELS:
        return "/".join(row["key"].split("/")[: LEVELS.index(name) + 1])
    return str(row[name])


def _filter(given: Mapping[str, str], level: str, zone: str) -> tuple[str, Filter]:
    try:
        zone = check_zone(given.get("time_zone", zone))
    except ValueError as exc:
        raise InvalidArgument("time_zone", str(exc)) from None
    now_s = time.time()
    from_s = _time("from", given["from"], zone) if "from" in given else period_at("month", zone, now_s).start_s
    to_s = _time("to", given["to"], zone) if "to" in given else (now_s // QUARTER_S + 1) * QUARTER_S
    if to_s < from_s:
        if "to" not in given:
            raise InvalidArgument("from", f"must not be after now where there is no to, got {given['from']!r}")
        raise InvalidArgument("to", f"must not be before from, got {given['to']!r}")
    return zone, Filter(from_s, to_s, level, *(given.get(name, "") for name in ("model", "endpoint", "request_id")))


def _time(name: str, text: str, zone: str) -> float:
    """Return the Unix time of a date, or of a date with a time; without an offset in the time zone."""
    try:
        if len(text) == 10:
            return midnight_s(datetime.date.fromisoformat(text), zone)
        # Python 3.10 reads no Z; in a query a + that is not escaped arrives as a blank.
        found = datetime.datetime.fromisoformat(text.replace("Z", "+00:00").replace(" ", "+"))
        return (found if found.tzinfo else found.replace(tzinfo=ZoneInfo(zone))).timestamp()
    except (ValueError, OverflowError):
        allowed = "a date such as 2026-11-23 or a time such as 2026-11-23T10:00:00+01:00"
        raise InvalidArgument(name, f"must be {allowed}, got {text!r:.80}") from None
