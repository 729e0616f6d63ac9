"""``python -m cluster``: start a fleet on this machine or change one (docs/fleet.md), say how many replicas each
pool needs now (docs/scaling.md), or plan a load (docs/capacity.md); see ``--help``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.ray import fleet
from cluster.ray.application import ROOT
from contract.errors import TridentError


def main(argv: Sequence[str]) -> int:
    if argv[:1] in (["scale"], ["keda"]):
        return importlib.import_module("cluster.scaling.command_line").main(argv)  # needs what a fleet does not have
    if argv[:1] == ["plan"]:
        return importlib.import_module("cluster.plan.command_line").main(argv[1:])
    about = "A fleet of replicas under Ray Serve."
    parser = argparse.ArgumentParser("python -m cluster", description=about, argument_default=argparse.SUPPRESS)
    others = ("scale", "keda", "plan")
    about = f"fleet: start one; change: the one that runs; {', '.join(others)}: have a --help of their own"
    parser.add_argument("verb", choices=("fleet", "change", *others), help=about)
    parser.add_argument("--engine", help="folder under engines/ (demo)")
    parser.add_argument("--min", type=int, help="fewest replicas (1)")
    parser.add_argument("--max", type=int, help="most replicas (3)")
    parser.add_argument("--drain-s", type=float, help="seconds that streams may go on when a replica stops (30)")
    parser.add_argument("--orphan-s", type=float, help="seconds that a server goes on without Ray (60)")
    parser.add_argument("--cpus", type=float, help="CPUs that Ray books for a replica (0)")
    parser.add_argument("--python", help="interpreter of servers and gateway (.venv/bin/python)")
    parser.add_argument("--scaling", type=os.path.abspath, help="TOML file of the scaling rules")
    parser.add_argument(
        "--environ", action="append", type=_pair, metavar="NAME=VALUE", help="variable of the servers; repeatable"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / ".triton" / "fleet", help="of its tokens and state")
    given = vars(parser.parse_args(argv))
    if given["verb"] in others:
        parser.error(f"{given['verb']} must be the first argument")
    if importlib.util.find_spec("ray") is None:
        print("error: Ray is not installed here; `make setup-fleet` makes .venv-fleet with it", file=sys.stderr)
        return 2
    verb, folder = given.pop("verb"), given.pop("folder").absolute()
    bounds: dict[str, Any] = {name: given.pop(name) for name in ("min", "max", "scaling") if name in given}
    if "environ" in given:
        given["environ"] = dict(given["environ"])
    try:
        if verb == "change":
            fleet.change(folder, given, bounds)
            return 0
        return fleet.run(folder, given, {"min": 1, "max": 3, **bounds})
    except TridentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
