"""Measure what streams get while long prompts are read beside them: tokens' latencies with and without, in turns."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import checkpoint, figures, machine, progress, report
from benchmarks.measurement import ServerUnderTest
from benchmarks.prompts import Prompts
from benchmarks.record import Record
from benchmarks.server_process import ENGINES, running_server
from benchmarks.target import EnsembleTarget
from benchmarks.workload import PlannedRequest
from contract import manifest
from contract.errors import EngineFailed, InvalidArgument

INPUT_TOKENS, OUTPUT_TOKENS = 64, 192  # of a stream
LONG_OUTPUT = 8  # tokens of the answer to a long prompt
DRAWN = 32  # long prompts made before a phase
LEAST, LIMIT_S = 2, 120.0  # messages of a stream, and long prompts; seconds to get them
RATIO_GOAL = 2.0
ALONE, BESIDE = "alone", "beside long prompts"
RATIO, LONG = "ITL p99 of p50", "long prompts"
Found = dict[str, float]


async def phase(server: ServerUnderTest, prompts: Prompts, streams: int, long: int, seconds: float, seed: int) -> Found:
    """Return the figures of so many streams that run all the time, for ``seconds`` and LEAST messages of each at least.

    long: tokens of the prompts that come one after another beside them, LEAST at least; 0: none.
    Raises EngineFailed if a request fails, or if there are too few messages after LIMIT_S.
    """
    target = EnsembleTarget(server.url, timings=False)
    records: list[Record] = []
    firsts: list[float] = []
    rng = random.Random(seed)

    def drawn(tokens: int, count: int) -> Iterator[str]:
        """Yield prompts, the first ``count`` made now: making a long one would delay the reading of the streams."""
        made = [prompts.text(rng, tokens) for _ in range(count)]
        return itertools.chain(made, iter(lambda: prompts.text(rng, tokens), None))

    short, longs = drawn(INPUT_TOKENS, 2 * streams), drawn(long, DRAWN if long else 0)

    async def send(texts: Iterator[str], output_tokens: int, record: Record) -> None:
        request = PlannedRequest(rng.getrandbits(31), next(texts), output_tokens)
        record.sent_s = time.monotonic()
        await target.send(request, record)

    async def stream() -> None:
        while True:
            records.append(record := Record(0, 0.0))
            await send(short, OUTPUT_TOKENS, record)

    async def beside() -> None:
        while long:
            await send(longs, LONG_OUTPUT, record := Record(0, 0.0))
            firsts.append(record.ttft_from_send_s or 0.0)

    async def until(done: Callable[[], bool]) -> float:
        limit_s = time.monotonic() + seconds + LIMIT_S
        while not done():
            if ended := [task for task in running if task.done()]:
                ended[0].result()
            if time.monotonic() > limit_s:
                raise EngineFailed(f"fewer than {LEAST} messages of {streams} streams in {LIMIT_S:g} s")
            await asyncio.sleep(0.02)
        return time.monotonic()

    def messages() -> int:
        return sum(at_s >= begin_s for record in records for at_s, _ in record.messages)

    running = [asyncio.create_task(stream()) for _ in range(streams)]
    try:
        begin_s = await until(lambda: sum(bool(record.messages) for record in records) >= streams)
        running += [asyncio.create_task(beside())] if long else []
        enough = lambda: messages() >= LEAST * streams and (not long or len(firsts) >= LEAST)  # noqa: E731
        end_s = await until(lambda: time.monotonic() - begin_s >= seconds and enough())
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await target.close()
    gaps = [
        (after_s - before_s, count)
        for record in records
        for (before_s, _), (after_s, count) in zip(record.messages, record.messages[1:], strict=False)
        if after_s >= begin_s and before_s <= end_s
    ]
    itl = figures.of_gaps(gaps)
    found = {
        "ITL p50, ms": 1e3 * itl.p50,
        "ITL p99, ms": 1e3 * itl.p99,
        RATIO: itl.p99 / itl.p50,
        "tokens/s": figures.compute(records, (begin_s, end_s)).output_tokens_per_s,
    }
    if long:
        found |= {"TTFT of long prompts p50, ms": 1e3 * statistics.median(firsts), LONG: float(len(firsts))}
    return found


def run(engine: str, streams: int, input_tokens: int, seconds: float, rounds: int, out: Path) -> int:
    """Measure, print, write mixed.json. input_tokens: of a long prompt, fewer if the engine takes fewer."""
    engine, conditions = checkpoint.named(engine), machine.described()
    longest = manifest.load(ENGINES / engine).max_seq_len - LONG_OUTPUT
    if longest < INPUT_TOKENS + OUTPUT_TOKENS:
        raise InvalidArgument("engine", f"must take {INPUT_TOKENS + OUTPUT_TOKENS} tokens, {engine} takes {longest}")
    long, prompts = min(input_tokens, longest), Prompts.for_engine(ENGINES / engine)
    found: dict[str, dict[str, list[float]]] = {ALONE: {}, BESIDE: {}}
    with running_server(engine) as server:
        asyncio.run(phase(server, prompts, streams, long, 0.0, 0))  # warms up
        for number in range(rounds):
            for name, of in found.items():
                progress.show(f"round {number + 1} of {rounds}, {name}")
                seed, beside = 10 * (number + 2) + 5 * (name == BESIDE), long if name == BESIDE else 0
                for figure, value in asyncio.run(phase(server, prompts, streams, beside, seconds, seed)).items():
                    of.setdefault(figure, []).append(value)
    about = f"{engine}: {streams} streams of {INPUT_TOKENS} + {OUTPUT_TOKENS} tokens, prompts of {long} beside"
    print(f"{about}; {rounds} rounds of {seconds:g} s; {report.on(conditions)}")
    named = {f"{name}: {figure}": of for name, values in found.items() for figure, of in values.items()}
    print(report.medians(named, "figure"))
    ratio = statistics.median(found[BESIDE][RATIO])
    goals = [report.at_most("ITL p99 of p50 beside long prompts", ratio, RATIO_GOAL)]
    print(report.verdicts(goals))
    lower, higher = (dict[str, list[float]]() for _ in range(2))
    for name, values in found.items():
        for figure, of_rounds in values.items():
            what, _, unit = figure.rpartition(", ")
            if unit == "ms":
                lower[f"ms: {what}, {name}"] = of_rounds
            elif figure != LONG:
                (lower if figure == RATIO else higher)[f"{figure}: {name}"] = of_rounds
    compared = figures.compared(figures.LOWER, lower) | figures.compared(figures.HIGHER, higher)
    table = {"conditions": conditions, "engine": engine, "compared": compared, "goals": goals, "notes": [about]}
    return report.write_json(table, out, "mixed")
