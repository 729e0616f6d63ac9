"""Put a load on one contender and measure what its processes use meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.driver import Extent, LoadResult, Share
from benchmarks.gateway.contenders import Contender
from benchmarks.gateway.grpc_target import GrpcTarget
from benchmarks.gateway.http_target import HttpTarget
from benchmarks.gateway.script import Pace, PacedPrompts
from benchmarks.generator_processes import Load, run_apart
from benchmarks.record import Record
from benchmarks.scrape import Sampler
from benchmarks.target import Target
from benchmarks.workload import Workload

SAMPLE_S = 0.25
TIMEOUT_S = 240.0


def load(target: partial[Target], pace: Pace, workload: Workload, extent: Extent) -> Load:
    """Return a load of scripted tokens in a form that can be sent to another process."""
    return Load(workload, extent, target, partial(PacedPrompts, pace), uvloop=True)


def target(protocol: str, url: str, **options: object) -> partial[Target]:
    """Return the maker of a byte-level target. protocol: ``http`` or ``grpc``; url: HOST:PORT."""
    return partial({"http": HttpTarget, "grpc": GrpcTarget}[protocol], url, **options)


@dataclass
class LoadTest:
    """What one load saw, and what the contender's process tree used while it ran.

    result: every request's record.
    warmup_s: requests sent before it are not part of the latencies.
    cpu_s: CPU seconds of all its processes, busiest_s: of the one that used most; rss_before_bytes, peak_rss_bytes:
    resident memory. CPU is nan if it has ended.
    highest: the highest value of each watched gauge.
    alive: whether the contender still ran at the end.
    """

    result: LoadResult
    warmup_s: float = 0.0
    cpu_s: float = 0.0
    busiest_s: float = 0.0
    rss_before_bytes: int = 0
    peak_rss_bytes: int = 0
    highest: dict[str, float] = field(default_factory=dict)
    alive: bool = True

    @property
    def records(self) -> list[Record]:
        return self.result.records

    @property
    def tokens(self) -> int:
        return sum(record.tokens for record in self.records)

    @property
    def wall_s(self) -> float:
        return max((record.ended_s for record in self.records), default=self.result.started_s) - self.result.started_s

    @property
    def us_per_token(self) -> float:
        return 1e6 * self.cpu_s / self.tokens if self.tokens else float("nan")

    @property
    def measured(self) -> list[Record]:
        """Records of the requests that were sent after the warm-up."""
        steady, warm_s = self.result.steady, self.result.started_s + self.warmup_s
        return [record for record in self.records if record.sent_s >= (steady[0] if steady else warm_s)]

    @property
    def ttft_ms(self) -> list[float]:
        return ttft_ms(self.measured)

    @property
    def transit_ms(self) -> list[float]:
        return [seconds * 1e3 for record in self.measured for seconds in record.transit_s]

    @property
    def gaps_ms(self) -> list[float]:
        """Between consecutive tokens of a stream; 0 between tokens of one message."""
        gaps: list[float] = []
        for record in self.measured:
            for gap_s, count in record.gaps:
                gaps += [gap_s * 1e3, *[0.0] * (count - 1)]
            gaps += [0.0] * (record.messages[0][1] - 1 if record.messages else 0)
        return gaps

    @property
    def refused(self) -> list[Record]:
        return [record for record in self.records if record.error_type == "Overloaded"]

    @property
    def errors(self) -> dict[str, int]:
        """Failures by error type, refusals (Overloaded) not counted."""
        return dict(Counter(r.error_type for r in self.records if r.error and r.error_type != "Overloaded"))


def run(one: Load, contender: Contender | None, gauges: Sequence[str] = ()) -> LoadTest:
    """Run one load in a process of its own to its end. Without a contender only the load's own view is returned."""
    watch = _Watch(contender, gauges) if contender else None
    [result] = run_apart([(one, Share())], while_running=watch, timeout_s=TIMEOUT_S)
    found = LoadTest(result, one.extent.warmup_s)
    if contender and watch:
        found.cpu_s, found.busiest_s = watch.cpu_s, watch.busiest_s
        found.rss_before_bytes, found.peak_rss_bytes = watch.before.rss_bytes, watch.peak_bytes
        found.highest, found.alive = watch.highest, contender.alive()
    return found


class _Watch(Sampler):
    """A contender's memory and gauges while a load runs, and the CPU it used."""

    def __init__(self, contender: Contender, gauges: Sequence[str]) -> None:
        super().__init__(SAMPLE_S)
        self._contender, self.cpu_s, self.busiest_s, self.peak_bytes = contender, float("nan"), float("nan"), 0
        self.highest = dict.fromkeys(gauges, 0.0)

    def __enter__(self) -> Sampler:
        self.before, self._cpu_before = self._contender.use(), self._contender.cpu_of_processes()
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        used, now = self._contender.use(), self._contender.cpu_of_processes()
        if self._contender.alive():  # so it was while they were read
            self.cpu_s = used.cpu_s - self.before.cpu_s
            self.busiest_s = max(now[pid] - self._cpu_before.get(pid, 0.0) for pid in now)
        super().__exit__(*exc)

    def sample(self) -> None:
        if self._contender.alive():
            self.peak_bytes = max(self.peak_bytes, self._contender.use().rss_bytes)
            self.highest = {name: max(most, self._contender.gauge(name)) for name, most in self.highest.items()}


def ttft_ms(records: Sequence[Record]) -> list[float]:
    """Milliseconds from the actual send to the first token, of requests that got one."""
    return [seconds * 1e3 for record in records if (seconds := record.ttft_from_send_s) is not None]
