"""Measure one run: the load, the server's own metrics, the processes, and the self-checks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import driver, figures, machine, processes, progress, scrape, self_check
from benchmarks.driver import Extent, GeneratorUse, Load
from benchmarks.figures import Figures, Slo
from benchmarks.machine import HostLoad
from benchmarks.processes import Use
from benchmarks.prompts import Prompts
from benchmarks.record import Record
from benchmarks.scrape import Gauges, ServerSide
from benchmarks.self_check import Check
from benchmarks.target import EnsembleTarget
from benchmarks.workload import Workload
from contract.errors import InvalidArgument, Unavailable
from contract.prometheus import Metrics


@dataclass(frozen=True)
class ServerUnderTest:
    """Where the server is: HOST:PORT of its gRPC endpoint, its metrics if known.

    engine_folder: its tokenizer.json counts prompt tokens, if known.
    """

    url: str
    metrics_url: str | None = None
    engine_folder: Path | None = None

    def known_engine(self) -> Path:
        """Return the engine's folder. Raises InvalidArgument: it is not known."""
        if self.engine_folder is None:
            raise InvalidArgument("engine", "must name the replica's engine: --engine, or --tokenizer FOLDER")
        return self.engine_folder


@dataclass
class Measurement:
    """Everything known about one run.

    when: UTC, ISO 8601. conditions, workload: descriptions for reports.
    started_s, window: on the monotonic clock, instant zero, and first and last instant of the figures.
    server: its own metrics; None if they cannot be read.
    processes: use during the run by role; empty for a remote server.
    """

    name: str
    when: str
    conditions: dict[str, object]
    workload: dict[str, object]
    started_s: float
    window: tuple[float, float]
    figures: Figures
    server: ServerSide | None
    processes: dict[str, Use]
    generators: list[GeneratorUse]
    host_load: HostLoad
    checks: list[Check]
    records: list[Record] = field(repr=False)

    @property
    def tokens(self) -> int:
        return sum(record.tokens for record in self.records)

    @property
    def cpu_us_per_token(self) -> dict[str, float]:
        """CPU microseconds per output token by role, the client included; empty for a remote server."""
        if not self.tokens or not self.processes:
            return {}
        spent = {name: use.cpu_s for name, use in self.processes.items()}
        spent["client"] = sum(use.cpu_s for use in self.generators)
        return {name: 1e6 * cpu_s / self.tokens for name, cpu_s in spent.items()}

    @property
    def serving_us_per_token(self) -> float:
        """CPU microseconds per output token of all roles but engine worker and client; nan if unknown."""
        if not self.tokens or not self.processes:
            return float("nan")
        return 1e6 * processes.serving_cpu_s(self.processes) / self.tokens

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {
            "cpu_us_per_token": self.cpu_us_per_token,
            "serving_us_per_token": self.serving_us_per_token,
            "generators": [{"cpu_s": use.cpu_s, "wall_s": use.wall_s} for use in self.generators],
            "verdict": self_check.verdict(self.checks),
        }


def measure(
    name: str,
    workload: Workload,
    server: ServerUnderTest,
    extent: Extent,
    *,
    slo: Slo = Slo(),  # noqa: B008 - frozen
    generators: int = 1,
    conditions: Mapping[str, object] | None = None,
) -> Measurement:
    """Drive the workload once and collect what client, server and machine recorded."""
    target, prompts = partial(EnsembleTarget, server.url), partial(Prompts.for_engine, server.engine_folder)
    load = Load(workload, extent, target, prompts)
    root = processes.listener(server.url)
    before = _scraped(server.metrics_url, scrape.fetch)
    watch: AbstractContextManager[Gauges] = nullcontext([])
    if server.metrics_url and before is not None:
        watch = scrape.watched_gauges(server.metrics_url)
    progress.show(name)
    with watch as gauges:
        machine_watch = machine.Watch()
        before_use = processes.use(root) if root else {}
        result = driver.run(load, generators)
        used = processes.difference(before_use, processes.use(root)) if root else {}
        host_load = machine_watch.load(sum(use.cpu_s for use in used.values()))
    after = _scraped(server.metrics_url, scrape.settled)
    own = None if before is None or after is None else scrape.difference(before, after, gauges)
    window = figures.window_of(result.records, result.started_s, extent.warmup_s, extent.duration_s)
    if extent.requests is not None:  # the last may end before the duration does
        last_s = max((record.ended_s for record in result.records), default=window[1])
        window = (window[0], min(window[1], last_s))
    return Measurement(
        name=name,
        when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        conditions=machine.described() | {"url": server.url, "generators": generators} | dict(conditions or {}),
        workload=workload.described(),
        started_s=result.started_s,
        window=window,
        figures=figures.compute(result.records, window, slo),
        server=own,
        processes=used,
        generators=result.generators,
        host_load=host_load,
        checks=self_check.checks(result.records, own, result.generators, host_load, workload.arrivals is not None),
        records=result.records,
    )


def measure_unsaturated(
    name: str, workload: Workload, server: ServerUnderTest, extent: Extent, **options: Any
) -> Measurement:
    """As ``measure``; repeat with twice the generator processes while the generator limited the run."""
    generators = 1
    run = measure(name, workload, server, extent, generators=generators, **options)
    while self_check.saturated(run.checks) and generators * 4 <= len(machine.cores()):
        generators *= 2
        other = replace(workload, seed=workload.seed + 1_000_000 * generators)  # those are in the prefix cache now
        run = measure(f"{name}, {generators} generators", other, server, extent, generators=generators, **options)
    return run


def save(runs: list[Measurement], folder: Path, kind: str) -> Path:
    """Write ``folder``/``kind``.json with everything, the records included."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}.json"
    path.write_text(json.dumps([run.to_json() for run in runs]) + "\n")
    return path


def _scraped(url: str | None, fetch: Callable[[str], Metrics]) -> Metrics | None:
    with suppress(Unavailable):
        return None if url is None else fetch(url)
    return None
