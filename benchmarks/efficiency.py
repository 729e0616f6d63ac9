"""What serving costs against the engine itself: raw pipeline, engine over gRPC, ensemble over gRPC, in one run.

The three take turns at every concurrency, round after round, on equal work: so many requests with prompts of equal
length and answers of fixed length, greedy. Ratios are of neighbours in time, so a noisy machine disturbs both sides.
Tokens per second are a wave's tokens over its wall time, from the first request sent to the last answer's end.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from benchmarks import figures, machine, processes, random_model, report, self_check
from benchmarks.driver import Driven, Extent, drive
from benchmarks.engine_door import EngineDoor
from benchmarks.lengths import Fixed
from benchmarks.measurement import Where
from benchmarks.processes import Use
from benchmarks.prompts import Prompts
from benchmarks.raw_engine import RawEngine
from benchmarks.served import ENGINES, served
from benchmarks.target import Ensemble, Target
from benchmarks.workload import Workload
from contract.errors import EngineFailed

RAW, ENGINE, ENSEMBLE, EVERY_TOKEN = "raw engine", "engine, gRPC", "ensemble", "ensemble, 1 token/msg"
EVERY_TOKEN_ENV = {"TRIDENT_MAX_COALESCE_MS": "0"}
ALONE_REQUESTS = 4  # of a wave at concurrency 1, so that its TTFT is a median of something
INPUT_TOKENS = 128
# (output tokens of a request, least ratio of tokens/s at concurrency 32), by engine
ENGINES_MEASURED = {"demo": (128, 0.70), random_model.NAME: (48, 0.95)}
TTFT_ADDED_GOAL_S = 0.004
EVERY_TOKEN_GOAL_US, COALESCED_GOAL_US, COALESCING_GOAL_S = 200.0, 100.0, 0.020


@dataclass
class Wave:
    """One turn of one path. CPU in seconds: the engine's own, what serves it, the client's."""

    path: str
    concurrency: int
    turn: int
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


class Way:
    """One served way to the engine, kept connected over all its waves."""

    def __init__(self, name: str, where: Where, target: Target, prompts: Prompts) -> None:
        self.name, self._target, self._prompts = name, target, prompts
        self._root = processes.listener(int(where.url.rpartition(":")[2]))

    async def wave(self, workload: Workload, requests: int, turn: int) -> Wave:
        clock, before = machine.cpu_time(), processes.use(self._root)
        driven = await drive(workload, self._target, self._prompts, Extent(None, 0.0, requests))
        used = processes.grown(before, processes.use(self._root))
        return self._waved(driven, used, workload.concurrency, turn, clock)

    async def close(self) -> None:
        await self._target.close()

    def _waved(self, driven: Driven, used: dict[str, Use], concurrency: int, turn: int, clock: machine.CpuTime) -> Wave:
        records = driven.records
        if failed := [record.error for record in records if not record.ok]:
            raise EngineFailed(f"{self.name}: {len(failed)} requests failed, the first with {failed[0]}")
        engine_s = sum(use.cpu_s for name, use in used.items() if name in processes.ENGINE_ROLES)
        client_s = sum(use.cpu_s for use in driven.generators)
        ours_s = client_s + sum(use.cpu_s for use in used.values())
        return Wave(
            self.name,
            concurrency,
            turn,
            tokens=sum(record.tokens for record in records),
            wall_s=max(record.ended_s for record in records) - min(record.sent_s for record in records),
            ttfts_s=[record.first_s - record.sent_s for record in records],
            engine_cpu_s=engine_s,
            serving_cpu_s={n: use.cpu_s for n, use in used.items() if n not in processes.ENGINE_ROLES},
            client_cpu_s=client_s,
            messages=sum(len(record.messages) for record in records),
            coalescing_p99_s=figures.coalescing(records).p99,
            others_share=machine.company(clock, machine.cpu_time(), ours_s).others,
            waited_s={name: use.waited_s for name, use in used.items()}
            | {"client": sum(use.waited_s for use in driven.generators)},
        )


def raw_wave(raw: RawEngine, prompts: Prompts, workload: Workload, requests: int, turn: int) -> Wave:
    clock = machine.cpu_time()
    texts = [workload.request(number, prompts).prompt for number in range(requests)]
    answer = raw.wave([prompts.ids(text) for text in texts], workload.output_tokens.tokens, workload.concurrency)
    company = machine.company(clock, machine.cpu_time(), answer["cpu_s"])
    return Wave(
        RAW,
        workload.concurrency,
        turn,
        answer["tokens"],
        answer["wall_s"],
        answer["ttfts_s"],
        answer["cpu_s"],
        others_share=company.others,
    )


def measure(engine: str, output_tokens: int, rounds: int, concurrencies: Sequence[int]) -> list[Wave]:
    """All waves of one engine."""
    prompts = Prompts.for_engine(ENGINES / engine)
    loop = asyncio.new_event_loop()
    waves: list[Wave] = []
    with ExitStack() as stack:
        where = stack.enter_context(served(engine))
        apart = stack.enter_context(served(engine, EVERY_TOKEN_ENV))
        raw = stack.enter_context(RawEngine(ENGINES / engine))
        ensemble = Way(ENSEMBLE, where, Ensemble(where.url, timings=False), prompts)
        paths = [Way(ENGINE, where, EngineDoor(where.url, prompts), prompts), ensemble]
        every_token = Way(EVERY_TOKEN, apart, Ensemble(apart.url, timings=False), prompts)
        try:
            for turn in range(-1, rounds):  # turn -1 warms up and is thrown away
                for concurrency in concurrencies if turn >= 0 else (min(8, max(concurrencies)),):
                    served_paths = [*paths, every_token] if concurrency in (1, 32) or turn < 0 else paths
                    requests = max(ALONE_REQUESTS, concurrency)

                    def load(nth: int, concurrency: int = concurrency, turn: int = turn) -> Workload:
                        # Prompts of their own for each path: the two doors of a server share its prefix cache.
                        seed = (turn + 2) * 100_000 + concurrency * 100 + nth
                        return Workload(concurrency, None, Fixed(INPUT_TOKENS), Fixed(output_tokens), seed=seed)

                    _say(f"{engine}: round {turn + 1} of {rounds}, concurrency {concurrency}")
                    taken = [raw_wave(raw, prompts, load(0), requests, turn)]
                    for nth, path in enumerate(served_paths, 1):
                        taken.append(loop.run_until_complete(path.wave(load(nth), requests, turn)))
                    waves += taken if turn >= 0 else []
        finally:
            for path in (*paths, every_token):
                loop.run_until_complete(path.close())
            loop.close()
            _say("")
    return waves


def ratios(waves: Sequence[Wave], path: str, concurrency: int) -> list[float]:
    """Tokens per second over the raw engine's, turn by turn."""
    raw = {wave.turn: wave for wave in waves if wave.path == RAW and wave.concurrency == concurrency}
    mine = [wave for wave in waves if wave.path == path and wave.concurrency == concurrency]
    return [wave.tokens_per_s / raw[wave.turn].tokens_per_s for wave in mine]


def cpu_bound_ratio(waves: Sequence[Wave], path: str, concurrency: int) -> float:
    """What is left to the engine if every core is busy: its CPU per token alone, over the CPU all together take."""
    alone = _median(w.us_per_token(w.engine_cpu_s) for w in waves if w.path == RAW and w.concurrency == concurrency)
    mine = [w for w in waves if w.path == path and w.concurrency == concurrency]
    extra = _median(w.serving_us + w.us_per_token(w.client_cpu_s) for w in mine)
    return alone / (alone + extra)


def ttft_added_s(waves: Sequence[Wave], path: str) -> float:
    """Median TTFT at concurrency 1, minus the raw engine's."""
    medians = [
        statistics.median(
            ttft for wave in waves if wave.path == name and wave.concurrency == 1 for ttft in wave.ttfts_s
        )
        for name in (path, RAW)
    ]
    return medians[0] - medians[1]


def described(engine: str, waves: Sequence[Wave]) -> str:
    rows = []
    for concurrency in sorted({wave.concurrency for wave in waves}):
        for path in (RAW, ENGINE, ENSEMBLE, EVERY_TOKEN):
            mine = [wave for wave in waves if wave.path == path and wave.concurrency == concurrency]
            if not mine:
                continue
            found = ratios(waves, path, concurrency)
            served_row = path != RAW
            rows.append(
                (
                    path,
                    concurrency,
                    report.number(_median(wave.tokens_per_s for wave in mine), 0),
                    f"{_median(found):.2f} ({min(found):.2f}–{max(found):.2f})" if served_row else "1",
                    f"{cpu_bound_ratio(waves, path, concurrency):.2f}" if served_row else "",
                    report.ms(_median(ttft for wave in mine for ttft in wave.ttfts_s)),
                    report.number(_median(wave.us_per_token(wave.engine_cpu_s) for wave in mine), 0),
                    report.number(_median(wave.serving_us for wave in mine), 0) if served_row else "",
                    report.number(_median(wave.us_per_token(wave.client_cpu_s) for wave in mine), 0)
                    if served_row
                    else "",
                    report.number(_median(w.tokens / w.messages for w in mine), 2) if served_row else "",
                    report.ms(_median(w.coalescing_p99_s for w in mine)) if served_row else "",
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


def by_process(waves: Sequence[Wave]) -> str:
    """Where the ensemble's time goes: CPU per token by process, and what share of the time it waited for a core."""
    rows = []
    names = ("tritonserver", "tokenizer", "engine stub", "detokenizer", "engine worker", "client")
    for path in (ENSEMBLE, EVERY_TOKEN):
        for concurrency in sorted({wave.concurrency for wave in waves if wave.path == path}):
            mine = [wave for wave in waves if wave.path == path and wave.concurrency == concurrency]
            cells = []
            for name in names:
                spent = _median(w.us_per_token(_cpu_s(w, name)) for w in mine)
                waits = _median(w.waited_s.get(name, 0.0) / w.wall_s for w in mine)
                cells.append(f"{report.number(spent)} ({waits:.0%})")
            rows.append((path, concurrency, *cells))
    return report.table(rows, ("CPU µs per token (waited for a core)", "at", *names))


def _cpu_s(wave: Wave, name: str) -> float:
    return {"engine worker": wave.engine_cpu_s, "client": wave.client_cpu_s}.get(
        name, wave.serving_cpu_s.get(name, 0.0)
    )


def goals(engine: str, waves: Sequence[Wave]) -> list[tuple[str, float, float, bool]]:
    """(what, found, goal, whether it is met)."""
    out = []
    at = {wave.concurrency for wave in waves}
    if 32 in at:
        least = ENGINES_MEASURED.get(engine, (0, 0.95))[1]
        found = _median(ratios(waves, ENSEMBLE, 32))
        out.append(("tokens/s at 32 over the raw engine's, at least", found, least, found >= least))
    if 1 in at:
        found = ttft_added_s(waves, ENSEMBLE)
        out.append(("TTFT added at 1, ms, at most", found * 1e3, TTFT_ADDED_GOAL_S * 1e3, found <= TTFT_ADDED_GOAL_S))
        found = _serving(waves, EVERY_TOKEN, 1)
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
            found = _serving(waves, path, 32)
            how = "a message per token" if path == EVERY_TOKEN else "coalescing"
            out.append((f"serving CPU at 32, {how}, µs, at most", found, limit, found <= limit))
        found = _median(w.coalescing_p99_s for w in waves if w.path == ENSEMBLE and w.concurrency == 32)
        out.append(("coalescing's added wait at 32, p99, ms, at most", found * 1e3, 20.0, found <= COALESCING_GOAL_S))
    return out


def run(engines: Sequence[str], rounds: int, concurrencies: Sequence[int], out: Path) -> int:
    """Measures, prints, writes efficiency.json; exit code 0 whether goals are met or not, they are findings."""
    found: dict[str, list[Wave]] = {}
    conditions = machine.described()
    print(report.on(conditions), flush=True)
    for engine in engines:
        name = random_model.engine() if engine == random_model.NAME else engine
        output_tokens = ENGINES_MEASURED.get(engine, (64, 0))[0]
        waves = found[engine] = measure(name, output_tokens, rounds, concurrencies)
        about = f"{INPUT_TOKENS} tokens in, {output_tokens} out, greedy, {rounds} rounds, medians"
        print(f"\n{described(f'{engine} ({about})', waves)}\n\n{by_process(waves)}\n")
        for what, value, goal, met in goals(engine, waves):
            print(f"  {'met   ' if met else 'MISSED'}  {what} {goal:g}: {value:.3g}")
        share = float(np.mean([wave.others_share for wave in waves]))
        doubt = "; too much, none of this is to be believed" if share > self_check.OTHERS_SHARE else ""
        print(f"  others used {share:.0%} of the machine meanwhile{doubt}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    table = {engine: [asdict(wave) for wave in waves] for engine, waves in found.items()}
    (out / "efficiency.json").write_text(json.dumps({"conditions": conditions, "waves": table}) + "\n")
    print(f"\n  written: {out / 'efficiency.json'}")
    return 0


def _serving(waves: Sequence[Wave], path: str, concurrency: int) -> float:
    return _median(wave.serving_us for wave in waves if wave.path == path and wave.concurrency == concurrency)


def _median(values) -> float:
    return statistics.median(list(values))


def _say(line: str) -> None:
    if sys.stderr.isatty():
        print("\r" + line.ljust(70), end="" if line else "\r", file=sys.stderr, flush=True)
