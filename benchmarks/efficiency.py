"""Measure the cost of serving: raw pipeline, engine over gRPC and ensemble over gRPC, in one run.

The three take turns at every concurrency, round after round, on equal work: the same number of requests with prompts
of equal length and answers of fixed length, greedy. Ratios compare batches of one round, so that a noisy machine
disturbs both sides. Tokens per second are a batch's tokens over its wall time, first send to last answer's end.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import figures, machine, processes, random_model, report
from benchmarks.driver import Extent, LoadResult, drive
from benchmarks.engine_target import EngineTarget
from benchmarks.lengths import Fixed
from benchmarks.measurement import ServerUnderTest
from benchmarks.processes import Use
from benchmarks.prompts import Prompts
from benchmarks.raw_engine import RawEngine
from benchmarks.server_process import ENGINES, running_server
from benchmarks.target import EnsembleTarget, Target
from benchmarks.workload import Workload
from contract.errors import EngineFailed

RAW, ENGINE, ENSEMBLE, EVERY_TOKEN = "raw engine", "engine, gRPC", "ensemble", "ensemble, 1 token/msg"
EVERY_TOKEN_ENV = {"TRIDENT_MAX_COALESCE_MS": "0"}
ALONE_REQUESTS = 4  # of a batch at concurrency 1, for a median TTFT
INPUT_TOKENS = 128
# (output tokens of a request, least ratio of tokens/s at concurrency 32), by engine
ENGINES_MEASURED = {"demo": (128, 0.70), random_model.NAME: (48, 0.95)}
TTFT_ADDED_GOAL_S = 0.004
EVERY_TOKEN_GOAL_US, COALESCED_GOAL_US, COALESCING_GOAL_S = 200.0, 100.0, 0.020


@dataclass
class Batch:
    """One batch of requests on one path.

    round: number of the round.
    engine_cpu_s, serving_cpu_s, client_cpu_s: CPU seconds of the engine, of the other processes by role, of the client.
    coalescing_p99_s: estimated wait of tokens for the others of their message.
    others_share: share of the machine that other processes used.
    waited_s: seconds that each role waited for a core.
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


class ServingPath:
    """One path through a server to the engine, connected over all its batches."""

    def __init__(self, name: str, server: ServerUnderTest, target: Target, prompts: Prompts) -> None:
        self.name, self._target, self._prompts = name, target, prompts
        root = processes.listener(int(server.url.rpartition(":")[2]))
        if root is None:
            raise EngineFailed(f"no process listens on {server.url}")
        self._root = root

    async def batch(self, workload: Workload, requests: int, round_: int) -> Batch:
        cpu_before, before = machine.cpu_time(), processes.use(self._root)
        result = await drive(workload, self._target, self._prompts, Extent(None, 0.0, requests))
        used = processes.difference(before, processes.use(self._root))
        return self._batch(result, used, workload.concurrency or 0, round_, cpu_before)

    async def close(self) -> None:
        await self._target.close()

    def _batch(
        self, result: LoadResult, used: dict[str, Use], concurrency: int, round_: int, cpu_before: machine.CpuTime
    ) -> Batch:
        records = result.records
        if failed := [record.error for record in records if not record.ok]:
            raise EngineFailed(f"{self.name}: {len(failed)} requests failed, the first with {failed[0]}")
        engine_s = sum(use.cpu_s for name, use in used.items() if name in processes.ENGINE_ROLES)
        client_s = sum(use.cpu_s for use in result.generators)
        ours_s = client_s + sum(use.cpu_s for use in used.values())
        return Batch(
            self.name,
            concurrency,
            round_,
            tokens=sum(record.tokens for record in records),
            wall_s=max(record.ended_s for record in records) - min(record.sent_s for record in records),
            ttfts_s=[ttft_s for record in records if (ttft_s := record.ttft_from_send_s) is not None],
            engine_cpu_s=engine_s,
            serving_cpu_s={n: use.cpu_s for n, use in used.items() if n not in processes.ENGINE_ROLES},
            client_cpu_s=client_s,
            messages=sum(len(record.messages) for record in records),
            coalescing_p99_s=figures.coalescing(records).p99,
            others_share=machine.host_load(cpu_before, machine.cpu_time(), ours_s).others,
            waited_s={name: use.waited_s for name, use in used.items()}
            | {"client": sum(use.waited_s for use in result.generators)},
        )


def raw_batch(
    raw: RawEngine, prompts: Prompts, concurrency: int, output_tokens: int, seed: int, requests: int, round_: int
) -> Batch:
    """Run the batch that ``load`` describes on the raw engine."""
    workload, cpu_before = load(concurrency, output_tokens, seed), machine.cpu_time()
    texts = [workload.request(number, prompts).prompt for number in range(requests)]
    answer = raw.batch([prompts.ids(text) for text in texts], output_tokens, concurrency)
    host_load = machine.host_load(cpu_before, machine.cpu_time(), answer["cpu_s"])
    return Batch(
        RAW,
        concurrency,
        round_,
        answer["tokens"],
        answer["wall_s"],
        answer["ttfts_s"],
        answer["cpu_s"],
        others_share=host_load.others,
    )


def load(concurrency: int, output_tokens: int, seed: int) -> Workload:
    return Workload(concurrency, None, Fixed(INPUT_TOKENS), Fixed(output_tokens), seed=seed)


def measure(engine: str, output_tokens: int, rounds: int, concurrencies: Sequence[int]) -> list[Batch]:
    """Return all batches of one engine."""
    prompts = Prompts.for_engine(ENGINES / engine)
    loop = asyncio.new_event_loop()
    batches: list[Batch] = []
    with ExitStack() as stack:
        server = stack.enter_context(running_server(engine))
        uncoalesced = stack.enter_context(running_server(engine, EVERY_TOKEN_ENV))
        raw = stack.enter_context(RawEngine(ENGINES / engine))
        ensemble = ServingPath(ENSEMBLE, server, EnsembleTarget(server.url, timings=False), prompts)
        paths = [ServingPath(ENGINE, server, EngineTarget(server.url, prompts), prompts), ensemble]
        target = EnsembleTarget(uncoalesced.url, timings=False)
        every_token = ServingPath(EVERY_TOKEN, uncoalesced, target, prompts)
        try:
            for n in range(-1, rounds):  # round -1 warms up and is discarded
                for concurrency in concurrencies if n >= 0 else (min(8, max(concurrencies)),):
                    server_paths = [*paths, every_token] if concurrency in (1, 32) or n < 0 else paths
                    requests = max(ALONE_REQUESTS, concurrency)
                    # Each path has its own prompts: the two models of a server share its prefix cache.
                    seed = (n + 2) * 100_000 + concurrency * 100
                    _progress(f"{engine}: round {n + 1} of {rounds}, concurrency {concurrency}")
                    measured = [raw_batch(raw, prompts, concurrency, output_tokens, seed, requests, n)]
                    for nth, path in enumerate(server_paths, 1):
                        workload = load(concurrency, output_tokens, seed + nth)
                        measured.append(loop.run_until_complete(path.batch(workload, requests, n)))
                    batches += measured if n >= 0 else []
        finally:
            for path in (*paths, every_token):
                loop.run_until_complete(path.close())
            loop.close()
            _progress("")
    return batches


def ratios(batches: Sequence[Batch], path: str, concurrency: int) -> list[float]:
    """Return tokens per second over the raw engine's, round by round."""
    raw = {batch.round: batch for batch in batches if batch.path == RAW and batch.concurrency == concurrency}
    mine = [batch for batch in batches if batch.path == path and batch.concurrency == concurrency]
    return [batch.tokens_per_s / raw[batch.round].tokens_per_s for batch in mine]


def cpu_bound_ratio(batches: Sequence[Batch], path: str, concurrency: int) -> float:
    """Return the engine's share if every core is busy: its CPU per token over that of all processes together."""
    alone = _median(b.us_per_token(b.engine_cpu_s) for b in batches if b.path == RAW and b.concurrency == concurrency)
    mine = [b for b in batches if b.path == path and b.concurrency == concurrency]
    extra = _median(b.serving_us + b.us_per_token(b.client_cpu_s) for b in mine)
    return alone / (alone + extra)


def ttft_added_s(batches: Sequence[Batch], path: str) -> float:
    """Return the median TTFT at concurrency 1 minus the raw engine's."""
    medians = [
        statistics.median(
            ttft for batch in batches if batch.path == name and batch.concurrency == 1 for ttft in batch.ttfts_s
        )
        for name in (path, RAW)
    ]
    return medians[0] - medians[1]


def described(engine: str, batches: Sequence[Batch]) -> str:
    rows = []
    for concurrency in sorted({batch.concurrency for batch in batches}):
        for path in (RAW, ENGINE, ENSEMBLE, EVERY_TOKEN):
            mine = [batch for batch in batches if batch.path == path and batch.concurrency == concurrency]
            if not mine:
                continue
            found = ratios(batches, path, concurrency)
            has_server = path != RAW
            rows.append(
                (
                    path,
                    concurrency,
                    report.number(_median(batch.tokens_per_s for batch in mine), 0),
                    f"{_median(found):.2f} ({min(found):.2f}–{max(found):.2f})" if has_server else "1",
                    f"{cpu_bound_ratio(batches, path, concurrency):.2f}" if has_server else "",
                    report.ms(_median(ttft for batch in mine for ttft in batch.ttfts_s)),
                    report.number(_median(batch.us_per_token(batch.engine_cpu_s) for batch in mine), 0),
                    report.number(_median(batch.serving_us for batch in mine), 0) if has_server else "",
                    report.number(_median(batch.us_per_token(batch.client_cpu_s) for batch in mine), 0)
                    if has_server
                    else "",
                    report.number(_median(b.tokens / b.messages for b in mine), 2) if has_server else "",
                    report.ms(_median(b.coalescing_p99_s for b in mine)) if has_server else "",
                )
            )
    header = (
        "path",
        "at",
        "tok/s",
        "of raw (range)",
        "CPU-bound",
        "TTFT p50 ms",
        "engine µs",
        "serving µs",
        "client µs",
    )
    return f"{engine}\n" + report.table(rows, (*header, "tok/msg", "wait p99 ms"))


def by_process(batches: Sequence[Batch]) -> str:
    """Format the ensemble's CPU per token by process, and the share of time it waited for a core."""
    rows = []
    names = ("tritonserver", "tokenizer", "engine stub", "detokenizer", "engine worker", "client")
    for path in (ENSEMBLE, EVERY_TOKEN):
        for concurrency in sorted({batch.concurrency for batch in batches if batch.path == path}):
            mine = [batch for batch in batches if batch.path == path and batch.concurrency == concurrency]
            cells = []
            for name in names:
                spent = _median(b.us_per_token(_cpu_s(b, name)) for b in mine)
                waits = _median(b.waited_s.get(name, 0.0) / b.wall_s for b in mine)
                cells.append(f"{report.number(spent)} ({waits:.0%})")
            rows.append((path, concurrency, *cells))
    return report.table(rows, ("CPU µs per token (waited for a core)", "at", *names))


def _cpu_s(batch: Batch, name: str) -> float:
    return {"engine worker": batch.engine_cpu_s, "client": batch.client_cpu_s}.get(
        name, batch.serving_cpu_s.get(name, 0.0)
    )


def goals(engine: str, batches: Sequence[Batch]) -> list[tuple[str, float, float, bool]]:
    """Compare with the goals: (what, measured, goal, whether it is met)."""
    out: list[tuple[str, float, float, bool]] = []
    at = {batch.concurrency for batch in batches}
    if 32 in at:
        least = ENGINES_MEASURED.get(engine, (0, 0.95))[1]
        found = _median(ratios(batches, ENSEMBLE, 32))
        out.append(("tokens/s at 32 over the raw engine's, at least", found, least, found >= least))
    if 1 in at:
        found = ttft_added_s(batches, ENSEMBLE)
        out.append(("TTFT added at 1, ms, at most", found * 1e3, TTFT_ADDED_GOAL_S * 1e3, found <= TTFT_ADDED_GOAL_S))
        found = _serving(batches, EVERY_TOKEN, 1)
        out.append(
            (
                "serving CPU at 1, a message per token, µs, at most",
                found,
                EVERY_TOKEN_GOAL_US,
                found <= EVERY_TOKEN_GOAL_US,
            )
        )
    if 32 in at:
        for path, limit in ((EVERY_TOKEN, EVERY_TOKEN_GOAL_US), (ENSEMBLE, COALESCED_GOAL_US)):
            found = _serving(batches, path, 32)
            how = "a message per token" if path == EVERY_TOKEN else "coalescing"
            out.append((f"serving CPU at 32, {how}, µs, at most", found, limit, found <= limit))
        found = _median(b.coalescing_p99_s for b in batches if b.path == ENSEMBLE and b.concurrency == 32)
        out.append(("coalescing's added wait at 32, p99, ms, at most", found * 1e3, 20.0, found <= COALESCING_GOAL_S))
    return out


def run(engines: Sequence[str], rounds: int, concurrencies: Sequence[int], out: Path) -> int:
    """Measure, print, write efficiency.json. Returns 0 whether the goals are met or not."""
    found: dict[str, list[Batch]] = {}
    conditions = machine.described()
    print(report.on(conditions), flush=True)
    for engine in engines:
        name = random_model.engine() if engine == random_model.NAME else engine
        output_tokens = ENGINES_MEASURED.get(engine, (64, 0))[0]
        batches = found[engine] = measure(name, output_tokens, rounds, concurrencies)
        about = f"{INPUT_TOKENS} tokens in, {output_tokens} out, greedy, {rounds} rounds, medians"
        print(f"\n{described(f'{engine} ({about})', batches)}\n\n{by_process(batches)}\n")
        for what, value, goal, met in goals(engine, batches):
            print(f"  {'met   ' if met else 'MISSED'}  {what} {goal:g}: {value:.3g}")
        print(report.disturbance(statistics.mean(batch.others_share for batch in batches)), flush=True)
    out.mkdir(parents=True, exist_ok=True)
    table = {engine: [asdict(batch) for batch in batches] for engine, batches in found.items()}
    (out / "efficiency.json").write_text(json.dumps({"conditions": conditions, "batches": table}) + "\n")
    print(f"\n  written: {out / 'efficiency.json'}")
    return 0


def _serving(batches: Sequence[Batch], path: str, concurrency: int) -> float:
    return _median(batch.serving_us for batch in batches if batch.path == path and batch.concurrency == concurrency)


def _median(values: Iterable[float]) -> float:
    return statistics.median(list(values))


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print("\r" + line.ljust(70), end="" if line else "\r", file=sys.stderr, flush=True)
