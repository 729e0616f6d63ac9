"""``python -m gateway usage``: what requests used and cost, from usage databases."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from contract.errors import InvalidArgument
from gateway.config.settings import variable
from gateway.usage import report
from gateway.usage.store import SUMS, UsageRecord

FORMATS = ("table", "csv", "json")


def add(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    text = "show what requests used and cost (docs/usage.md)"
    parser = commands.add_parser("usage", help=text, description=text)
    parser.set_defaults(run=show)
    parser.add_argument(
        "--db",
        action="append",
        type=Path,
        metavar="FILE",
        help=f"a usage database; else {variable('usage_db')}; several gateways': several times, added up",
    )
    parser.add_argument("--from", dest="from_", metavar="TIME", help="a date, or a time; else the month's beginning")
    parser.add_argument("--to", metavar="TIME", help="the first date or time that is left out; else now")
    parser.add_argument("--time-zone", default="UTC", metavar="ZONE", help="of dates, hours and days; UTC by default")
    parser.add_argument("--group-by", default="", metavar="NAMES", help=f"some of {', '.join(report.GROUPS)}")
    parser.add_argument("--tenant", default="", metavar="LEVEL", help="such as acme or acme/research; all by default")
    parser.add_argument("--model", default="", help="of these requests alone")
    parser.add_argument("--endpoint", default="", help="of these requests alone, such as chat or embeddings")
    parser.add_argument("--requests", action="store_true", help="list the requests in place of sums")
    parser.add_argument("--request-id", default="", metavar="ID", help="of this request alone, with --requests")
    parser.add_argument("--format", choices=FORMATS, default="table")


def show(arguments: argparse.Namespace) -> None:
    """Print a report. Raises: InvalidArgument, Unavailable."""
    own = os.environ.get(variable("usage_db"), "")
    paths = arguments.db or ([Path(own)] if own else [])
    for path in paths:
        if not path.is_file():
            raise InvalidArgument("--db", f"must be a usage database, got {path}")
    if not paths:
        raise InvalidArgument("--db", f"must be set, or {variable('usage_db')}")
    given = {name: value for name, value in vars(arguments).items() if isinstance(value, str) and value}
    given |= {"from": arguments.from_} if arguments.from_ else {}
    zone = report.zone_of(given, "UTC")
    about = report.filter_of(given, arguments.tenant, zone, time.time())
    columns: tuple[str, ...]
    if arguments.requests:
        rows, columns = _records(paths, about, zone), ("time", *UsageRecord._fields[1:])
    else:
        groups = report.groups_of(arguments.group_by)
        rows, columns = report.added([report.sums(path, about, groups, zone) for path in paths]), (*groups, *SUMS)
    columns, rows = (*columns, "cost"), report.with_cost(rows)
    if arguments.format == "json":
        print(json.dumps(rows, indent=2))
    elif arguments.format == "csv":
        sys.stdout.write(report.as_csv(rows, columns))
    else:
        _print_table(rows, [name for name in columns if name != "micros"])


def _records(paths: list[Path], about: report.Filter, zone: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in paths:
        after = 0
        while page := report.requests(path, about, after, report.MOST_RECORDS, zone):
            found += page
            after = page[-1]["number"]
    return found


def _print_table(rows: list[dict[str, Any]], columns: list[str]) -> None:
    cells = [columns, *([str(row[name]) for name in columns] for row in rows)]
    widths = [max(len(line[number]) for line in cells) for number in range(len(columns))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
