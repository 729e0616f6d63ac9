"""One run, measured from all sides: the load, the server's own figures, the processes, and whether to believe it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from benchmarks import exposition, figures, fleet, machine, processes, self_check, server_side
from benchmarks.driver import Extent, GeneratorUse
from benchmarks.figures import Figures, Slo
from benchmarks.machine import Company
from benchmarks.processes import Use
from benchmarks.progress import ProgressLine
from benchmarks.record import Record
from benchmarks.self_check import Check
from benchmarks.server_side import GaugeWatch, ServerSide
from benchmarks.workload import Workload
from contract.errors import Unavailable


@dataclass(frozen=True)
class Where:
    """The server under test. engine_folder: whose tokenizer counts prompts, if known."""

    url: str
    metrics_url: str | None = None
    engine_folder: Path | None = None


@dataclass
class Measurement:
    """started_s: instant zero on the monotonic clock. processes: CPU used during the run; empty for a remote server."""

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
    company: Company
    checks: list[Check]
    records: list[Record] = field(repr=False)

    @property
    def tokens(self) -> int:
        return sum(record.tokens for record in self.records)

    @property
    def cpu_us_per_token(self) -> dict[str, float]:
        """CPU of each role over all tokens of the run, the client's included. Empty if nothing is known."""
        if not self.tokens or not self.processes:
            return {}
        client_s = sum(use.cpu_s for use in self.generators)
        spent = {name: use.cpu_s for name, use in self.processes.items()} | {"client": client_s}
        return {name: 1e6 * cpu_s / self.tokens for name, cpu_s in spent.items()}

    @property
    def serving_us_per_token(self) -> float:
        """CPU of everything but the engine worker and the client, per token; nan if nothing is known."""
        if not self.tokens or not self.processes:
            return float("nan")
        return 1e6 * processes.serving_cpu_s(self.processes) / self.tokens

    def to_json(self, with_records: bool = True) -> dict[str, object]:
        return {
            "name": self.name,
            "when": self.when,
            "conditions": self.conditions,
            "workload": self.workload,
            "started_s": self.started_s,
            "window": list(self.window),
            "figures": self.figures.to_json(),
            "server": self.server.to_json() if self.server else None,
            "processes": {name: use.to_json() for name, use in self.processes.items()},
            "cpu_us_per_token": self.cpu_us_per_token,
            "serving_us_per_token": self.serving_us_per_token,
            "generators": [{"cpu_s": use.cpu_s, "wall_s": use.wall_s} for use in self.generators],
            "company": asdict(self.company),
            "checks": [check.to_json() for check in self.checks],
            "verdict": self_check.verdict(self.checks),
            "records": [record.to_json() for record in self.records] if with_records else [],
        }


def measure(
    name: str,
    workload: Workload,
    where: Where,
    extent: Extent,
    *,
    slo: Slo = Slo(),  # noqa: B008 - frozen
    generators: int = 1,
    conditions: Mapping[str, object] | None = None,
) -> Measurement:
    """Drives the workload once and joins what everybody saw of it."""
    order = fleet.Order(where.url, workload, extent, where.engine_folder)
    root = processes.listener(_port(where.url)) if _is_here(where.url) else None
    before_page = _page(where.metrics_url, settled=False)
    watch = GaugeWatch(where.metrics_url) if before_page is not None else None
    with ExitStack() as stack:
        progress = stack.enter_context(ProgressLine(name))
        if watch is not None:
            stack.enter_context(watch)
        before_cpu = machine.cpu_time()
        before_use = processes.use(root) if root else {}
        driven = fleet.run(order, generators, progress)
        used = processes.grown(before_use, processes.use(root)) if root else {}
        ours_s = sum(use.cpu_s for use in [*used.values(), *driven.generators])
        company = machine.company(before_cpu, machine.cpu_time(), ours_s)
    after_page = _page(where.metrics_url, settled=True)
    server = None
    if before_page is not None and after_page is not None:
        server = server_side.difference(before_page, after_page, watch.seen)
    window = figures.window_of(driven.records, driven.started_s, extent.warmup_s, extent.duration_s)
    if extent.requests is not None:  # they may have been over before the time was
        last_s = max((record.ended_s for record in driven.records), default=window[1])
        window = (window[0], min(window[1], last_s))
    return Measurement(
        name=name,
        when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        conditions=machine.described() | {"url": where.url, "generators": generators} | dict(conditions or {}),
        workload=workload.described(),
        started_s=driven.started_s,
        window=window,
        figures=figures.compute(driven.records, window, slo),
        server=server,
        processes=used,
        generators=driven.generators,
        company=company,
        checks=self_check.checks(driven.records, server, driven.generators, company, workload.arrivals is not None),
        records=driven.records,
    )


def measure_unsaturated(name: str, workload: Workload, where: Where, extent: Extent, **options) -> Measurement:
    """As ``measure``, again with twice the generator processes while the generator was what limited the run."""
    most = max(1, (os.cpu_count() or 1) // 2)
    generators = 1
    found = measure(name, workload, where, extent, generators=generators, **options)
    while self_check.saturated(found.checks) and generators * 2 <= most:
        generators *= 2
        found = measure(f"{name}, {generators} generators", workload, where, extent, generators=generators, **options)
    return found


def save(found: list[Measurement], folder: Path, kind: str) -> Path:
    """``folder``/``kind``.json with everything, the records included."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}.json"
    path.write_text(json.dumps([one.to_json() for one in found]) + "\n")
    return path


def _page(url: str | None, settled: bool) -> exposition.Page | None:
    if url is None:
        return None
    try:
        return server_side.settled(url) if settled else exposition.fetch(url)
    except Unavailable:
        return None


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def _is_here(url: str) -> bool:
    host, _, port = url.rpartition(":")
    return port.isdecimal() and host in ("127.0.0.1", "localhost", "0.0.0.0", "[::1]")
