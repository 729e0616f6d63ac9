"""Arrival processes of an open loop: Poisson, bursty, ramp, phases, or a recorded trace."""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks import lengths
from contract.errors import InvalidArgument

MOST = 1e6  # requests per second, and in a burst
FORMS = "poisson:RATE, bursty:RATE,BURST_SIZE, ramp:FROM,TO (requests per second) or trace:FILE[,SPEED]"


@dataclass(frozen=True)
class Arrival:
    """One request's instant, and lengths in tokens if a trace gives them; the workload draws the others."""

    at_s: float
    input_tokens: int | None = None
    output_tokens: int | None = None


class Arrivals(Protocol):
    def instants(self, rng: random.Random, duration_s: float) -> Iterator[Arrival]:
        """Yield the arrivals below ``duration_s`` after the start, in order."""

    def expected(self, duration_s: float) -> float:
        """Return the mean number of those arrivals, or an upper bound of it."""


@dataclass(frozen=True)
class Poisson:
    """Independent requests: exponential gaps of mean 1 / rate."""

    rate_per_s: float

    def __str__(self) -> str:
        return f"Poisson, {self.rate_per_s:g} requests/s"

    def expected(self, duration_s: float) -> float:
        return self.rate_per_s * duration_s

    def instants(self, rng: random.Random, duration_s: float) -> Iterator[Arrival]:
        at_s = rng.expovariate(self.rate_per_s)
        while at_s < duration_s:
            yield Arrival(at_s)
            at_s += rng.expovariate(self.rate_per_s)


@dataclass(frozen=True)
class Bursty(Poisson):
    """Bursts arrive as a Poisson process; its requests are simultaneous, geometrically many (mean ``burst_size``)."""

    burst_size: float

    def __str__(self) -> str:
        return f"bursts of {self.burst_size:g}, {self.rate_per_s:g} requests/s"

    def instants(self, rng: random.Random, duration_s: float) -> Iterator[Arrival]:
        for burst in Poisson(self.rate_per_s / self.burst_size).instants(rng, duration_s):
            size = 1
            while rng.random() >= 1 / self.burst_size:
                size += 1
            yield from itertools.repeat(burst, size)


@dataclass(frozen=True)
class Ramp:
    """Poisson whose rate changes linearly from first_per_s to last_per_s over the duration."""

    first_per_s: float
    last_per_s: float

    def __str__(self) -> str:
        return f"ramp from {self.first_per_s:g} to {self.last_per_s:g} requests/s"

    def expected(self, duration_s: float) -> float:
        return (self.first_per_s + self.last_per_s) / 2 * duration_s

    def instants(self, rng: random.Random, duration_s: float) -> Iterator[Arrival]:
        slope = (self.last_per_s - self.first_per_s) / duration_s
        expected = rng.expovariate(1.0)  # integral of the rate: first * t + slope * t² / 2
        # Below 0 the rate reaches 0 before another request is due.
        while (root := self.first_per_s**2 + 2 * slope * expected) >= 0:
            at_s = 2 * expected / (self.first_per_s + math.sqrt(root))
            if at_s >= duration_s:
                return
            yield Arrival(at_s)
            expected += rng.expovariate(1.0)


@dataclass(frozen=True)
class Phases:
    """Poisson at a constant rate in each phase: (requests per second, seconds), one after the other."""

    phases: tuple[tuple[float, float], ...]

    def __str__(self) -> str:
        return ", then ".join(f"{rate:g} requests/s for {seconds:g} s" for rate, seconds in self.phases)

    def expected(self, duration_s: float) -> float:
        return sum(rate * seconds for rate, seconds in self.phases)

    def instants(self, rng: random.Random, duration_s: float) -> Iterator[Arrival]:
        begin_s = 0.0
        for rate, seconds in self.phases:
            for arrival in Poisson(rate).instants(rng, min(seconds, duration_s - begin_s)):
                yield Arrival(begin_s + arrival.at_s)
            begin_s += seconds


@dataclass(frozen=True)
class Trace:
    """Recorded requests, replayed at ``speed`` times the recorded pace."""

    rows: tuple[Arrival, ...]
    speed: float = 1.0

    def __str__(self) -> str:
        return f"trace of {len(self.rows)} requests at {self.speed:g}x speed"

    def expected(self, duration_s: float) -> float:
        return float(len(self.rows))

    def instants(self, rng: random.Random, duration_s: float) -> Iterator[Arrival]:
        for row in self.rows:
            if (at_s := row.at_s / self.speed) < duration_s:
                yield Arrival(at_s, row.input_tokens, row.output_tokens)


def parse(text: str) -> Arrivals:
    """Parse the command line's form. Raises InvalidArgument for ``arrivals``."""
    kind, _, rest = text.partition(":")
    parts = rest.split(",")
    if kind == "trace" and rest:
        path, comma, speed = rest.rpartition(",")
        return read_trace(Path(path), _positive(speed, text)) if comma else read_trace(Path(rest))
    if kind == "poisson" and len(parts) == 1:
        return Poisson(_positive(rest, text))
    if kind == "bursty" and len(parts) == 2:
        rate_per_s, size = (_positive(part, text) for part in parts)
        if size < 1:
            raise InvalidArgument("arrivals", f"must have a burst size of 1 at least, got {text!r}")
        return Bursty(rate_per_s, size)
    if kind == "ramp" and len(parts) == 2:
        from_per_s, to_per_s = (0.0 if part.strip() == "0" else _positive(part, text) for part in parts)
        if not from_per_s and not to_per_s:
            raise InvalidArgument("arrivals", f"must have a ramp with one end above 0, got {text!r}")
        return Ramp(from_per_s, to_per_s)
    raise InvalidArgument("arrivals", f"must be {FORMS}, got {text!r}")


def read_trace(path: Path, speed: float = 1.0) -> Trace:
    """Read JSON lines, or CSV with a header: at_s and optionally input_tokens, output_tokens. Raises InvalidArgument
    for ``arrivals``."""
    text, rows = lengths.read_text(path, "arrivals"), []
    try:
        if path.suffix == ".csv":
            tables: Iterable[dict] = csv.DictReader(text.splitlines())
        else:
            tables = (json.loads(line) for line in text.splitlines() if line.strip())
        for table in tables:
            row = Arrival(float(table["at_s"]), _whole(table, "input_tokens"), _whole(table, "output_tokens"))
            if not row.at_s >= 0 or not math.isfinite(row.at_s):
                raise ValueError(f"at_s is {row.at_s}")
            rows.append(row)
    except lengths.MALFORMED as exc:
        form = "one request per line with at_s and optionally input_tokens, output_tokens"
        raise InvalidArgument("arrivals", f"must have {form}, got {path}, request {len(rows) + 1}: {exc}") from exc
    if not rows:
        raise InvalidArgument("arrivals", f"must have one request at least, got {path} without any")
    return Trace(tuple(sorted(rows, key=lambda row: row.at_s)), speed)


def _whole(table: dict, name: str) -> int | None:
    if (value := table.get(name)) in (None, ""):
        return None
    if float(value) != int(value) or not 1 <= int(value) <= lengths.MOST:
        raise ValueError(f"{name} is {value}")
    return int(value)


def _positive(text: str, whole: str) -> float:
    with suppress(ValueError):
        if 0 < (value := float(text)) <= MOST:
            return value
    raise InvalidArgument("arrivals", f"must be {FORMS} with numbers above 0 and up to {MOST:g}, got {whole!r}")
