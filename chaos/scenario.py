"""A scenario: which faults at which moments under how much load; drawn from a seed, or read from a short script."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from chaos.faults import KINDS
from contract.errors import InvalidArgument

EARLIEST_S = 3.0  # what is measured before the first fault is what is undisturbed
TAIL_S = 6.0  # of the load behind the last fault
PAIRED = 0.4  # of the faults, which begin within a second of the one before


@dataclass(frozen=True)
class Fault:
    """at_s: since the load began. kind: of KINDS. target: one of its targets. for_s: 0 for one that is over at once."""

    at_s: float
    kind: str
    target: str
    for_s: float = 0.0

    @property
    def end_s(self) -> float:
        return self.at_s + self.for_s

    def __str__(self) -> str:
        return f"at {self.at_s:g} {self.kind} {self.target}" + (f" for {self.for_s:g}" if self.for_s else "")


@dataclass(frozen=True)
class Scenario:
    """seed: of the load, too. duration_s: of the load. rate: requests per second."""

    seed: int
    duration_s: float
    rate: float
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        """Return its script."""
        head = [f"seed {self.seed}", f"duration {self.duration_s:g}", f"rate {self.rate:g}"]
        return "\n".join([*head, *map(str, self.faults)]) + "\n"


def draw(seed: int, duration_s: float = 25.0, rate: float = 5.0) -> Scenario:
    """Return the scenario of a seed: faults every few seconds, some of them in pairs."""
    source = random.Random(seed)
    faults, at_s = [], EARLIEST_S + source.uniform(0, 2)
    while at_s < duration_s - TAIL_S:
        kind = source.choice(sorted(KINDS))
        longest = KINDS[kind].for_s
        for_s = round(source.uniform(*longest), 1) if longest else 0.0
        faults.append(Fault(round(at_s, 1), kind, source.choice(KINDS[kind].targets), for_s))
        at_s += source.uniform(0, 1) if source.random() < PAIRED else source.uniform(3, 8)
    return Scenario(seed, duration_s, rate, tuple(faults))


def possible(scenario: Scenario, without: Collection[str]) -> Scenario:
    """Return the scenario without the faults of what is not installed. without: "redis", "envoy"."""
    faults = tuple(fault for fault in scenario.faults if KINDS[fault.kind].needs not in without)
    return dataclasses.replace(scenario, faults=faults)


def parse(text: str) -> Scenario:
    """Read a script. Raises InvalidArgument that names the line."""
    numbers = {"seed": 0.0, "duration": 25.0, "rate": 5.0}
    faults = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        try:
            if not words:
                continue
            if words[0] == "at" and len(words) in (4, 6):
                faults.append(_fault(words))
            else:
                name, value = words
                numbers[name] = (int if name == "seed" else float)(value) if name in numbers else numbers[name]
        except (ValueError, KeyError) as exc:
            form = "seed N, duration SECONDS, rate NUMBER or at SECONDS KIND TARGET [for SECONDS]"
            raise InvalidArgument(f"line {number}", f"must be {form}, got {line!r}: {exc}") from exc
    if not 1 <= numbers["duration"] <= 600 or not 0.1 <= numbers["rate"] <= 100:
        got = f"got {numbers['duration']:g} and {numbers['rate']:g}"
        raise InvalidArgument("duration, rate", f"must be 1 to 600 seconds and 0.1 to 100 requests a second, {got}")
    late = [fault for fault in faults if not 0 <= fault.at_s <= fault.end_s <= numbers["duration"]]
    if late:
        raise InvalidArgument("at", f"must be within the duration of {numbers['duration']:g} s, got {late[0]}")
    faults.sort(key=lambda fault: fault.at_s)
    return Scenario(int(numbers["seed"]), numbers["duration"], numbers["rate"], tuple(faults))


def _fault(words: list[str]) -> Fault:
    at_s, kind, target = float(words[1]), words[2], words[3]
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}")
    if target not in KINDS[kind].targets:
        raise ValueError(f"target must be one of {', '.join(KINDS[kind].targets)}")
    if (KINDS[kind].for_s is None) == (len(words) == 6) or (len(words) == 6 and words[4] != "for"):
        raise ValueError("needs `for SECONDS`" if KINDS[kind].for_s else "is over at once and takes no `for`")
    for_s = float(words[5]) if len(words) == 6 else 0.0
    if len(words) == 6 and not for_s > 0:
        raise ValueError("SECONDS of `for` must be above 0")
    return Fault(at_s, kind, target, for_s)


def read(path: Path) -> Scenario:
    """Read a script's file. Raises InvalidArgument."""
    try:
        return parse(path.read_text("utf-8"))
    except OSError as exc:
        raise InvalidArgument("SCENARIO", f"must be a file that can be read, got {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise InvalidArgument("SCENARIO", f"must be text in UTF-8, got {path}: {exc}") from exc
