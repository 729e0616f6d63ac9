"""What every hop of the ensemble costs: CPU per response by process, and the way of the first token in time.

The same answers are asked of the engine's own door and of the ensemble, turn by turn, from one server that sends a
response for every token and from one that coalesces. What the ensemble takes beyond the engine is the detokenizer's
hop: its process, and the scheduling and copying for it in tritonserver.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from benchmarks import exposition, machine, report, server_side
from benchmarks.driver import Extent, drive
from benchmarks.efficiency import EVERY_TOKEN_ENV, Wave, Way
from benchmarks.engine_door import EngineDoor
from benchmarks.lengths import Fixed
from benchmarks.measurement import Where
from benchmarks.prompts import Prompts
from benchmarks.record import Record
from benchmarks.served import ENGINES, served
from benchmarks.target import Ensemble
from benchmarks.workload import Workload

PARTS = ("tritonserver", "tokenizer", "engine stub", "detokenizer")
DOORS = ("engine", "ensemble")
MODES = {"every token": EVERY_TOKEN_ENV, "coalesced": {}}
INPUT_TOKENS = 64
ALONE_REQUESTS = 6


def costs(
    servers: dict[str, Where], prompts: Prompts, concurrency: int, tokens: int, rounds: int
) -> dict[tuple[str, str], list[Wave]]:
    """(mode, door) → waves. The first turn warms up."""
    loop = asyncio.new_event_loop()
    ways = {}
    for mode, where in servers.items():
        ways[mode, "engine"] = Way(f"engine, {mode}", where, EngineDoor(where.url, prompts), prompts)
        ways[mode, "ensemble"] = Way(f"ensemble, {mode}", where, Ensemble(where.url, timings=False), prompts)
    found: dict[tuple[str, str], list[Wave]] = {key: [] for key in ways}
    try:
        for turn in range(rounds + 1):
            for nth, (key, way) in enumerate(ways.items()):
                seed = turn * 1000 + concurrency * 10 + nth
                load = Workload(concurrency, None, Fixed(INPUT_TOKENS), Fixed(tokens), seed=seed)
                wave = loop.run_until_complete(way.wave(load, concurrency, turn))
                found[key] += [wave] if turn else []
    finally:
        for way in ways.values():
            loop.run_until_complete(way.close())
        loop.close()
    return found


def first_token(where: Where, prompts: Prompts, concurrency: int) -> list[tuple[str, float, float]]:
    """(part of the way, mean seconds, share of the client's TTFT). The engine's and the detokenizer's instants are from
    the server's histograms, the ends from the client's own clock, which is the engine's too on one machine."""

    async def ask() -> list[Record]:
        target = Ensemble(where.url)
        try:
            await drive(_alike(concurrency, 1), target, prompts, Extent(None, 0.0, concurrency))
            before.append(await asyncio.to_thread(server_side.settled, where.metrics_url))
            load = _alike(concurrency, 2)
            return (await drive(load, target, prompts, Extent(None, 0.0, ALONE_REQUESTS * concurrency))).records
        finally:
            await target.close()

    before: list[exposition.Page] = []
    records = asyncio.run(ask())
    server = server_side.difference(before[0], server_side.settled(where.metrics_url))
    whole_s = statistics.mean(record.first_s - record.sent_s for record in records)
    there_s = statistics.mean(record.timings.arrival_ns / 1e9 - record.sent_s for record in records)
    parts = [("client → gRPC → tokenizer begins", there_s)]
    parts += [(name, server.phases[name].mean_s) for name in server_side.PHASES]
    parts.append(("ensemble → gRPC → client", whole_s - sum(seconds for _, seconds in parts)))
    return [(name, seconds, seconds / whole_s) for name, seconds in (*parts, ("time to first token", whole_s))]


def _alike(concurrency: int, seed: int) -> Workload:
    return Workload(concurrency, None, Fixed(INPUT_TOKENS), Fixed(16), seed=seed)


def described(found: dict[tuple[str, str], list[Wave]], concurrency: int) -> str:
    rows = []
    for mode in MODES:
        per = {door: _per_message(found[mode, door]) for door in DOORS}
        for door in DOORS:
            waves = found[mode, door]
            cells = [report.number(per[door][part]) for part in PARTS]
            client = statistics.median(1e6 * wave.client_cpu_s / wave.messages for wave in waves)
            together = sum(per[door].values())
            density = statistics.median(wave.tokens / wave.messages for wave in waves)
            per_token = report.number(statistics.median(wave.serving_us for wave in waves))
            rows.append((f"{door}, {mode}", *cells, report.number(together), report.number(client)))
            rows[-1] += (report.number(density, 2), per_token)
        hop = {part: per["ensemble"][part] - per["engine"][part] for part in PARTS}
        cells = [report.number(hop[part]) for part in PARTS]
        rows.append(("  the hop between", *cells, report.number(sum(hop.values())), "", "", ""))
    header = (f"CPU µs per response at {concurrency}", *PARTS, "together", "client", "tok/msg", "µs per token")
    return report.table(rows, header)


def run(engine: str, concurrencies: Sequence[int], tokens: int, rounds: int, out: Path) -> int:
    """Measures, prints, writes hops.json."""
    prompts = Prompts.for_engine(ENGINES / engine)
    conditions = machine.described()
    print(f"{engine}: {tokens} tokens out, {rounds} rounds, medians; {report.on(conditions)}")
    kept: dict[str, object] = {"conditions": conditions, "engine": engine}
    with ExitStack() as stack:
        servers = {mode: stack.enter_context(served(engine, env)) for mode, env in MODES.items()}
        for concurrency in concurrencies:
            found = costs(servers, prompts, concurrency, tokens, rounds)
            print(f"\n{described(found, concurrency)}")
            way = first_token(servers["coalesced"], prompts, concurrency)
            cells = [(name, report.ms(seconds), f"{share:.0%}") for name, seconds, share in way]
            print("\n" + report.table(cells, (f"the first token at {concurrency}", "mean ms", "share")), flush=True)
            waves = {f"{door}, {mode}": [asdict(wave) for wave in waves] for (mode, door), waves in found.items()}
            kept[str(concurrency)] = {"waves": waves, "first_token": way}
    out.mkdir(parents=True, exist_ok=True)
    (out / "hops.json").write_text(json.dumps(kept) + "\n")
    print(f"\n  written: {out / 'hops.json'}")
    return 0


def _per_message(waves: Sequence[Wave]) -> dict[str, float]:
    return {
        part: statistics.median(1e6 * wave.serving_cpu_s.get(part, 0.0) / wave.messages for wave in waves)
        for part in PARTS
    }
