"""Compare our load generator with NVIDIA's perf_analyzer and AIPerf: the same load, server and machine, in turns.

perf_analyzer and ours send the same prompts over gRPC to the ensemble; AIPerf and ours send prompts of equal length
over HTTP to the gateway. A figure agrees if the clients' medians differ by no more than their own rounds do.
"""

from __future__ import annotations

import asyncio
import csv
import json
import os
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import aiperf, environments, figures, machine, peer_servers, perf_analyzer, report
from benchmarks.driver import Extent, drive
from benchmarks.lengths import Fixed
from benchmarks.openai_target import OpenAITarget
from benchmarks.prompts import Prompts, PromptSource
from benchmarks.server_process import ENGINES, running_server
from benchmarks.target import EnsembleTarget, Target
from benchmarks.workload import Workload
from contract.errors import EngineFailed, NotFound

TOKENS = (128, 64)  # of a prompt and of an answer
WARMUP = 4  # requests before the first round
PERF_ANALYZER, AIPERF = "perf_analyzer", "AIPerf"
FIGURES = ("requests/s", "latency p50, ms", "TTFT p50, ms")
Found = dict[str, float]  # by the figure's name
Client = Callable[[int, int], Found]  # measures one closed load: requests in flight, requests


@dataclass
class Comparison:
    """One load by our client and by another. ours, theirs: each figure's value in every round."""

    client: str
    concurrency: int
    ours: dict[str, list[float]] = field(default_factory=dict)
    theirs: dict[str, list[float]] = field(default_factory=dict)

    def add(self, ours: Found, theirs: Found) -> None:
        """Add a round: the figures that both have."""
        for name in theirs:
            self.ours.setdefault(name, []).append(ours[name])
            self.theirs.setdefault(name, []).append(theirs[name])

    def ratio(self, name: str) -> float:
        """Return their median over ours."""
        return statistics.median(self.theirs[name]) / statistics.median(self.ours[name])

    def noise(self, name: str) -> float:
        """Return by how much the rounds of either client differ."""
        return max(figures.noise(values) for values in (self.ours[name], self.theirs[name]))

    def agrees(self, name: str) -> bool:
        ratio = self.ratio(name)
        return max(ratio, 1 / ratio) - 1 <= self.noise(name)


class GivenPrompts:
    """A source of prompts that draws from those of perf_analyzer's input file."""

    def __init__(self, file: Path) -> None:
        self._texts = [one["text_input"][0] for one in json.loads(file.read_text())["data"]]

    def text(self, rng: random.Random, tokens: int, prefix: str = "") -> str:
        return rng.choice(self._texts)


def ours(target: Target, prompts: PromptSource, concurrency: int, requests: int, seed: int) -> Found:
    """Return the figures of one closed load by our generator. Raises EngineFailed if a request fails."""

    async def send() -> Found:
        workload = Workload(concurrency, None, Fixed(TOKENS[0]), Fixed(TOKENS[1]), seed=seed)
        try:
            result = await drive(workload, target, prompts, Extent(None, 0.0, requests))
        finally:
            await target.close()
        records = result.records
        if failed := [record.error for record in records if not record.ok]:
            raise EngineFailed(f"{len(failed)} requests failed, the first with {failed[0]}")
        wall_s = max(record.ended_s for record in records) - min(record.sent_s for record in records)
        latency = figures.spread([record.ended_s - record.sent_s for record in records])
        ttft = figures.spread([record.ttft_from_send_s or 0.0 for record in records])
        values = len(records) / wall_s, 1e3 * latency.p50, 1e3 * ttft.p50
        return dict(zip(FIGURES, values, strict=True))

    return asyncio.run(send())


def by_perf_analyzer(url: str, made: environments.Environment, out: Path) -> Client:
    """Return what measures one closed load of so many requests with perf_analyzer."""
    environ = perf_analyzer.variables(made)

    def measure(concurrency: int, requests: int) -> Found:
        load, path = ["--concurrency-range", str(concurrency)], out / "perf_analyzer"
        argv = perf_analyzer.command(made.program("perf_analyzer"), url, "streaming", load, path, requests)
        _checked(PERF_ANALYZER, argv, path.with_suffix(".txt"), environ)
        with path.with_suffix(".csv").open(newline="") as file:
            row = next(csv.DictReader(file))
        values = float(row["Inferences/Second"]), float(row["p50 latency"]) / 1e3
        return dict(zip(FIGURES[:2], values, strict=True))

    return measure


def by_aiperf(url: str, engine: str, out: Path) -> Client:
    """Return what measures one closed load of so many requests with AIPerf."""
    environ = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    names = {"request_throughput": "avg", "request_latency": "p50", "time_to_first_token": "p50"}

    def measure(concurrency: int, requests: int) -> Found:
        load = ["--concurrency", str(concurrency), "--request-count", str(requests)]
        argv = aiperf.command(url, engine, ENGINES / engine, load, TOKENS, out / "aiperf")
        _checked(AIPERF, argv, out / "aiperf.txt", environ)
        table = json.loads(next((out / "aiperf").rglob(aiperf.RESULT)).read_text())
        values = [float(table[name][kind]) for name, kind in names.items()]
        return dict(zip(FIGURES, values, strict=True))

    return measure


def _checked(tool: str, argv: Sequence[str], log: Path, environ: Mapping[str, str]) -> None:
    """Run a tool. Raises EngineFailed with the end of its output."""
    if failures := environments.measure(tool, [("load", argv, log)], environ):
        raise EngineFailed(f"{tool}: {failures[0]}; see {log}")


def run(engine: str, concurrencies: Sequence[int], requests: int, rounds: int, out: Path) -> int:
    """Measure, print, write clients.json. Returns 1 if none of the other clients can run here."""
    out.mkdir(parents=True, exist_ok=True)
    conditions, skipped = machine.described(), dict[str, str]()
    found: list[Comparison] = []
    print(report.on(conditions), flush=True)

    def compare(client: str, target: Callable[[], Target], prompts: PromptSource, theirs: Client) -> None:
        ours(target(), prompts, 1, WARMUP, 0)
        for concurrency in concurrencies:
            count, one = max(requests, 4 * concurrency), Comparison(client, concurrency)
            for n in range(rounds):
                one.add(ours(target(), prompts, concurrency, count, 1000 * n + concurrency), theirs(concurrency, count))
            found.append(one)
            print(described([one]), flush=True)  # a run that is cut off has shown what it measured

    try:
        made = perf_analyzer.environment()
        made.ensure()
        with running_server(engine) as server:
            theirs = by_perf_analyzer(server.url, made, out)
            given = GivenPrompts(perf_analyzer.INPUTS / "streaming.json")
            compare(PERF_ANALYZER, lambda: EnsembleTarget(server.url, timings=False), given, theirs)
    except (NotFound, EngineFailed) as error:
        skipped[PERF_ANALYZER] = str(error)
    try:
        aiperf.ENVIRONMENT.ensure()
        with ExitStack() as stack:
            url = stack.enter_context(peer_servers.gateway(engine))
            prompts = Prompts.for_engine(ENGINES / engine)
            theirs = by_aiperf(url, engine, out)
            compare(AIPERF, lambda: OpenAITarget(url, engine, {"ignore_eos": True}), prompts, theirs)
    except (NotFound, EngineFailed) as error:
        skipped[AIPERF] = str(error)
    for client, reason in skipped.items():
        print(f"  skipped: {client}: {reason}")
    table: dict[str, object] = {
        "conditions": conditions,
        "comparisons": [asdict(one) for one in found],
        "skipped": skipped,
    }
    table["compared"] = compared(found)
    report.write_json(table, out, "clients")
    return 0 if found else 1


def described(found: Sequence[Comparison]) -> str:
    rows = []
    for one in found:
        for name in one.theirs:
            medians = (f"{statistics.median(of[name]):.1f}" for of in (one.ours, one.theirs))
            verdict = f"{one.ratio(name):.3f}", f"{one.noise(name):.0%}", "yes" if one.agrees(name) else "NO"
            rows.append((f"{one.client}, {one.concurrency}: {name}", *medians, *verdict))
    header = ("client, streams: figure", "ours", "theirs", "theirs/ours", "noise", "agree within noise")
    return report.table(rows, header)


def compared(found: Sequence[Comparison]) -> dict[str, dict[str, object]]:
    """Return how far the clients are apart, by figure, for ``benchmarks.suite``."""
    apart: dict[str, dict[str, object]] = {}
    for one in found:
        for name in one.theirs:
            pairs = [theirs / mine for theirs, mine in zip(one.theirs[name], one.ours[name], strict=True)]
            label = f"clients apart, factor: {one.client}, {one.concurrency}, {name}"
            apart[label] = {"better": "lower", "values": [max(ratio, 1 / ratio) for ratio in pairs]}
    return apart
