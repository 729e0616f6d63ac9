"""Put a load on one contender and measure what its processes use meanwhile."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.driver import Extent, Load, LoadResult, Share, run_apart
from benchmarks.gateway.byte_target import GrpcTarget, HttpTarget
from benchmarks.gateway.contenders import Contender
from benchmarks.gateway.script import Pace, PacedPrompts
from benchmarks.record import Record
from benchmarks.scrape import sampling
from benchmarks.target import Target
from benchmarks.workload import Workload

SAMPLE_S = 0.25
TIMEOUT_S = 240.0


def load(protocol: str, url: str, pace: Pace, workload: Workload, extent: Extent, **options: object) -> Load:
    """Return a load of scripted tokens at HOST:PORT, over ``http`` or ``grpc``. options: of the target."""
    target: partial[Target] = partial({"http": HttpTarget, "grpc": GrpcTarget}[protocol], url, **options)
    return Load(workload, extent, target, partial(PacedPrompts, pace), uvloop=True)


@dataclass
class LoadTest:
    """What one load saw, and what the contender's process tree used while it ran.

    warmup_s: requests sent before it are not part of the latencies.
    cpu_s: CPU seconds of all its processes, busiest_s: of the one that used most; nan if it has ended.
    highest: the highest value of each watched gauge. alive: whether the contender still ran at the end.
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
        gaps = [gap_s * 1e3 for record in self.measured for gap_s, _ in record.gaps]
        joined = sum(count - 1 for record in self.measured for _, count in record.messages)
        return gaps + [0.0] * joined

    @property
    def errors(self) -> dict[str, int]:
        """Failures by error type; refusals are Overloaded."""
        return dict(Counter(record.error_type for record in self.records if record.error))


def run(one: Load, contender: Contender | None, gauges: Sequence[str] = ()) -> LoadTest:
    """Run one load in a process of its own to its end. Without a contender only the load's own view is returned."""
    used: dict[str, Any] = {}
    watch = watching(contender, gauges, used) if contender else None
    [result] = run_apart([(one, Share())], while_running=watch, timeout_s=TIMEOUT_S)
    return LoadTest(result, one.extent.warmup_s, **used)


@contextmanager
def watching(contender: Contender, gauges: Sequence[str], used: dict[str, Any]) -> Iterator[None]:
    """Fill ``used`` with what LoadTest has of a contender: its memory and gauges meanwhile, and the CPU it used."""
    before, cpu_before = contender.use(), contender.cpu_of_processes()
    used |= {"rss_before_bytes": before.rss_bytes, "peak_rss_bytes": 0, "highest": dict.fromkeys(gauges, 0.0)}

    def sample() -> None:
        if contender.alive():
            used["peak_rss_bytes"] = max(used["peak_rss_bytes"], contender.use().rss_bytes)
            used["highest"] = {name: max(most, contender.gauge(name)) for name, most in used["highest"].items()}

    with sampling(SAMPLE_S, sample):
        yield
    after, now = contender.use(), contender.cpu_of_processes()
    used |= {"cpu_s": math.nan, "busiest_s": math.nan, "alive": contender.alive()}
    if used["alive"]:  # so it was while they were read
        used["cpu_s"] = after.cpu_s - before.cpu_s
        used["busiest_s"] = max(now[pid] - cpu_before.get(pid, 0.0) for pid in now)


def ttft_ms(records: Sequence[Record]) -> list[float]:
    """Milliseconds from the actual send to the first token, of requests that got one."""
    return [seconds * 1e3 for record in records if (seconds := record.ttft_from_send_s) is not None]
