"""What relaying costs: latency added and CPU per token, of every contender, in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks import report
from benchmarks.gateway.contenders import Contender
from benchmarks.gateway.driven import drive
from benchmarks.gateway.load import Plan
from benchmarks.gateway.script import Pace

FIRST_S, GAP_S, NOISE_S, TOKENS = 0.02, 0.02, 0.008, 32  # of a moderate load: 50 tokens/s a stream
MODERATE = 16  # streams
FLAT_OUT = Pace()


@dataclass(frozen=True)
class Way:
    """One way to the tokens. direct: the name of the way that this one is held against; empty for those themselves."""

    name: str
    door: str
    url: str
    direct: str = ""
    contender: Contender | None = None


@dataclass
class Relayed:
    """One load on one way, over all rounds. Milliseconds: ttft from the request's sending, less what the script waits;
    travelled from the source's writing a token to our reading it."""

    way: str
    direct: str
    streams: int
    paced: bool
    tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    ttft_ms: list[float] = field(default_factory=list)
    travelled_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def us_per_token(self) -> float:
        return 1e6 * self.cpu_s / self.tokens if self.tokens and self.cpu_s else float("nan")

    def to_json(self) -> dict[str, object]:
        spreads = {name: spread(getattr(self, name)) for name in ("ttft_ms", "travelled_ms", "gaps_ms")}
        plain = {
            name: getattr(self, name) for name in ("way", "direct", "streams", "paced", "tokens", "wall_s", "cpu_s")
        }
        return {**plain, "us_per_token": self.us_per_token, **spreads, "errors": self.errors}


def spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"p50": float("nan"), "p99": float("nan"), "max": float("nan")}
    p50, p99, most = np.percentile(np.asarray(values), (50, 99, 100))
    return {"p50": float(p50), "p99": float(p99), "max": float(most)}


def measure(
    ways: Sequence[Way], loads: Sequence[tuple[int, bool]], rounds: int, seconds: float, logs: Path
) -> list[Relayed]:
    """loads: (streams, whether they are paced or flat out). The ways take turns at each load, round after round."""
    found: list[Relayed] = []
    for streams, paced in loads:
        rows = {way.name: Relayed(way.name, way.direct, streams, paced) for way in ways}
        for turn in range(rounds):
            for way in ways:
                one = drive(_plan(way, streams, paced, seconds, turn), way.contender, logs)
                row, pace_ms = rows[way.name], 1e3 * FIRST_S * paced
                row.tokens += one.seen.tokens
                row.wall_s += one.seen.wall_s
                row.cpu_s += one.cpu_s
                row.ttft_ms += [ms - pace_ms for ms in one.seen.ttft_ms]
                row.travelled_ms += one.seen.travelled_ms
                row.gaps_ms += one.seen.gaps_ms
                for end, count in {**one.errors, "refused": one.ended("refused")}.items():
                    if count:
                        row.errors[end] = row.errors.get(end, 0) + count
        found += rows.values()
    return found


def _plan(way: Way, streams: int, paced: bool, seconds: float, turn: int) -> Plan:
    pace = Pace(FIRST_S, GAP_S, NOISE_S) if paced else FLAT_OUT
    warmup_s = seconds / 6
    return Plan(way.door, way.url, pace, TOKENS, streams=streams, duration_s=seconds, warmup_s=warmup_s, seed=turn + 1)


def added_ms(rows: Sequence[Relayed], row: Relayed, figure: str, quantile: str) -> float:
    """A quantile of what was measured behind, less the same quantile of the direct way under the same load."""
    [direct] = [r for r in rows if r.way == row.direct and (r.streams, r.paced) == (row.streams, row.paced)]
    return spread(getattr(row, figure))[quantile] - spread(getattr(direct, figure))[quantile]


def described(rows: Sequence[Relayed]) -> str:
    cells = []
    for row in rows:
        load = f"{row.streams}, {'50/s each' if row.paced else 'flat out'}"
        tokens_per_s = report.number(row.tokens / max(row.wall_s, 1e-9), 0)
        values = []
        for figure in ("ttft_ms", "travelled_ms", "gaps_ms"):
            mine: Mapping[str, float] = spread(getattr(row, figure))
            values += [report.number(mine["p50"], 2), report.number(mine["p99"], 2)]
        added = ["", "", "", ""]
        if row.direct and row.paced:
            pairs = ((figure, q) for figure in ("ttft_ms", "travelled_ms") for q in ("p50", "p99"))
            added = [f"{added_ms(rows, row, figure, q):+.2f}" for figure, q in pairs]
        failed = ", ".join(f"{count} {end}" for end, count in row.errors.items())
        cells.append((row.way, load, tokens_per_s, report.number(row.us_per_token, 0), *values, *added, failed))
    header = ("way", "streams", "tok/s", "CPU µs/tok", "TTFT p50", "p99", "token p50", "p99", "gap p50", "p99")
    return report.table(cells, (*header, "+TTFT p50", "p99", "+token p50", "p99", "errors"))
