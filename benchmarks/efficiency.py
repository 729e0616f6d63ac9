"""Measure the cost of serving: raw pipeline, engine over gRPC and ensemble over gRPC, in one run.

They take turns at every concurrency, round after round, on equal work: as many requests with prompts of equal length
and greedy answers of fixed length. Ratios compare batches of one round, so that a noisy machine disturbs both sides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median
from types import MappingProxyType
from typing import TypeVar

from benchmarks import checkpoint, figures, machine, processes, progress, report, scrape
from benchmarks.driver import Extent, drive
from benchmarks.lengths import Fixed
from benchmarks.measurement import ServerUnderTest
from benchmarks.prompts import Prompts
from benchmarks.raw_engine import RawEngine
from benchmarks.scrape import COALESCING_WAIT, Histogram, settled
from benchmarks.server_process import ENGINES, running_server
from benchmarks.target import EngineTarget, EnsembleTarget, Target
from benchmarks.workload import Workload
from contract import manifest, packed_delta
from contract.errors import InvalidArgument
from contract.prometheus import Metrics

RAW, ENGINE, ENSEMBLE, EVERY_TOKEN = "raw engine", "engine, gRPC", "ensemble", "ensemble, 1 token/msg"
PACKED = "packed ensemble"
EVERY_TOKEN_ENV = {"TRIDENT_MAX_COALESCE_MS": "0"}
ALONE_REQUESTS = 4  # of a batch at concurrency 1, for a median TTFT
INPUT_TOKENS = 128
ENGINES_MEASURED = ("demo", checkpoint.RANDOM)
TTFT_ADDED_GOAL_MS, COALESCING_GOAL_MS = 4.0, 20.0
EVERY_TOKEN_GOAL_US, COALESCED_GOAL_US = 200.0, 100.0

K = TypeVar("K")


@dataclass
class Batch:
    """One batch of requests on one path.

    wall_s: from the first send to the last answer's end.
    engine_cpu_s, serving_cpu_s, client_cpu_s: CPU seconds of the engine, of the other processes by role, of the client.
    coalescing_p99_s: for how long a message's oldest token waited for the others by the server's metrics, or nan.
    others_share: share of the machine that other processes used. waited_s: for a core, by role.
    """

    path: str
    concurrency: int
    round: int
    tokens: int
    wall_s: float
    ttfts_s: list[float]
    engine_cpu_s: float
    serving_cpu_s: dict[str, float] = field(default_factory=dict)
    client_cpu_s: float = 0.0
    messages: int = 0
    coalescing_p99_s: float = float("nan")
    others_share: float = 0.0
    waited_s: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s

    def us_per_token(self, seconds: float) -> float:
        return 1e6 * seconds / self.tokens

    @property
    def serving_us(self) -> float:
        return self.us_per_token(sum(self.serving_cpu_s.values()))

    @property
    def response_us(self) -> float:
        return self.serving_us * self.tokens / self.messages

    def cpu_s(self, role: str) -> float:
        own = {"engine worker": self.engine_cpu_s, "client": self.client_cpu_s}
        return (own | self.serving_cpu_s).get(role, 0.0)


class ServingPath:
    """One path through a server to the engine, connected over all its batches."""

    def __init__(self, name: str, server: ServerUnderTest, target: Target, prompts: Prompts) -> None:
        self.name, self._target, self._prompts = name, target, prompts
        self._metrics_url = server.metrics_url
        self._root = processes.server(server.url)

    async def batch(self, workload: Workload, requests: int, round_: int) -> Batch:
        waits = self._waits()
        watch, before = machine.Watch(), processes.use(self._root)
        result = await drive(workload, self._target, self._prompts, Extent(None, 0.0, requests))
        used, records = processes.difference(before, processes.use(self._root)), result.answered(f"{self.name}: ")
        others = watch.load(sum(use.cpu_s for use in used.values())).others
        return Batch(
            self.name,
            workload.concurrency or 0,
            round_,
            tokens=sum(record.tokens for record in records),
            wall_s=max(record.ended_s for record in records) - min(record.sent_s for record in records),
            ttfts_s=[ttft_s for record in records if (ttft_s := record.ttft_from_send_s) is not None],
            engine_cpu_s=sum(use.cpu_s for name, use in used.items() if name in processes.ENGINE_ROLES),
            serving_cpu_s={name: use.cpu_s for name, use in used.items() if name not in processes.ENGINE_ROLES},
            client_cpu_s=result.client_cpu_s,
            messages=sum(len(record.messages) for record in records),
            coalescing_p99_s=(self._waits() - waits).quantile(0.99),
            others_share=others,
            waited_s={name: use.waited_s for name, use in used.items()}
            | {"client": sum(use.waited_s for use in result.generators)},
        )

    async def close(self) -> None:
        await self._target.close()

    def _waits(self) -> Histogram:
        metrics = settled(self._metrics_url) if self._metrics_url else Metrics()
        return scrape.histogram(metrics, COALESCING_WAIT)


class RawPath:
    """The engine in process, without a server."""

    def __init__(self, raw: RawEngine, prompts: Prompts) -> None:
        self._raw, self._prompts = raw, prompts

    async def batch(self, workload: Workload, requests: int, round_: int) -> Batch:
        concurrency, watch = workload.concurrency or 0, machine.Watch()
        planned = [workload.request(number, self._prompts) for number in range(requests)]
        ids = [self._prompts.ids(one.prompt) for one in planned]
        answer = self._raw.batch(ids, planned[0].max_tokens, concurrency)
        tokens, wall_s, ttfts_s, cpu_s = (answer[name] for name in ("tokens", "wall_s", "ttfts_s", "cpu_s"))
        others = watch.load(cpu_s).others
        return Batch(RAW, concurrency, round_, tokens, wall_s, ttfts_s, cpu_s, others_share=others)

    async def close(self) -> None:
        """Nothing to close: its process ends with RawEngine."""


def measure(engine: str, output_tokens: int, rounds: int, concurrencies: Sequence[int]) -> list[Batch]:
    """Return all batches of one engine."""
    prompts = Prompts.for_engine(ENGINES / engine)
    with ExitStack() as stack:
        servers = [stack.enter_context(running_server(engine, env)) for env in ({}, EVERY_TOKEN_ENV)]
        raw = stack.enter_context(RawEngine(ENGINES / engine))
        ensembles = [EnsembleTarget(server.url, timings=False, model="ensemble") for server in servers]
        packed = EnsembleTarget(servers[0].url, timings=False, model=packed_delta.MODEL)
        targets = {ENGINE: EngineTarget(servers[0].url, prompts), ENSEMBLE: ensembles[0], PACKED: packed}
        paths: dict[str, ServingPath | RawPath] = {RAW: RawPath(raw, prompts)}
        paths |= {name: ServingPath(name, servers[0], target, prompts) for name, target in targets.items()}
        paths[EVERY_TOKEN] = ServingPath(EVERY_TOKEN, servers[1], ensembles[1], prompts)
        warm, levels = (min(8, max(concurrencies)),), {EVERY_TOKEN: (1, 32)}
        lengths = INPUT_TOKENS, output_tokens
        found = in_turns(paths, concurrencies, rounds, lengths, ALONE_REQUESTS, levels, warm)
    return [batch for of_level in found.values() for of_path in of_level.values() for batch in of_path]


def in_turns(
    paths: Mapping[K, ServingPath | RawPath],
    concurrencies: Sequence[int],
    rounds: int,
    tokens: tuple[int, int],
    least: int = 1,
    levels: Mapping[K, Sequence[int]] = MappingProxyType({}),
    warm: Sequence[int] = (),
) -> dict[int, dict[K, list[Batch]]]:
    """Return the batches by concurrency and path; the paths take turns and are closed. A round before warms up.

    tokens: of a prompt and of an answer. least: requests of a batch, at least. levels: concurrencies of those paths
        that do not get all. warm: concurrencies of the warm-up; all unless set.
    """
    found: dict[int, dict[K, list[Batch]]] = {at: {key: [] for key in paths} for at in concurrencies}

    async def batches() -> None:
        async with AsyncExitStack() as stack:
            for path in paths.values():
                stack.push_async_callback(path.close)
            turns = [(n, at) for n in range(rounds + 1) for at in (concurrencies if n else warm or concurrencies)]
            for n, at in turns:
                progress.show(f"round {n} of {rounds}, concurrency {at}")
                for nth, (key, path) in enumerate(paths.items()):
                    if n and at not in levels.get(key, concurrencies):
                        continue
                    # Each path has its own prompts: the models of a server share its prefix cache.
                    load = Workload(at, None, Fixed(tokens[0]), Fixed(tokens[1]), seed=n * 100_000 + at * 10 + nth)
                    batch = await path.batch(load, max(least, at), n)
                    if n:
                        found[at][key].append(batch)

    asyncio.run(batches())
    return found


def output_and_goal(engine: str) -> tuple[int, float]:
    """Return the output tokens of a request, and the least ratio of tokens/s at concurrency 32."""
    return (128, 0.70) if engine == "demo" else (48, 0.97)


def of(batches: Sequence[Batch], path: str, concurrency: int) -> list[Batch]:
    """Return the batches of one path at one concurrency."""
    return [batch for batch in batches if (batch.path, batch.concurrency) == (path, concurrency)]


def ratios(batches: Sequence[Batch], path: str, concurrency: int) -> list[float]:
    """Return tokens per second over the raw engine's, round by round."""
    raw = {batch.round: batch for batch in of(batches, RAW, concurrency)}
    return [batch.tokens_per_s / raw[batch.round].tokens_per_s for batch in of(batches, path, concurrency)]


def cpu_bound_ratio(batches: Sequence[Batch], path: str, concurrency: int) -> float:
    """Return the engine's share if every core is busy: its CPU per token over that of all processes together."""
    alone = median(b.us_per_token(b.engine_cpu_s) for b in of(batches, RAW, concurrency))
    extra = median(b.serving_us + b.us_per_token(b.client_cpu_s) for b in of(batches, path, concurrency))
    return alone / (alone + extra)


def ttft_added_s(batches: Sequence[Batch], path: str) -> float:
    """Return the median TTFT at concurrency 1 minus the raw engine's."""
    added, raw = (median(ttft for batch in of(batches, name, 1) for ttft in batch.ttfts_s) for name in (path, RAW))
    return added - raw


def described(engine: str, batches: Sequence[Batch]) -> str:
    rows = []
    for concurrency in sorted({batch.concurrency for batch in batches}):
        for path in (RAW, ENGINE, ENSEMBLE, PACKED, EVERY_TOKEN):
            if not (mine := of(batches, path, concurrency)):
                continue
            found = ratios(batches, path, concurrency)
            ratio, cpu_bound, serving = "1", "", [""] * 4
            if path != RAW:
                ratio = report.ranged(found)
                cpu_bound = f"{cpu_bound_ratio(batches, path, concurrency):.2f}"
                serving = [
                    report.number(median(b.serving_us for b in mine), 0),
                    report.number(median(b.us_per_token(b.client_cpu_s) for b in mine), 0),
                    report.number(median(b.tokens / b.messages for b in mine), 2),
                    report.ms(median(b.coalescing_p99_s for b in mine)),
                ]
            tokens_per_s = report.number(median(batch.tokens_per_s for batch in mine), 0)
            ttft = report.ms(median(ttft for batch in mine for ttft in batch.ttfts_s))
            engine_us = report.number(median(batch.us_per_token(batch.engine_cpu_s) for batch in mine), 0)
            rows.append((path, concurrency, tokens_per_s, ratio, cpu_bound, ttft, engine_us, *serving))
    header = ("path", "at", "tok/s", "of raw (range)", "CPU-bound", "TTFT p50 ms", "engine µs", "serving µs")
    return f"{engine}\n" + report.table(rows, (*header, "client µs", "tok/msg", "wait p99 ms"))


def by_process(batches: Sequence[Batch]) -> str:
    """Format the ensemble's CPU per token by process, and the share of time it waited for a core."""
    rows = []
    names = ("tritonserver", "tokenizer", "engine stub", "detokenizer", "engine worker", "client")
    for path in (ENSEMBLE, PACKED, EVERY_TOKEN):
        for concurrency in sorted({batch.concurrency for batch in batches if batch.path == path}):
            mine, cells = of(batches, path, concurrency), []
            for name in names:
                spent = median(b.us_per_token(b.cpu_s(name)) for b in mine)
                waits = median(b.waited_s.get(name, 0.0) / b.wall_s for b in mine)
                cells.append(f"{report.number(spent)} ({waits:.0%})")
            rows.append((path, concurrency, *cells))
    return report.table(rows, ("CPU µs per token (waited for a core)", "at", *names))


def goals(engine: str, batches: Sequence[Batch]) -> list[report.Goal]:
    out: list[report.Goal] = []
    at = {batch.concurrency for batch in batches}

    def at_most(what: str, value: float, bound: float) -> None:
        out.append(report.at_most(f"{engine}: {what}", value, bound))

    def serving_us(path: str, concurrency: int, how: str, bound: float) -> None:
        spent = median(batch.serving_us for batch in of(batches, path, concurrency))
        at_most(f"serving CPU at {concurrency}, {how}, µs", spent, bound)

    if 32 in at:
        what = f"{engine}: tokens/s at 32 over the raw engine's"
        out.append(report.at_least(what, median(ratios(batches, PACKED, 32)), output_and_goal(engine)[1]))
    if 1 in at:
        at_most("TTFT added at 1, ms", ttft_added_s(batches, PACKED) * 1e3, TTFT_ADDED_GOAL_MS)
        serving_us(EVERY_TOKEN, 1, "a message per token", EVERY_TOKEN_GOAL_US)
    if 32 in at:
        serving_us(EVERY_TOKEN, 32, "a message per token", EVERY_TOKEN_GOAL_US)
        serving_us(PACKED, 32, "coalescing", COALESCED_GOAL_US)
        wait_ms = median(b.coalescing_p99_s for b in of(batches, PACKED, 32)) * 1e3
        at_most("coalescing's added wait at 32, p99, ms", wait_ms, COALESCING_GOAL_MS)
    return out


def run(engines: Sequence[str], rounds: int, concurrencies: Sequence[int], out: Path) -> int:
    """Measure, print, write efficiency.json. Raises InvalidArgument, NotFound, EngineFailed: no such engine."""
    if not all(engines):
        raise InvalidArgument("engines", f"must be names of engines, separated by commas, got {','.join(engines)!r}")
    names = list(map(checkpoint.named, engines))
    for name in names:
        manifest.load(ENGINES / name)
    found: dict[str, list[Batch]] = {}
    verdicts: list[report.Goal] = []
    conditions = machine.described()
    print(report.on(conditions), flush=True)
    for engine in names:
        output_tokens, _ = output_and_goal(engine)
        batches = found[engine] = measure(engine, output_tokens, rounds, concurrencies)
        about = f"{INPUT_TOKENS} tokens in, {output_tokens} out, greedy, {rounds} rounds, medians"
        print(f"\n{described(f'{engine} ({about})', batches)}\n\n{by_process(batches)}\n")
        print(report.verdicts(mine := goals(engine, batches)))
        verdicts += mine
        print(report.disturbance(mean(batch.others_share for batch in batches)), flush=True)
        # After each engine: a run that is cut off has kept what it measured.
        table = {engine: [asdict(batch) for batch in batches] for engine, batches in found.items()}
        written = {"conditions": conditions, "batches": table, "compared": compared(found), "goals": verdicts}
        report.write_json(written, out, "efficiency")
    return 0


def compared(found: Mapping[str, Sequence[Batch]]) -> dict[str, dict[str, object]]:
    """Return what ``benchmarks.suite`` compares, by engine."""
    speed, spent, waits, first = (dict[str, list[float]]() for _ in range(4))
    for engine, batches in found.items():
        for path, at in dict.fromkeys((batch.path, batch.concurrency) for batch in batches):
            label, mine = f"{engine}, {path}, {at}", of(batches, path, at)
            if path != RAW:
                speed[f"speed of the raw engine's: {label}"] = ratios(batches, path, at)
                spent[f"serving CPU of a token, µs: {label}"] = [batch.serving_us for batch in mine]
                waits[f"wait for others of a message, p99, ms: {label}"] = [1e3 * b.coalescing_p99_s for b in mine]
            first[f"TTFT p50, ms: {label}"] = [1e3 * median(batch.ttfts_s) for batch in mine]
    return figures.compared(figures.HIGHER, speed) | figures.compared(figures.LOWER, spent | waits | first)
