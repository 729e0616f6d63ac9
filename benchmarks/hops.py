"""Measure each hop of the ensemble: CPU per response by process, and the phases of the time to first token.

The model ``engine`` and the ensemble take turns, on a server that sends a response for every token and on one that
coalesces. What the ensemble costs more is the detokenizer's hop: its process, and its share of tritonserver.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from benchmarks import figures, machine, report, scrape
from benchmarks.driver import Extent, drive
from benchmarks.efficiency import EVERY_TOKEN_ENV, Batch, ServingPath, in_turns
from benchmarks.lengths import Fixed
from benchmarks.measurement import ServerUnderTest
from benchmarks.prompts import Prompts
from benchmarks.record import Record
from benchmarks.server_process import ENGINES, running_server
from benchmarks.target import EngineTarget, EnsembleTarget
from benchmarks.workload import Workload
from contract.prometheus import Metrics

PARTS = ("tritonserver", "tokenizer", "engine stub", "detokenizer")
MODELS = ("engine", "ensemble")
MODES: dict[str, dict[str, str]] = {"every token": EVERY_TOKEN_ENV, "coalesced": {}}
INPUT_TOKENS = 64
ALONE_REQUESTS = 6


def costs(
    servers: dict[str, ServerUnderTest], prompts: Prompts, concurrency: int, tokens: int, rounds: int
) -> dict[tuple[str, str], list[Batch]]:
    """Return the batches by (mode, model). The first round warms up."""
    paths: dict[tuple[str, str], ServingPath] = {}
    for mode, server in servers.items():
        ensemble = EnsembleTarget(server.url, timings=False, model="ensemble")
        for model, target in (("engine", EngineTarget(server.url, prompts)), ("ensemble", ensemble)):
            paths[mode, model] = ServingPath(f"{model}, {mode}", server, target, prompts)
    return in_turns(paths, (concurrency,), rounds, (INPUT_TOKENS, tokens))[concurrency]


def first_token(server: ServerUnderTest, prompts: Prompts, concurrency: int) -> list[tuple[str, float, float]]:
    """Return (phase, mean seconds, share of the client's TTFT) of the first token's path.

    The inner phases are from the server's histograms; first and last use the client's clock, on one machine the same.
    """

    async def send() -> tuple[Metrics, list[Record]]:
        loads = [Workload(concurrency, None, Fixed(INPUT_TOKENS), Fixed(16), seed=seed) for seed in (1, 2)]
        async with EnsembleTarget(server.url, model="ensemble") as target:
            await drive(loads[0], target, prompts, Extent(None, 0.0, concurrency))
            before = await asyncio.to_thread(scrape.settled, metrics_url)
            extent = Extent(None, 0.0, ALONE_REQUESTS * concurrency)
            return before, (await drive(loads[1], target, prompts, extent)).records

    metrics_url = server.metrics_url or ""
    before, records = asyncio.run(send())
    own = scrape.difference(before, scrape.settled(metrics_url))
    ttft_s = statistics.mean(record.ttft_from_send_s or math.nan for record in records)
    arrival_s = statistics.mean(r.timings.arrival_ns / 1e9 - r.sent_s if r.timings else math.nan for r in records)
    parts = [("client → gRPC → tokenizer begins", arrival_s)]
    parts += [(name, own.phases[name].mean_s) for name in scrape.PHASES]
    parts.append(("ensemble → gRPC → client", ttft_s - sum(seconds for _, seconds in parts)))
    return [(name, seconds, seconds / ttft_s) for name, seconds in (*parts, ("time to first token", ttft_s))]


def described(found: dict[tuple[str, str], list[Batch]], concurrency: int) -> str:
    rows: list[tuple] = []
    for mode in MODES:
        per = {}
        for model in MODELS:
            of = [(batch.serving_cpu_s, batch.messages) for batch in found[mode, model]]
            per[model] = {part: statistics.median(1e6 * s.get(part, 0.0) / count for s, count in of) for part in PARTS}
        for model, spent in per.items():
            batches = found[mode, model]
            client = statistics.median(1e6 * batch.client_cpu_s / batch.messages for batch in batches)
            tokens_per_message = statistics.median(batch.tokens / batch.messages for batch in batches)
            per_token = statistics.median(batch.serving_us for batch in batches)
            last = report.number(client), report.number(tokens_per_message, 2), report.number(per_token)
            rows.append((f"{model}, {mode}", *_cells(spent), *last))
        hop = {part: per["ensemble"][part] - per["engine"][part] for part in PARTS}
        rows.append(("  detokenizer's hop", *_cells(hop), "", "", ""))
    header = (f"CPU µs per response at {concurrency}", *PARTS, "together", "client", "tok/msg", "µs per token")
    return report.table(rows, header)


def _cells(spent: dict[str, float]) -> list[str]:
    return [report.number(us) for us in (*spent.values(), sum(spent.values()))]


def run(engine: str, concurrencies: Sequence[int], tokens: int, rounds: int, out: Path) -> int:
    """Measure, print, write hops.json."""
    prompts = Prompts.for_engine(ENGINES / engine)
    conditions = machine.described()
    print(f"{engine}: {tokens} tokens out, {rounds} rounds, medians; {report.on(conditions)}")
    kept: dict[str, object] = {"conditions": conditions, "engine": engine}
    spent: dict[str, list[float]] = {}
    with ExitStack() as stack:
        servers = {mode: stack.enter_context(running_server(engine, env)) for mode, env in MODES.items()}
        for concurrency in concurrencies:
            found = costs(servers, prompts, concurrency, tokens, rounds)
            print(f"\n{described(found, concurrency)}")
            phases = first_token(servers["coalesced"], prompts, concurrency)
            cells = [(name, report.ms(seconds), f"{share:.0%}") for name, seconds, share in phases]
            print("\n" + report.table(cells, (f"time to first token at {concurrency}", "mean ms", "share")), flush=True)
            named = {f"{model}, {mode}": batches for (mode, model), batches in found.items()}
            batches = {name: [asdict(batch) for batch in of] for name, of in named.items()}
            kept[str(concurrency)] = {"batches": batches, "first_token": phases}
            for name, of in named.items():
                spent[f"CPU of a response, µs: {name}, {concurrency}"] = [batch.response_us for batch in of]
    kept["compared"] = figures.compared(figures.LOWER, spent)
    return report.write_json(kept, out, "hops")
