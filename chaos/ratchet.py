"""Shrink a failing scenario, keep its script, and compare findings with the known ones, which may only become fewer."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from chaos.invariants import Violation
from chaos.scenario import Fault, Scenario
from contract.errors import InvalidArgument

FOLDER = Path(__file__).parent / "regressions"
KNOWN = FOLDER / "known.txt"
Fails = Callable[[Scenario], Awaitable[bool]]


def finding(invariant: str, faults: Sequence[Fault]) -> str:
    """Return the name of a finding, such as ``errors:kill.engine+stop.redis``."""
    return f"{invariant}:{'+'.join(sorted(fault.kind for fault in faults)) or 'none'}"


async def shrink(scenario: Scenario, fails: Fails, runs: int) -> Scenario:
    """Return a scenario with fewer faults that still fails, found with ``runs`` runs at most (delta debugging)."""
    faults, pieces = scenario.faults, 2
    while faults and runs > 0:
        size = max(1, -(-len(faults) // pieces))
        for start in range(0, len(faults), size):
            fewer = faults[:start] + faults[start + size :]
            if runs <= 0:
                break
            runs -= 1
            if await fails(dataclasses.replace(scenario, faults=fewer)):
                faults, pieces = fewer, max(2, pieces - 1)
                break
        else:
            if size == 1:
                break
            pieces = min(len(faults), 2 * pieces)
    return dataclasses.replace(scenario, faults=faults)


def script(name: str, folder: Path = FOLDER) -> Path:
    """Return the file of a finding's script."""
    return folder / f"{re.sub('[^A-Za-z0-9.]+', '-', name)[:120]}.chaos"


def keep(name: str, scenario: Scenario, violations: Sequence[Violation], folder: Path = FOLDER) -> Path:
    """Write the script of a finding; return its path."""
    path = script(name, folder)
    comments = [f"# {violation.invariant}: {violation.detail}" for violation in violations[:3]]
    path.write_text("\n".join([f"# {name}", *(line.replace("\n", " ") for line in comments), str(scenario)]), "utf-8")
    return path


def known(path: Path = KNOWN) -> dict[str, str]:
    """Read the known findings: name and why it is not mended, by name. Raises InvalidArgument."""
    found = {}
    for line in path.read_text("utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, reason = line.partition("  ")
            if not reason.strip() or ":" not in name:
                raise InvalidArgument(path.name, f"must be `FINDING  a sentence` on each line, got {line!r}")
            found[name] = reason.strip()
    return found


def judge(seen: Sequence[str], checked: Sequence[str], listed: dict[str, str]) -> list[str]:
    """Return what is wrong: findings that are new, and listed ones whose scripts no longer fail. checked: listed
    findings whose scripts were run."""
    advice = f"mend it, or list it in {KNOWN.name} with a reason"
    new = [f"new finding {name}: {advice}" for name in sorted(set(seen) - listed.keys())]
    return new + [f"{name} no longer occurs: remove it from {KNOWN.name}" for name in checked if name not in seen]
