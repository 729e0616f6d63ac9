"""Compare our server with other projects': same weights, machine, prompts, precision and load generator, in one run.

All are started first, then take turns at every concurrency, round after round, so that a noisy machine disturbs all
alike. A round in which other processes used too much of the machine is repeated a few times, and the least disturbed
try is kept. A server that uses CPU while idle is reported. Greedy, answers of a fixed length, prompts that no server
has seen before.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import figures, machine, peer_servers, progress, report
from benchmarks.driver import Extent, drive
from benchmarks.lengths import parse as lengths_of
from benchmarks.machine import HostLoad
from benchmarks.peer_servers import PEERS, Peer, Running, Subject
from benchmarks.prompts import Prompts
from benchmarks.record import Record
from benchmarks.self_check import OTHERS_SHARE
from benchmarks.workload import Workload
from contract.errors import EngineFailed, InvalidArgument, NotFound

WARMUP_S = 1.0
IDLE_SAMPLE_S = 2.0
IDLE_SHARE = 0.05  # of a core; a server that uses more is reported
TRIES = 3  # of a round, while other processes disturb it
COMPARED_PROMPTS = 8
COMPARED_TOKENS = 32
BATCHED = 8


@dataclass
class Round:
    """One server at one concurrency in one round. CPU in seconds, of the server's processes and of the client."""

    peer: str
    concurrency: int
    number: int
    tokens_per_s: float
    tokens: int
    ttfts_s: list[float]
    failed: int
    input_tokens: list[int]
    server_cpu_s: float
    client_cpu_s: float
    host_load: HostLoad


@dataclass
class Result:
    """What was measured of one server besides its rounds.

    load_s: from start to the first answer.
    idle_share: cores used without requests.
    alone, batched: greedy texts, requested one by one and BATCHED at once.
    """

    load_s: float
    peak_rss_bytes: int = 0
    idle_share: float = 0.0
    alone: list[str] = field(default_factory=list)
    batched: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """The load that every server gets."""

    subject: Subject
    levels: tuple[int, ...]
    rounds: int
    duration_s: float
    input: str
    output: str

    def workload(self, level: int, number: int) -> Workload:
        """Return the load of a round; it is the same for every server."""
        lengths = lengths_of(self.input, "input"), lengths_of(self.output, "output")
        return Workload(level, None, *lengths, seed=1000 * number + level)


def run(names: Sequence[str], plan: Plan, out: Path) -> int:
    """Measure, print the tables, write peers.json. Returns 1 if no server could be started."""
    if unknown := [name for name in names if name not in PEERS]:
        raise InvalidArgument("only", f"must be of {', '.join(PEERS)}, got {unknown[0]!r}")
    comparison = Comparison(plan)
    running: list[Running] = []
    try:
        # Install everything before starting anything: it takes minutes, and servers would idle.
        installed = [PEERS[name] for name in names if comparison.tried(PEERS[name], _install)]
        for peer in installed:
            print(f"starting {peer.name}", file=sys.stderr, flush=True)
            comparison.tried(peer, lambda peer: _start(peer, plan.subject, out / "logs", running, comparison))
        if not running:
            print("no server could be started:\n" + "\n".join(comparison.skipped.values()), file=sys.stderr)
            return 1
        asyncio.run(_measured(running, plan, comparison))
    finally:
        for server in running:
            server.stop()
        if comparison.rounds:  # also after an interruption
            print(text := _report(comparison))
            report.write_json(comparison.to_json(), out, "peers")
            (out / "peers.txt").write_text(text + "\n")
    return 0


@dataclass
class Comparison:
    plan: Plan
    rounds: list[Round] = field(default_factory=list)
    results: dict[str, Result] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    conditions: dict[str, object] = field(default_factory=machine.described)

    def tried(self, peer: Peer, step: Callable[[Peer], None]) -> bool:
        """Do a step; if it fails, note and print why the server is skipped, and return False."""
        try:
            step(peer)
        except (NotFound, EngineFailed) as error:
            self.skipped[peer.name] = str(error)
            print(f"skipped, {peer.name}: {error}", file=sys.stderr, flush=True)
            return False
        return True

    def to_json(self) -> dict[str, object]:
        table = asdict(self)
        table["plan"]["subject"]["checkpoint"] = str(self.plan.subject.checkpoint)
        return table


def _install(peer: Peer) -> None:
    if peer.environment is not None:
        peer.environment.ensure()


def _start(peer: Peer, subject: Subject, logs: Path, running: list[Running], comparison: Comparison) -> None:
    """Start a server; add it to ``running`` once it has answered. Raises EngineFailed."""
    running.append(server := peer_servers.start(peer, subject, logs))
    try:
        server.load_s = asyncio.run(peer_servers.answered(server))
    except EngineFailed:
        running.remove(server)
        server.stop()
        raise
    comparison.results[peer.name] = Result(server.load_s)
    comparison.settings[peer.name] = peer.settings


async def _measured(running: list[Running], plan: Plan, comparison: Comparison) -> None:
    prompts = Prompts.for_engine(plan.subject.checkpoint)
    texts = [plan.workload(1, 10_000).request(n, prompts).prompt for n in range(COMPARED_PROMPTS)]
    for server in running:
        result, target = comparison.results[server.name], server.target()
        try:
            result.alone = [await peer_servers.text(target, prompt, COMPARED_TOKENS) for prompt in texts]
            many = (peer_servers.text(target, prompt, COMPARED_TOKENS) for prompt in texts[:BATCHED])
            result.batched = list(await asyncio.gather(*many))
        finally:
            await target.close()
    before = {server.name: server.use().cpu_s for server in running}
    await asyncio.sleep(IDLE_SAMPLE_S)
    for server in running:
        comparison.results[server.name].idle_share = (server.use().cpu_s - before[server.name]) / IDLE_SAMPLE_S
    for n in range(plan.rounds):
        order = running[n % len(running) :] + running[: n % len(running)]
        for level in plan.levels:
            for server in order:
                comparison.rounds.append(await _undisturbed_round(server, level, n, plan, prompts))
                comparison.results[server.name].peak_rss_bytes = server.use().peak_rss_bytes


async def _undisturbed_round(server: Running, level: int, n: int, plan: Plan, prompts: Prompts) -> Round:
    """Return the first undisturbed try, or the least disturbed of a few."""
    tries: list[Round] = []
    while not tries or (tries[-1].host_load.disturbance > OTHERS_SHARE and len(tries) < TRIES):
        # New prompts for every try: the server may have cached those of the one before.
        tries.append(await _round(server, level, n, plan, prompts, plan.workload(level, n + 100 * len(tries))))
    return min(tries, key=lambda part: part.host_load.disturbance)


async def _round(server: Running, level: int, n: int, plan: Plan, prompts: Prompts, workload: Workload) -> Round:
    extent, target = Extent(plan.duration_s, WARMUP_S), server.target()
    machine_before, used_before = machine.cpu_time(), server.use().cpu_s
    try:
        progress.show(f"{server.name}, concurrency {level}, round {n + 1}")
        result = await drive(workload, target, prompts, extent)
    finally:
        await target.close()
    server_cpu_s, client_cpu_s = server.use().cpu_s - used_before, sum(use.cpu_s for use in result.generators)
    window = figures.window_of(result.records, result.started_s, WARMUP_S, plan.duration_s)
    mine = [record for record in result.records if window[0] <= record.intended_s <= window[1]]
    return Round(
        server.name,
        level,
        n,
        tokens_per_s=figures.compute(result.records, window).output_tokens_per_s,
        tokens=sum(record.tokens for record in result.records),
        ttfts_s=[record.ttft_s for record in mine if record.ttft_s is not None],
        failed=sum(_wrong(record) for record in result.records),
        input_tokens=sorted({record.input_tokens for record in result.records if record.ok}),
        server_cpu_s=server_cpu_s,
        client_cpu_s=client_cpu_s,
        host_load=machine.host_load(machine_before, machine.cpu_time(), server_cpu_s + client_cpu_s),
    )


def _wrong(record: Record) -> bool:
    """Return whether an answer failed, or its length differs from its usage."""
    return not record.ok or (record.usage_tokens is not None and record.usage_tokens != record.tokens)


def _report(comparison: Comparison) -> str:
    plan, subject = comparison.plan, comparison.plan.subject
    parts = [
        f"{subject.name}, {subject.precision}: in {plan.input}, out {plan.output} tokens, greedy, end tokens ignored; "
        f"{plan.rounds} rounds of {plan.duration_s:g} s each; {report.on(comparison.conditions)}",
        report.table(
            [row for level in plan.levels for row in _rows(comparison, level)],
            ("server", "at", "tok/s", "range", "of best peer", "TTFT p50 ms", "p95", "CPU µs/tok", "client", "wrong"),
        ),
        report.table(
            [_of_server(comparison, name, result) for name, result in comparison.results.items()],
            ("server", "load s", "peak RSS MB", "idle CPU", "text as reference", "text among 8 as alone"),
        ),
        f"  reference for text: {_reference(comparison)}; {COMPARED_PROMPTS} prompts, {COMPARED_TOKENS} tokens each",
        *(f"  {name}: {settings}" for name, settings in comparison.settings.items()),
        *(f"  skipped, {name}: {reason}" for name, reason in comparison.skipped.items()),
        *_doubts(comparison),
    ]
    return "\n\n".join(parts[:3]) + "\n" + "\n".join(parts[3:])


def _rows(comparison: Comparison, level: int) -> list[tuple]:
    mine = {
        name: [r for r in comparison.rounds if (r.peer, r.concurrency) == (name, level)] for name in comparison.settings
    }
    mine = {name: rounds for name, rounds in mine.items() if rounds}
    speed = {name: statistics.median(part.tokens_per_s for part in rounds) for name, rounds in mine.items()}
    best = max((speed[name] for name in speed if not name.startswith("Trident")), default=float("nan"))
    rows = []
    for name, rounds in mine.items():
        speeds, tokens = [part.tokens_per_s for part in rounds], sum(part.tokens for part in rounds) or 1
        ttft = figures.spread([ttft_s for part in rounds for ttft_s in part.ttfts_s])
        cpu = [1e6 * sum(getattr(part, kind) for part in rounds) / tokens for kind in ("server_cpu_s", "client_cpu_s")]
        rows.append(
            (name, level, report.number(speed[name], 0), f"{min(speeds):,.0f}–{max(speeds):,.0f}")
            + (report.number(speed[name] / best, 2), report.ms(ttft.p50), report.ms(ttft.p95))
            + (*(report.number(microseconds, 0) for microseconds in cpu), sum(part.failed for part in rounds))
        )
    return rows


def _reference(comparison: Comparison) -> str:
    """Return the server whose texts are the reference: transformers if it runs."""
    transformers = PEERS["transformers"].name
    return transformers if transformers in comparison.results else next(iter(comparison.results))


def _of_server(comparison: Comparison, name: str, result: Result) -> tuple[str, ...]:
    reference = comparison.results[_reference(comparison)]
    as_reference = sum(a == b for a, b in zip(result.alone, reference.alone, strict=True))
    as_alone = sum(a == b for a, b in zip(result.batched, result.alone, strict=False))
    used = (f"{result.load_s:.1f}", f"{result.peak_rss_bytes / 1e6:,.0f}", f"{result.idle_share:.0%}")
    return (name, *used, f"{as_reference} of {len(result.alone)}", f"{as_alone} of {len(result.batched)}")


def _doubts(comparison: Comparison) -> list[str]:
    """Return what may make these figures wrong."""
    doubts = []
    disturbed = [part for part in comparison.rounds if part.host_load.disturbance > OTHERS_SHARE]
    if disturbed:
        most = max(part.host_load.disturbance for part in disturbed)
        which = ", ".join(f"{part.peer} at {part.concurrency}" for part in disturbed)
        doubts.append(
            f"other processes used more than {OTHERS_SHARE:.0%} of the machine, up to {most:.0%}, during: {which}"
        )
    busy = [name for name, part in comparison.results.items() if part.idle_share > IDLE_SHARE]
    if busy:
        doubts.append(f"used CPU while idle: {', '.join(busy)}; measure them one by one with --only")
    prompts = {
        name: {n for part in comparison.rounds if part.peer == name for n in part.input_tokens}
        for name in comparison.settings
    }
    if len({frozenset(counts) for counts in prompts.values()}) > 1:
        counted = ", ".join(f"{name} {sorted(counts)}" for name, counts in prompts.items())
        doubts.append(f"they count prompt tokens differently: {counted}")
    return [f"  doubt: {doubt}" for doubt in doubts]
