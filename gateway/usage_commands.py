"""``python -m gateway usage``: what requests used and cost, from usage databases."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from contract.errors import InvalidArgument
from gateway.config.settings import variable
from gateway.usage import report

OPTIONS = {
    "from": "a date or a time; the month's beginning by default",
    "to": "the first date or time that is left out; now by default",
    "time-zone": "of dates, hours and days; UTC by default",
    "group-by": f"some of {', '.join(report.GROUPS)}, with commas",
    "tenant": "such as acme or acme/research, with all below it",
    "model": "of these requests alone",
    "endpoint": "of these requests alone, such as chat or embeddings",
    "request-id": "of this request alone, with --requests",
}


def add(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    text = "show what requests used and cost (docs/usage.md)"
    parser = commands.add_parser("usage", help=text, description=text)
    parser.set_defaults(run=show)
    text = f"a usage database, {variable('usage_db')} by default; those of several gateways are added up"
    parser.add_argument("--db", action="append", type=Path, metavar="FILE", help=text)
    for name, text in OPTIONS.items():
        parser.add_argument(f"--{name}", help=text)
    parser.add_argument("--requests", action="store_true", help="list the requests in place of sums")
    parser.add_argument("--format", choices=("table", "csv", "json"), default="table")


def show(arguments: argparse.Namespace) -> None:
    """Print a report. Raises: InvalidArgument, Unavailable."""
    own = os.environ.get(variable("usage_db"), "")
    paths = arguments.db or ([Path(own)] if own else [])
    if not paths or not all(path.is_file() for path in paths):
        raise InvalidArgument("--db", f"must be usage databases, got {', '.join(map(str, paths)) or 'none'}")
    given = {name: value for name, value in vars(arguments).items() if isinstance(value, str)}
    level = given.get("tenant", "")
    if arguments.requests:
        made = report.requests(paths, given, level, "UTC", most=2**62)
    else:
        made = report.sums(paths, given, level, "UTC")
    if arguments.format == "json":
        print(json.dumps(made.rows, indent=2))
    elif arguments.format == "csv":
        sys.stdout.write(made.csv())
    else:
        columns = [name for name in made.columns if name not in ("micros", "number")]
        cells = [columns, *([str(row[name]) for name in columns] for row in made.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for line in cells:
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
