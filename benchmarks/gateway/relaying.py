"""What relaying costs: latency added and CPU per token of every contender, in turns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

from benchmarks import report
from benchmarks.driver import Extent, Load
from benchmarks.figures import spread
from benchmarks.gateway import load_test
from benchmarks.gateway.contenders import Contender
from benchmarks.gateway.script import Pace
from benchmarks.lengths import Fixed
from benchmarks.workload import Workload

FIRST_S, GAP_S, NOISE_S, TOKENS = 0.02, 0.02, 0.008, 32  # of a paced load: 50 tokens/s per stream
MODERATE = 16  # streams
ANSWERS, LIMIT_S = 2, 10.0  # of each stream after its first one, at least; seconds of both, at most
UNPACED = Pace()
LATENCIES = ("ttft_ms", "transit_ms", "gaps_ms")
Loads = Sequence[tuple[int, bool]]  # streams, and whether they are paced


@dataclass(frozen=True)
class RelayPath:
    """One path to the scripted tokens. protocol, url: ``http`` or ``grpc``, HOST:PORT.

    direct: name of the path without the contender that this one is compared with; "" for such a path itself.
    loads: the loads that it gets; None for all.
    workers: of the contender; each has as many streams as the load says. connections: of gRPC, for each worker.
    """

    name: str
    protocol: str
    url: str
    direct: str = ""
    contender: Contender | None = None
    loads: Loads | None = None
    workers: int = 1
    connections: int = 4


@dataclass
class Relayed:
    """One load on one path, over all rounds.

    ttft_ms: from the send, without the script's own delay.
    transit_ms: from the source's write of a token to our read.
    us_of_rounds: CPU microseconds per token, round by round; busiest_us: those of the process that used most.
    """

    path: str
    direct: str
    streams: int
    paced: bool
    tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    ttft_ms: list[float] = field(default_factory=list)
    transit_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    us_of_rounds: list[float] = field(default_factory=list)
    busiest_us: list[float] = field(default_factory=list)

    @property
    def us_per_token(self) -> float:
        return 1e6 * self.cpu_s / self.tokens if self.tokens and self.cpu_s else float("nan")

    def add(self, found: load_test.LoadTest) -> None:
        """Add one round."""
        self.tokens += found.tokens
        self.wall_s += found.wall_s
        self.cpu_s += found.cpu_s
        self.us_of_rounds.append(found.us_per_token if found.cpu_s else float("nan"))
        self.busiest_us.append(1e6 * found.busiest_s / found.tokens if found.tokens else float("nan"))
        self.ttft_ms += [ms - 1e3 * FIRST_S * self.paced for ms in found.ttft_ms]
        self.transit_ms += found.transit_ms
        self.gaps_ms += found.gaps_ms
        self.errors = dict(Counter(self.errors) + Counter(found.errors))

    def to_json(self) -> dict[str, object]:
        """Return the fields, with the spreads in place of the latencies."""
        spreads = {name: asdict(spread(getattr(self, name))) for name in LATENCIES}
        return asdict(self) | {"us_per_token": self.us_per_token} | spreads


def measure(paths: Sequence[RelayPath], loads: Loads, rounds: int, seconds: float) -> Iterator[list[Relayed]]:
    """Measure every path under every load of its, and yield each load's rows. The paths take turns, round after round.

    seconds: of a round, at least, after every stream has had an answer.
    """
    for streams, paced in loads:
        loaded = [path for path in paths if path.loads is None or (streams, paced) in path.loads]
        rows = {path.name: Relayed(path.name, path.direct, streams, paced) for path in loaded}
        for n in range(rounds):
            for path in loaded:
                rows[path.name].add(load_test.run(_load(path, streams, paced, seconds, n), path.contender))
        yield [*rows.values()]


def _load(path: RelayPath, streams: int, paced: bool, seconds: float, seed: int) -> Load:
    pace = Pace(FIRST_S, GAP_S, NOISE_S) if paced else UNPACED
    # Streams that begin together stay together: the first ones begin within a few token gaps.
    stagger_s = min(seconds, max(0.05, 4 * pace.gap_s))
    streams *= path.workers
    workload = Workload(concurrency=streams, output_tokens=Fixed(TOKENS), stagger_s=stagger_s, seed=seed)
    extent = Extent(seconds, LIMIT_S, answers=ANSWERS * streams, most_s=LIMIT_S)
    options = {"connections": path.connections * path.workers} if path.protocol == "grpc" else {}
    return load_test.load(path.protocol, path.url, pace, workload, extent, **options)


def added_ms(rows: Sequence[Relayed], row: Relayed, figure: str, quantile: str) -> float:
    """Return a quantile of a contender's figure minus that of the direct path under the same load."""
    [direct] = [r for r in rows if r.path == row.direct and (r.streams, r.paced) == (row.streams, row.paced)]
    of, without = (getattr(spread(getattr(one, figure)), quantile) for one in (row, direct))
    return of - without


def scalings(rows: Sequence[Relayed], row: Relayed, base: str, workers: int) -> list[float]:
    """Return how many times the tokens of the path ``base`` this one can pass on as many cores as it has ``workers``,
    round by round: by the CPU of all its processes, or by that of the busiest, which has one core."""
    pairs = zip(row.us_of_rounds, row.busiest_us, strict=True)
    limiting = replace(row, us_of_rounds=[max(us, workers * busiest) for us, busiest in pairs])
    return [workers / ratio for ratio in cpu_ratios(rows, limiting, base)]


def cpu_ratios(rows: Sequence[Relayed], row: Relayed, base: str) -> list[float]:
    """Return CPU per token over that of the path ``base`` under the same load, round by round; [] without it.

    inf if this path's contender ended or passed no token; a round in which that of ``base`` did so is left out.
    """
    for other in rows:
        if (other.path, other.streams, other.paced) == (base, row.streams, row.paced):
            pairs = zip(row.us_of_rounds, other.us_of_rounds, strict=True)
            return [mine / theirs if mine > 0 else math.inf for mine, theirs in pairs if theirs > 0]
    return []


def described(rows: Sequence[Relayed]) -> str:
    cells = []
    for row in rows:
        load = f"{row.streams}, {'50/s each' if row.paced else 'unpaced'}"
        tokens_per_s = report.number(row.tokens / max(row.wall_s, 1e-9), 0)
        spreads = [spread(getattr(row, figure)) for figure in LATENCIES]
        values = [report.number(ms, 2) for one in spreads for ms in (one.p50, one.p99)]
        added = ["", "", "", ""]
        if row.direct and row.paced:
            pairs = ((figure, quantile) for figure in LATENCIES[:2] for quantile in ("p50", "p99"))
            added = [f"{added_ms(rows, row, figure, quantile):+.2f}" for figure, quantile in pairs]
        failed = ", ".join(f"{count} {error}" for error, count in row.errors.items())
        cells.append((row.path, load, tokens_per_s, report.number(row.us_per_token, 0), *values, *added, failed))
    header = ("path", "streams", "tok/s", "CPU µs/tok", "TTFT p50", "p99", "token p50", "p99", "gap p50", "p99")
    return report.table(cells, (*header, "+TTFT p50", "p99", "+token p50", "p99", "errors"))
