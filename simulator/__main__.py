"""``python -m simulator run SCENARIO`` and ``compare A B``; see docs/simulator.md."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from clients.terminal import forget_stdout
from cluster.plan.report import check_plot
from contract.errors import InvalidArgument, TridentError
from simulator import fidelity, report, scenario
from simulator.run import Result, check, run


def main(arguments: Sequence[str]) -> int:
    """Return 0, 1 if an invariant did not hold, 2 for a scenario that cannot be run, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m simulator", description=__doc__)
    parser.set_defaults(json=None, plot=None)
    commands = parser.add_subparsers(dest="command", required=True)
    single = commands.add_parser("run", help="simulate one scenario")
    pair = commands.add_parser("compare", help="simulate two scenarios on the same random numbers")
    for command, number in ((single, 1), (pair, 2)):
        command.add_argument("scenarios", metavar="SCENARIO", type=Path, nargs=number)
        command.add_argument("--json", type=Path, metavar="OUT", help="write all figures there")
    single.add_argument("--plot", type=Path, metavar="OUT", help="draw a picture there (.png, .svg)")
    real = commands.add_parser("fidelity", help="compare forecasts with real runs of a calibrated engine")
    real.add_argument("--engine", default="demo")
    real.add_argument("--seconds", type=float, default=30.0, help="of each of three loads")
    real.add_argument("--input", default="lognormal:64,0.5", help="tokens of prompts, as a persona's")
    real.add_argument("--output", default="lognormal:64,0.5", help="tokens of answers")
    real.add_argument("--keep", action="store_true", help="tell what was found with every forecast from now on")
    for command in (single, pair, real):
        command.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        if options.command == "fidelity":
            found = fidelity.compare(options.engine, options.seconds, options.input, options.output, options.seed)
            if options.keep:
                fidelity.keep(options.engine, found)
            return 0
        if options.json and (options.json.is_dir() or not options.json.absolute().parent.is_dir()):
            raise InvalidArgument("json", f"must be a file of a folder that exists, got {options.json}")
        if options.plot:
            check_plot(options.plot)
        read = [scenario.read(path) for path in options.scenarios]
        for one in read:
            check(one)
        results = [_simulated(one, options.seed) for one in read]
        told = [report.of(result, fidelity.known(result.scenario)) for result in results]
        shown, written = report.text(told[0]), told[0]
        if options.command == "compare":
            table, pairs = report.compared(results[0], results[1], told)
            shown = "\n".join([*map(report.text, told), table])
            written = {"first": told[0], "second": told[1], "pairs": pairs}
        _print(shown)
        if options.json is not None:
            options.json.write_text(json.dumps(written, sort_keys=True) + "\n", "utf-8")
        if options.plot is not None:
            report.plot(results[0], options.plot)
    except (TridentError, OSError) as exc:
        print(f"simulator: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return int(any(result.violations for result in results))


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `| head` reads no further
        forget_stdout()


def _simulated(read: scenario.Scenario, seed: int) -> Result:
    began_s = time.process_time()
    found = run(read, seed)
    took_s, requests = time.process_time() - began_s, len(found.everyone)
    pace = f"{60 * requests / took_s:,.0f} a minute"
    print(f"simulator: {read.name}: {requests} requests in {took_s:.1f} s of CPU, {pace}", file=sys.stderr)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
