"""``python -m cluster``: start a fleet on this machine or change one (docs/fleet.md), say how many replicas each
pool needs now (docs/scaling.md), or plan a load (docs/capacity.md); see ``--help``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contract.errors import InvalidArgument, TridentError, Unavailable

FOLDER = Path(__file__).resolve().parents[1] / ".triton" / "fleet"


def main(argv: Sequence[str]) -> int:
    """Run a verb, which imports what it needs: no environment has the packages of all."""
    given = _parser().parse_args(argv)
    try:
        return int(given.run(given))
    except TridentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` reads no further; what is left in the buffer must not fail at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m cluster", description="Replicas: started, scaled and planned.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, about in (("fleet", "start a fleet under Ray Serve"), ("change", "change the one that runs")):
        command = verbs.add_parser(verb, help=about, argument_default=argparse.SUPPRESS)
        command.add_argument("--engine", help="folder under engines/ (demo)")
        command.add_argument("--min", type=int, help="fewest replicas (1)")
        command.add_argument("--max", type=int, help="most replicas (3)")
        command.add_argument("--drain-s", type=float, help="seconds that streams may go on when a replica stops (30)")
        command.add_argument("--orphan-s", type=float, help="seconds that a server goes on without Ray (60)")
        command.add_argument("--cpus", type=float, help="CPUs that Ray books for a replica (0)")
        command.add_argument("--python", help="interpreter of servers and gateway (.venv/bin/python)")
        command.add_argument("--scaling", type=os.path.abspath, help="TOML file of the scaling rules")
        about = "variable of the servers; repeatable"
        command.add_argument("--environ", action="append", type=_pair, metavar="NAME=VALUE", help=about)
        command.add_argument("--folder", type=Path, default=FOLDER, help="of its tokens and state")
        command.set_defaults(run=_fleet)
    scale = verbs.add_parser("scale", help="print for each pool what it has, what it needs, and why")
    scale.add_argument("--watch", action="store_true", help="again at every reading, until Ctrl-C")
    keda = verbs.add_parser("keda", help="serve KEDA's external scaler and the scaler's metrics")
    for command in (scale, keda):
        command.add_argument("--gateways", metavar="URL,URL", help="metrics pages; TRIDENT_SCALER_GATEWAYS")
        command.add_argument("--config", metavar="FILE", help="TOML file of the rules; TRIDENT_SCALER_CONFIG")
        command.set_defaults(run=_scale)
    plan = verbs.add_parser("plan", help="replicas, operating point, what binds and what it costs")
    plan.add_argument("scenario", type=Path, metavar="SCENARIO.toml")
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.add_argument("--plot", type=Path, metavar="FILE", help="draw replicas by hour (.svg, .png, .pdf)")
    plan.add_argument("--check", metavar="POOL", help="hold the pool's forecasts to the bench, on this machine")
    plan.add_argument("--seconds", type=float, default=argparse.SUPPRESS, help="of each load of --check (45)")
    plan.set_defaults(run=_plan)
    return parser


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value


def _fleet(given: argparse.Namespace) -> int:
    if importlib.util.find_spec("ray") is None:
        raise Unavailable("Ray is not installed here; `make setup-fleet` makes .venv-fleet with it")
    from cluster.ray import fleet

    changes = {name: value for name, value in vars(given).items() if name not in ("verb", "run", "folder")}
    bounds: dict[str, Any] = {name: changes.pop(name) for name in ("min", "max", "scaling") if name in changes}
    if "environ" in changes:
        changes["environ"] = dict(changes["environ"])
    if given.verb == "fleet":
        return fleet.run(given.folder.absolute(), changes, {"min": 1, "max": 3, **bounds})
    fleet.change(given.folder.absolute(), changes, bounds)
    return 0


def _scale(given: argparse.Namespace) -> int:
    from cluster.keda import external_scaler
    from cluster.scaling.scaler import Scaler
    from cluster.scaling.settings import Settings

    logging.basicConfig(level=logging.WARNING if given.verb == "scale" else logging.INFO, format="%(message)s")
    settings = Settings.from_environment(os.environ, gateways=given.gateways, config=given.config)
    scaler = Scaler(settings)
    work = external_scaler.serve(scaler, settings) if given.verb == "keda" else scaler.show(given.watch)
    with contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(work)
    return 0


def _plan(given: argparse.Namespace) -> int:
    from cluster.plan import check, planner, report, scenario

    if not given.check and hasattr(given, "seconds"):
        raise InvalidArgument("seconds", f"must be left out without --check, got {given.seconds:g}")
    if given.plot:
        if given.check:
            raise InvalidArgument("plot", f"must be left out with --check, which draws nothing; got {given.plot}")
        report.check_plot(given.plot)
    read = scenario.read(given.scenario)
    if given.check:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the bench that runs, too
        compared = check.run(read, given.check, getattr(given, "seconds", check.SECONDS))
        told = json.dumps([asdict(one) for one in compared]) if given.json else check.described(compared)
        print(told, flush=True)
        return 0
    plans = planner.plan(read, given.scenario)
    texts = "\n\n".join(report.described(plan, read.currency) for plan in plans)
    try:
        print(json.dumps([asdict(plan) for plan in plans]) if given.json else texts, flush=True)
    finally:
        if given.plot:
            report.plot(plans, given.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
