"""Compare our load generator with NVIDIA's perf_analyzer and AIPerf: the same load, server and machine, in turns.

perf_analyzer and ours load the ensemble over gRPC, AIPerf and ours the gateway over HTTP, with prompts of equal length
that the server has not seen. A figure agrees if the clients' medians differ by no more than their own rounds do.
Clients run on the last core and a server that is started here on the others: AIPerf takes fifty times our generator's
CPU.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from benchmarks import figures, machine, other_clients, peer_servers, report
from benchmarks.arrivals import Arrival, Trace
from benchmarks.driver import Extent, LoadResult, drive
from benchmarks.lengths import Fixed
from benchmarks.openai_target import OpenAITarget
from benchmarks.other_clients import START_S, TOKENS, Found, Tool
from benchmarks.prompts import Prompts, PromptSource
from benchmarks.server_process import ENGINES, running_server
from benchmarks.target import EnsembleTarget, Target
from benchmarks.workload import Workload
from contract import manifest
from contract.errors import EngineFailed, InvalidArgument, NotFound

T = TypeVar("T")
WARMUP = 4  # requests before the first round
CPU = "CPU of the client, s"  # its start included; not compared
PERF_ANALYZER, AIPERF = "perf_analyzer", "AIPerf"
# Streams at once: for a few, AIPerf's processes take a whole core.
STREAMS = {PERF_ANALYZER: (1, 8, 32), AIPERF: (1, 4)}


@dataclass(frozen=True)
class Offered:
    """A load: so many streams at once, or so many requests per second at even distances."""

    streams: int | None = None
    per_s: float | None = None

    def __str__(self) -> str:
        return f"{self.per_s:g} a second" if self.per_s else f"{self.streams} at once"

    def workload(self, requests: int, stream: bool, seed: int) -> Workload:
        evenly = Trace(tuple(Arrival(n / self.per_s) for n in range(requests))) if self.per_s else None
        lengths = Fixed(TOKENS[0]), Fixed(TOKENS[1])
        return Workload(None if self.per_s else self.streams, evenly, *lengths, stream=stream, seed=seed)


@dataclass
class Comparison:
    """One load by our client and by another. ours, theirs: each figure's value in every round."""

    client: str
    load: str
    ours: dict[str, list[float]] = field(default_factory=dict)
    theirs: dict[str, list[float]] = field(default_factory=dict)

    def add(self, ours: Found, theirs: Found) -> None:
        """Add a round: the figures that both have."""
        for name in (name for name in theirs if name in ours):
            self.ours.setdefault(name, []).append(ours[name])
            self.theirs.setdefault(name, []).append(theirs[name])

    def ratio(self, name: str) -> float:
        """Return their median over ours."""
        return statistics.median(self.theirs[name]) / statistics.median(self.ours[name])

    def noise(self, name: str) -> float:
        """Return by how much the rounds of either client differ."""
        return max(figures.noise(self.ours[name]), figures.noise(self.theirs[name]))

    def apart(self, name: str) -> float:
        """Return by which factor their medians differ, less 1."""
        return max(ratio := self.ratio(name), 1 / ratio) - 1

    @property
    def compared(self) -> list[str]:
        return [name for name in self.theirs if name != CPU]

    def goals(self) -> list[report.Goal]:
        about = f"{self.client}, {self.load}"
        return [report.at_most(f"{about}: {name} apart", self.apart(name), self.noise(name)) for name in self.compared]


def ours(target: Target, prompts: PromptSource, workload: Workload, requests: int) -> Found:
    """Return the figures of one load by our generator. Raises EngineFailed if a request fails."""

    async def send() -> LoadResult:
        async with target:
            return await drive(workload, target, prompts, Extent(None, 0.0, requests))

    records = (result := asyncio.run(send())).answered()
    window = min(record.intended_s for record in records), max(record.ended_s for record in records)
    found = figures.compute(records, window)
    values = {"requests/s": found.requests_per_s, "tokens/s": found.output_tokens_per_s}
    values |= {f"{name} p50, ms": 1e3 * of.p50 for name, of in (("TTFT", found.ttft_s), ("latency", found.latency_s))}
    # As AIPerf has it: of a request, not of a token.
    itl = figures.spread([(record.ended_s - (record.first_s or 0.0)) / max(1, record.tokens - 1) for record in records])
    return values | {"ITL p50, ms": 1e3 * itl.p50, CPU: result.client_cpu_s}


def run(
    clients: Sequence[str],
    engine: str,
    url: str,
    streams: Sequence[int] | None,
    rates: Sequence[float],
    requests: int,
    rounds: int,
    unary: bool,
    out: Path,
) -> int:
    """Measure, print, write clients.json. Returns 1 if none of the other clients can run here.

    url: HOST:PORT of a server of the engine that runs already, for perf_analyzer, or http://HOST:PORT of a gateway, for
        AIPerf; "" starts them.
    streams, rates: loads; no streams: those of STREAMS.
    unary: answers that are not streamed, which AIPerf is not asked for.
    """
    if url:
        reached = AIPERF if url.startswith("http") else PERF_ANALYZER
        if reached not in clients:
            allowed = f"must be HOST:PORT for {PERF_ANALYZER}, http://HOST:PORT for {AIPERF}"
            raise InvalidArgument("url", f"{allowed}, got {url!r} for {', '.join(clients)}")
        clients = [reached]
    else:
        manifest.load(ENGINES / engine)  # raises where there is none
    conditions, skipped = machine.described(), dict[str, str]()
    found: list[Comparison] = []
    print(report.on(conditions), flush=True)
    prompts = Prompts.for_engine(ENGINES / engine)

    def compare(target: Callable[[], Target], tool: Tool) -> None:
        ours(target(), prompts, Offered(1).workload(WARMUP, not unary, 0), WARMUP)
        loads = [*map(Offered, streams or STREAMS[tool.name]), *(Offered(per_s=rate) for rate in rates)]
        for load in loads:
            options = [tool.concurrency, f"{load.streams}"]
            if load.per_s:
                options = [tool.rate, f"{load.per_s:g}", *tool.evenly]
            count, one = max(requests, 2 * (load.streams or 1)), Comparison(tool.name, str(load))
            found.append(one)
            for n in range(rounds):
                seed = 1000 * n + (load.streams or 500)
                began_s = time.monotonic()
                mine = ours(target(), prompts, load.workload(count, not unary, seed), count)
                limit_s, before_s = START_S + 3 * (time.monotonic() - began_s), machine.children_s()
                folder = out / tool.name / f"{load}-{n}".replace(" ", "-")
                theirs = tool.measure(options, count, seed, folder, limit_s)
                one.add(mine, theirs | {CPU: machine.children_s() - before_s})
            print(described([one]), flush=True)
            keep()

    cores = machine.cores()

    def started(stack: ExitStack, server: AbstractContextManager[T]) -> T:
        """Start a server on all cores but the last, which the clients have from then on."""
        with machine.on_cores(cores[:-1] or cores):
            running = stack.enter_context(server)
        stack.enter_context(machine.on_cores(cores[-1:]))
        return running

    def by_perf_analyzer(stack: ExitStack) -> None:
        server = url or started(stack, running_server(engine)).url
        target = partial(EnsembleTarget, server, timings=False, model="ensemble")
        compare(target, other_clients.perf_analyzer(server, prompts, not unary))

    def by_aiperf(stack: ExitStack) -> None:
        if unary:
            raise NotFound("it is compared on streams only")
        gateway = url or started(stack, peer_servers.gateway(engine))
        target = partial(OpenAITarget, gateway, engine, peer_servers.WITH_USAGE)
        compare(target, other_clients.aiperf(gateway, engine, ENGINES / engine))

    def keep() -> None:
        """Write what was measured so far: a run that is cut off has kept it."""
        whole = [one for one in found if one.theirs]
        table = {"conditions": conditions, "comparisons": [asdict(one) for one in whole], "compared": compared(whole)}
        goals = [goal for one in whole for goal in one.goals()]
        notes = [f"skipped: {client}: {reason}" for client, reason in skipped.items()] + [*map(share, whole)]
        report.write_json(table | {"goals": goals, "notes": notes}, out, "clients")

    for client, measure in ((PERF_ANALYZER, by_perf_analyzer), (AIPERF, by_aiperf)):
        if client not in clients:
            continue
        try:
            with ExitStack() as stack:
                measure(stack)
        except (NotFound, EngineFailed) as error:
            skipped[client] = str(error)
            print(f"  skipped: {client}: {error}", flush=True)
    keep()
    return 0 if any(one.theirs for one in found) else 1


def described(found: Sequence[Comparison]) -> str:
    rows = []
    for one in found:
        for name in one.theirs:
            medians = (f"{statistics.median(of[name]):.1f}" for of in (one.ours, one.theirs))
            agree = "" if name == CPU else "yes" if one.apart(name) <= one.noise(name) else "NO"
            about = f"{one.client}, {one.load}: {name}"
            rows.append((about, *medians, f"{one.ratio(name):.3f}", f"{one.noise(name):.0%}", agree))
    header = ("client, load: figure", "ours", "theirs", "theirs/ours", "noise", "agree within noise")
    return report.table(rows, header)


def share(of: Comparison) -> str:
    """Say what CPU the clients took."""
    ours, theirs = statistics.median(of.ours[CPU]), statistics.median(of.theirs[CPU])
    return f"{of.client}, {of.load}: {theirs:.1f} s of CPU, its start included; ours {ours:.1f}"


def compared(found: Sequence[Comparison]) -> dict[str, dict[str, object]]:
    """Return how far the clients are apart, by figure, for ``benchmarks.suite``."""
    apart: dict[str, list[float]] = {}
    for one in found:
        for name in one.compared:
            pairs = [theirs / mine for theirs, mine in zip(one.theirs[name], one.ours[name], strict=True)]
            label = f"clients apart, factor: {one.client}, {name.removesuffix(', ms')}, {one.load}"
            apart[label] = [max(ratio, 1 / ratio) for ratio in pairs]
    return figures.compared(figures.LOWER, apart)
