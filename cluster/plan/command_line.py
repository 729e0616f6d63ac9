"""`python -m cluster plan`: replicas, operating point, what binds and what it costs (docs/capacity.md)."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cluster.plan import check, planner, report, scenario
from contract.errors import TridentError


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster plan", description=__doc__)
    parser.add_argument("scenario", type=Path, metavar="SCENARIO.toml")
    parser.add_argument("--json", action="store_true", help="print JSON")
    kinds = ", ".join(report.SUFFIXES)
    parser.add_argument("--plot", type=Path, metavar="FILE", help=f"draw replicas by hour ({kinds})")
    parser.add_argument("--check", metavar="POOL", help="hold the pool's forecasts to the bench, on this machine")
    parser.add_argument("--seconds", type=float, default=check.SECONDS, help="of each load of --check (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        if options.plot:
            report.check_plot(options.plot)
        given = scenario.read(options.scenario)
        if options.check:
            compared = check.run(given, options.check, options.seconds)
            _print(json.dumps([asdict(one) for one in compared]) if options.json else check.described(compared))
            return 0
        plans = planner.plan(given, options.scenario)
        _print(
            json.dumps([asdict(plan) for plan in plans])
            if options.json
            else "\n\n".join(report.described(plan, given.currency) for plan in plans)
        )
        if options.plot:
            report.plot(plans, options.plot)
    except TridentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `| head` reads no further; what is left in the buffer must not fail at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
