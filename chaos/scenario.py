"""A scenario: which faults at which moments under how much load; drawn from a seed, or read from a short script."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from contract.errors import InvalidArgument

REPLICAS, GATEWAYS, REDIS = ("replica-1", "replica-2"), ("gateway-1", "gateway-2"), ("redis",)
FORMS = "seed N, duration SECONDS, rate NUMBER or at SECONDS KIND TARGET [for SECONDS]"
# Of the numbers in a script, seconds but for the rate, which is requests per second.
RANGES = {"duration": (1.0, 600.0), "rate": (0.1, 100.0), "at": (0.0, 600.0), "for": (0.1, 600.0)}
FIRST_S = 3.0, 5.0  # of the first fault: what is measured before it is what is undisturbed
TAIL_S = 6.0  # of the load behind the last fault
SHORTEST_S = FIRST_S[1] + TAIL_S  # of a scenario that is drawn: in a shorter one there might be no fault
PAIRED = 0.4  # of the faults, which begin within a second of the one before


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    targets: what it can be done to. for_s: seconds that it may last, least and most; None: it is over at once.
    needs: "redis" or "envoy", or "".
    replica_out: requests can lose a replica. gateway_out: streams at that gateway break off. silent: a stream may
        hear nothing until the gateway's timeouts. budgets_out: tenants with budgets may be refused.
    """

    targets: tuple[str, ...]
    for_s: tuple[float, float] | None = None
    needs: str = ""
    replica_out: bool = False
    gateway_out: bool = False
    silent: bool = False
    budgets_out: bool = False


_STOPPED = ("tritonserver", "engine", "detokenizer", "supervisor")  # of a replica
KINDS = {
    **{f"kill.{name}": Kind(REPLICAS, replica_out=True) for name in (*_STOPPED, "tokenizer")},
    **{f"stop.{name}": Kind(REPLICAS, (0.5, 3.0), replica_out=True, silent=True) for name in _STOPPED},
    # gateway-1 has two workers, gateway-2 is one process.
    "kill.worker": Kind(("gateway-1",), gateway_out=True),
    "stop.worker": Kind(("gateway-1",), (0.5, 3.0), silent=True),
    "kill.gateway": Kind(("gateway-2",), gateway_out=True),
    "stop.gateway": Kind(("gateway-2",), (0.5, 3.0), silent=True),
    "kill.redis": Kind(REDIS, needs="redis", budgets_out=True),
    "stop.redis": Kind(REDIS, (0.5, 4.0), needs="redis", budgets_out=True),
    "envoy.delay": Kind(REPLICAS, (1.0, 4.0), needs="envoy"),
    "envoy.abort": Kind(REPLICAS, (1.0, 4.0), needs="envoy", replica_out=True),
    "envoy.throttle": Kind(REPLICAS, (1.0, 3.0), needs="envoy", silent=True),
    "envoy.reset": Kind(REPLICAS, needs="envoy", replica_out=True),
    "fail.engine.step": Kind(REPLICAS, (0.2, 1.0), replica_out=True),
    "fail.engine.kv": Kind(REPLICAS, (0.5, 3.0), silent=True),
    "fail.disk.slow": Kind(GATEWAYS + REPLICAS, (1.0, 4.0)),
    "fail.disk.full": Kind(GATEWAYS + REPLICAS, (1.0, 4.0)),
    "fail.redis.away": Kind(GATEWAYS, (1.0, 4.0), needs="redis", budgets_out=True),
    "fail.metrics.lie": Kind(GATEWAYS, (1.0, 4.0)),
    "fail.clock.jump": Kind(GATEWAYS + REPLICAS, (1.0, 4.0)),
    "fail.descriptors.few": Kind(GATEWAYS, (0.5, 2.0), gateway_out=True, replica_out=True, budgets_out=True),
}


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
    faults, at_s = [], source.uniform(*FIRST_S)
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
    seed, numbers = 0, {"duration": 25.0, "rate": 5.0}
    faults: list[tuple[Fault, int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        try:
            if words[:1] == ["at"] and len(words) in (4, 6):
                faults.append((_fault(words), number, line))
            elif len(words) == 2 and words[0] == "seed":
                seed = _seed(words[1])
            elif len(words) == 2 and words[0] in numbers:
                numbers[words[0]] = _number(words[0], words[1])
            elif words:
                raise ValueError(f"must be {FORMS}")
        except ValueError as exc:
            raise InvalidArgument(f"line {number}", f"{exc}, got {line!r}") from exc
    for fault, number, line in faults:  # `duration` may stand behind them
        if fault.end_s > numbers["duration"]:
            allowed = f"must be within the duration of {numbers['duration']:g} s"
            raise InvalidArgument(f"line {number}", f"{allowed}, got {line!r}")
    ordered = sorted((fault for fault, _, _ in faults), key=lambda fault: fault.at_s)
    return Scenario(seed, numbers["duration"], numbers["rate"], tuple(ordered))


def _seed(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError("seed must be a whole number") from None


def _number(name: str, word: str) -> float:
    """Return the number of a line, within what RANGES has for ``name``. Raises ValueError that says what is allowed."""
    least, most = RANGES[name]
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        raise ValueError(f"{name} must be a number from {least:g} to {most:g}")
    return number


def _fault(words: list[str]) -> Fault:
    at_s, kind, target = _number("at", words[1]), words[2], words[3]
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}")
    if target not in KINDS[kind].targets:
        raise ValueError(f"target of {kind} must be one of {', '.join(KINDS[kind].targets)}")
    lasts = KINDS[kind].for_s is not None
    if words[4:5] != ["for"] * lasts:
        raise ValueError(f"{kind} must {'end in' if lasts else 'have no'} `for SECONDS`")
    return Fault(at_s, kind, target, _number("for", words[5]) if lasts else 0.0)


def read(path: Path) -> Scenario:
    """Read a script's file. Raises InvalidArgument that names the file and the line."""
    try:
        return parse(path.read_text("utf-8"))
    except OSError as exc:
        raise InvalidArgument("SCENARIO", f"must be a file that can be read, got {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise InvalidArgument("SCENARIO", f"must be text in UTF-8, got {path}: {exc}") from exc
    except InvalidArgument as exc:
        raise InvalidArgument(f"{path}: {exc.field}", exc.problem) from exc
