"""Compare our server with other projects': same weights, machine, prompts, precision and load generator, in one run.

All are started first, then take turns at every concurrency, round after round. A load is warm once every client has had
an answer, and is measured until as many more have ended. A round in which other processes used too much of the machine
is repeated, and the least disturbed try is kept. Greedy, answers of a fixed length, prompts that no server has seen.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import figures, machine, peer_servers, progress, report
from benchmarks.driver import Extent, drive
from benchmarks.lengths import Fixed, Lengths
from benchmarks.lengths import parse as lengths_of
from benchmarks.machine import HostLoad
from benchmarks.peer_servers import PEERS, Peer, Running, Subject
from benchmarks.prompts import KINDS, Prompts
from benchmarks.record import Record
from benchmarks.self_check import OTHERS_SHARE
from benchmarks.workload import Workload
from contract.errors import InvalidArgument, TridentError

WARMUP_S, LOAD_S = 60.0, 60.0  # at most
IDLE_SAMPLE_S = 2.0
IDLE_SHARE = 0.05  # of a core; a server that uses more is reported
TRIES = 2  # of a round, while other processes disturb it
COMPARED_PROMPTS = 8
COMPARED_TOKENS = 32
LEAST_CONTEXT = 1024  # tokens
BEGIN_TOKENS = 8  # that a server may put in front of a prompt, at most
BATCHED = 8
SPEED, SPEED_GOAL = "tokens/s of the best peer's", 1.1


@dataclass
class Round:
    """One server at one concurrency in one round. CPU in seconds, of the server's processes and of the client.

    steady: whether every client had an answer in the warm-up, and as many more ended in time.
    """

    peer: str
    prompts: str
    concurrency: int
    number: int
    tokens_per_s: float
    tokens: int
    ttfts_s: list[float]
    failed: int
    input_tokens: list[int]
    steady: bool
    server_cpu_s: float
    client_cpu_s: float
    host_load: HostLoad


@dataclass
class Result:
    """What was measured of one server besides its rounds.

    load_s: from start to the first answer; nan if it was not started here.
    peak_rss_bytes, idle_share: memory, and cores used without requests; 0 and nan if its processes are not seen.
    alone, batched: greedy texts, requested one by one and BATCHED at once.
    """

    load_s: float
    peak_rss_bytes: int = 0
    idle_share: float = 0.0
    alone: list[str] = field(default_factory=list)
    batched: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """The load that every server gets. prompts: kinds of prompt, of ``prompts.KINDS``; duration_s: at least."""

    subject: Subject
    levels: tuple[int, ...]
    rounds: int
    duration_s: float
    input: str
    output: str
    prompts: tuple[str, ...] = ("words",)

    def workload(self, level: int, number: int) -> Workload:
        """Return the load of a round; it is the same for every server."""
        lengths = lengths_of(self.input, "input"), lengths_of(self.output, "output")
        return Workload(level, None, *lengths, seed=1000 * number + level)


def run(names: Sequence[str], plan: Plan, out: Path, also: Sequence[Peer] = ()) -> int:
    """Measure, print, write peers.json. also: servers that run already. Returns 1 if no server could be started."""
    plan = _fitted(plan)  # refuses wrong lengths before servers are installed, which takes minutes
    kinds = {kind: KINDS[kind].for_engine(plan.subject.checkpoint) for kind in plan.prompts}
    prompts = next(iter(kinds.values()))
    texts = [plan.workload(1, 10_000).request(n, prompts).prompt for n in range(COMPARED_PROMPTS)]
    comparison = Comparison(plan)
    running: list[Running] = []
    try:
        # Install everything before starting anything: servers would idle.
        for name in names:
            with comparison.skipping(peer := PEERS[name]):
                if peer.environment is not None:
                    peer.environment.ensure()
        for peer in (PEERS[name] for name in names if PEERS[name].name not in comparison.skipped):
            print(f"starting {peer.name}", file=sys.stderr, flush=True)
            with comparison.skipping(peer):
                _add(peer_servers.start(peer, plan.subject, out / "logs"), texts, running, comparison)
        for peer in also:
            with comparison.skipping(peer):
                _add(Running(peer, plan.subject), texts, running, comparison)
        if not running:
            print("no server could be started:\n" + "\n".join(comparison.skipped.values()), file=sys.stderr)
            return 1
        asyncio.run(_measured(running, kinds, comparison))
    finally:
        try:  # also after an interruption, and first: to stop the servers may take longer than we are given
            if comparison.rounds:
                print(text := _report(comparison), flush=True)
                table = {**comparison.to_json(), "compared": compared(comparison), "goals": goals(comparison)}
                report.write_json(table | {"notes": _notes(comparison)}, out, "peers")
                (out / "peers.txt").write_text(text + "\n")
        finally:
            for server in running:
                server.stop()
    return 0


@dataclass
class Comparison:
    plan: Plan
    rounds: list[Round] = field(default_factory=list)
    results: dict[str, Result] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    conditions: dict[str, object] = field(default_factory=machine.described)

    @contextmanager
    def skipping(self, peer: Peer) -> Iterator[None]:
        """Note and print why a server is skipped if the block fails."""
        try:
            yield
        except TridentError as error:
            self.skipped[peer.name] = str(error)
            print(f"skipped, {peer.name}: {error}", file=sys.stderr, flush=True)

    def to_json(self) -> dict[str, object]:
        table = asdict(self)
        table["plan"]["subject"]["checkpoint"] = str(self.plan.subject.checkpoint)
        return table


def _fitted(plan: Plan) -> Plan:
    """Return the plan with the context that its lengths take. Raises InvalidArgument."""
    load, subject = plan.workload(1, 0), plan.subject
    longest = load.input_tokens.most + max(load.output_tokens.most, COMPARED_TOKENS)
    if longest > subject.max_len:
        allowed = f"must be, with the output, at most the {subject.max_len} tokens that {subject.name} takes"
        raise InvalidArgument("input", f"{allowed}; got up to {longest}")
    max_len = min(subject.max_len, max(LEAST_CONTEXT, longest + BEGIN_TOKENS))
    return dataclasses.replace(plan, subject=dataclasses.replace(subject, max_len=max_len))


def _add(server: Running, texts: Sequence[str], running: list[Running], comparison: Comparison) -> None:
    """Add a server to ``running``, with its answers to ``texts``. Raises TridentError if it gives none."""
    running.append(server)
    try:
        result = asyncio.run(_answers(server, texts))
    except TridentError:
        running.remove(server)
        server.stop()
        raise
    comparison.results[server.name] = result
    comparison.settings[server.name] = f"{server.peer.weights(server.subject)} weights; {server.peer.settings}"


async def _answers(server: Running, texts: Sequence[str]) -> Result:
    result = Result(await peer_servers.answered(server))
    async with server.target() as target:
        result.alone = [await peer_servers.text(target, prompt, COMPARED_TOKENS) for prompt in texts]
        many = (peer_servers.text(target, prompt, COMPARED_TOKENS) for prompt in texts[:BATCHED])
        result.batched = await asyncio.gather(*many)
    return result


async def _measured(running: list[Running], kinds: Mapping[str, Prompts], comparison: Comparison) -> None:
    plan = comparison.plan
    before = {server.name: server.use().cpu_s for server in running}
    await asyncio.sleep(IDLE_SAMPLE_S)
    for server in running:
        comparison.results[server.name].idle_share = (server.use().cpu_s - before[server.name]) / IDLE_SAMPLE_S
    for n in range(plan.rounds):
        order = running[n % len(running) :] + running[: n % len(running)]
        for level, kind, server in itertools.product(plan.levels, kinds, order):
            comparison.rounds.append(await _undisturbed_round(server, level, n, plan, kind, kinds[kind]))
            comparison.results[server.name].peak_rss_bytes = server.use().peak_rss_bytes


async def _undisturbed_round(server: Running, level: int, n: int, plan: Plan, kind: str, prompts: Prompts) -> Round:
    """Return the first undisturbed try, or the least disturbed of a few."""
    tries: list[Round] = []
    while not tries or (tries[-1].host_load.disturbance > OTHERS_SHARE and len(tries) < TRIES):
        # New prompts for every try: the server may have cached those of the one before.
        load = plan.workload(level, n + 100 * len(tries))
        tries.append(await _round(server, level, n, plan, kind, prompts, load))
    return min(tries, key=lambda part: part.host_load.disturbance)


async def _round(
    server: Running, level: int, n: int, plan: Plan, kind: str, prompts: Prompts, workload: Workload
) -> Round:
    extent = Extent(plan.duration_s, WARMUP_S, answers=level, most_s=max(LOAD_S, plan.duration_s))
    watch, used_before = machine.Watch(), server.use().cpu_s
    progress.show(f"{server.name}, concurrency {level}, round {n + 1}")
    async with server.target() as target:
        result = await drive(workload, target, prompts, extent)
    server_cpu_s = server.use().cpu_s - used_before
    assert result.steady is not None, "the extent counts answers"
    begin_s, end_s, steady = result.steady
    mine = [record for record in result.records if begin_s <= record.intended_s <= end_s]
    return Round(
        server.name,
        kind,
        level,
        n,
        tokens_per_s=figures.compute(result.records, (begin_s, end_s)).output_tokens_per_s,
        tokens=sum(record.tokens for record in result.records),
        ttfts_s=[record.ttft_s for record in mine if record.ttft_s is not None],
        failed=sum(_wrong(record, workload.output_tokens) for record in result.records),
        input_tokens=sorted({record.input_tokens for record in result.records if record.ok}),
        steady=steady,
        server_cpu_s=server_cpu_s,
        client_cpu_s=result.client_cpu_s,
        # CPU of a server that is not seen cannot be told from that of other processes: none counts as theirs.
        host_load=watch.load(server_cpu_s),
    )


def _wrong(record: Record, requested: Lengths) -> bool:
    """Return whether an answer failed, or its length differs from its usage or from the one that all were to have."""
    known = {record.usage_tokens, requested.tokens if isinstance(requested, Fixed) else None} - {None}
    return not record.ok or known - {record.tokens} != set()


def _report(comparison: Comparison) -> str:
    plan, subject = comparison.plan, comparison.plan.subject
    parts = [
        f"{subject.name}, {subject.precision}: in {plan.input}, out {plan.output} tokens, greedy, end tokens ignored; "
        f"{plan.rounds} rounds, {plan.duration_s:g} s and one more answer a client at least; "
        f"{report.on(comparison.conditions)}\n  prompts: words are drawn at random, text is passages of docs/",
        report.table(
            [row for level in plan.levels for kind in plan.prompts for row in _rows(comparison, level, kind)],
            ("server", "weights", "prompts", "at", "tok/s", "range", "of best peer", "TTFT p50 ms", "p95")
            + ("CPU µs/tok", "client", "wrong"),
        ),
        report.table(
            [_of_server(comparison, name, result) for name, result in comparison.results.items()],
            ("server", "load s", "peak RSS MB", "idle CPU", "text as reference", "text among 8 as alone"),
        ),
        f"  reference for text: {_reference(comparison)}; {COMPARED_PROMPTS} prompts, {COMPARED_TOKENS} tokens each",
        *(f"  {note}" for note in _notes(comparison)),
    ]
    return "\n\n".join(parts[:3]) + "\n" + "\n".join(parts[3:])


def _notes(comparison: Comparison) -> list[str]:
    """Return how the servers were set, which are missing, and what may make the figures wrong."""
    settings = [f"{name}: {settings}" for name, settings in comparison.settings.items()]
    skipped = [f"skipped, {name}: {reason}" for name, reason in comparison.skipped.items()]
    return settings + skipped + _doubts(comparison)


def goals(comparison: Comparison) -> list[report.Goal]:
    """Compare ours with the best peer: tokens/s, and TTFT p95."""
    found, out = compared(comparison), list[report.Goal]()
    for level, kind in itertools.product(comparison.plan.levels, comparison.plan.prompts):
        mine = _of(comparison, level, kind)
        first_ms = {name: figures.spread([s for one in of for s in one.ttfts_s]).p95 * 1e3 for name, of in mine.items()}
        for name in mine:
            label = _label(comparison.plan, name, kind, level)
            if values := found.get(f"{SPEED}: {label}", {}).get("values"):
                ratio = statistics.median(values)
                # A peer that answered nothing has no first token.
                peers = (ms for peer, ms in first_ms.items() if not peer.startswith("Trident") and ms > 0)
                theirs = min(peers, default=math.nan)
                out.append(report.at_least(f"{SPEED}: {label}", ratio, SPEED_GOAL))
                out.append(report.at_most(f"TTFT p95 of the best peer's: {label}", first_ms[name] / theirs, 1.0))
    return out


def _label(plan: Plan, name: str, kind: str, level: int) -> str:
    return f"{name}, {kind}, {level}" if len(plan.prompts) > 1 else f"{name}, {level}"


def _of(comparison: Comparison, level: int, kind: str) -> dict[str, list[Round]]:
    """Return the rounds of each server at one concurrency with one kind of prompts."""
    found: dict[str, list[Round]] = {}
    for one in comparison.rounds:
        if (one.concurrency, one.prompts) == (level, kind):
            found.setdefault(one.peer, []).append(one)
    return found


def compared(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """Return what ``benchmarks.suite`` compares; the best peer is that of the same round."""
    higher: dict[str, list[float]] = {}
    results = comparison.results.items()
    lower = {f"start, s: {name}": [one.load_s] for name, one in results if not math.isnan(one.load_s)}
    lower |= {f"memory at most, MB: {name}": [one.peak_rss_bytes / 1e6] for name, one in results if one.peak_rss_bytes}
    for level, kind in itertools.product(comparison.plan.levels, comparison.plan.prompts):
        mine = _of(comparison, level, kind)
        for name, rounds in mine.items():
            label = _label(comparison.plan, name, kind, level)
            higher[f"tokens/s: {label}"] = [one.tokens_per_s for one in rounds]
            lower[f"TTFT p95, ms: {label}"] = [1e3 * figures.spread(one.ttfts_s).p95 for one in rounds]
            peers = [of for peer, of in mine.items() if not peer.startswith("Trident")]
            if name.startswith("Trident") and peers and min(map(len, peers)) >= len(rounds):
                best = [max(of[n].tokens_per_s for of in peers) for n in range(len(rounds))]
                ratios = [one.tokens_per_s / most for one, most in zip(rounds, best, strict=True) if most]
                higher[f"{SPEED}: {label}"] = ratios
    return figures.compared(figures.HIGHER, higher) | figures.compared(figures.LOWER, lower)


def _rows(comparison: Comparison, level: int, kind: str) -> list[tuple]:
    mine = _of(comparison, level, kind)
    speed = {name: statistics.median(part.tokens_per_s for part in rounds) for name, rounds in mine.items()}
    best = max((speed[name] for name in speed if not name.startswith("Trident")), default=float("nan"))
    rows = []
    for name, rounds in mine.items():
        speeds, tokens = [part.tokens_per_s for part in rounds], sum(part.tokens for part in rounds) or 1
        ttft = figures.spread([ttft_s for part in rounds for ttft_s in part.ttfts_s])
        cpu = [1e6 * sum(getattr(part, kind) for part in rounds) / tokens for kind in ("server_cpu_s", "client_cpu_s")]
        rows.append(
            (name, comparison.settings[name].partition(" ")[0], kind, level)
            + (report.number(speed[name], 0), f"{min(speeds):,.0f}–{max(speeds):,.0f}")
            + (report.number(speed[name] / best if best else float("nan"), 2), report.ms(ttft.p50), report.ms(ttft.p95))
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
    peak = report.number(result.peak_rss_bytes / 1e6, 0) if result.peak_rss_bytes else "-"
    used = (report.number(result.load_s), peak, report.share(result.idle_share))
    return (name, *used, f"{as_reference} of {len(result.alone)}", f"{as_alone} of {len(result.batched)}")


def _doubts(comparison: Comparison) -> list[str]:
    """Return what may make these figures wrong."""
    doubts = []

    def of_rounds(rounds: list[Round]) -> str:
        return ", ".join(f"{part.peer} at {part.concurrency}" for part in rounds)

    if disturbed := [part for part in comparison.rounds if part.host_load.disturbance > OTHERS_SHARE]:
        most = f"{OTHERS_SHARE:.0%} of the machine, up to {max(part.host_load.disturbance for part in disturbed):.0%}"
        doubts.append(f"other processes used more than {most}, during: {of_rounds(disturbed)}")
    if wrong := [part for part in comparison.rounds if part.failed]:
        which = ", ".join(f"{part.failed} of {part.peer} at {part.concurrency}" for part in wrong)
        doubts.append(f"answers failed, or were not as long as requested or told: {which}")
    if unsteady := [part for part in comparison.rounds if not part.steady]:
        lacks = f"not every client had an answer in {WARMUP_S:g} s, or fewer than as many more ended in {LOAD_S:g} s"
        doubts.append(f"no steady state: {lacks}: {of_rounds(unsteady)}")
    kinds = {settings.partition(" ")[0] for settings in comparison.settings.values()}
    if len(kinds) > 1:
        doubts.append(f"they serve weights of different precision ({', '.join(sorted(kinds))}), see the column")
    if busy := [name for name, part in comparison.results.items() if part.idle_share > IDLE_SHARE]:
        doubts.append(f"used CPU while idle: {', '.join(busy)}; measure them one by one with --only")
    prompts: dict[str, set[int]] = {}
    for part in comparison.rounds:
        prompts.setdefault(part.peer, set()).update(part.input_tokens)
    if not set.intersection(*prompts.values()):
        counted = ", ".join(f"{name} {sorted(counts)}" for name, counts in prompts.items())
        doubts.append(f"they count prompt tokens differently: {counted}")
    return [f"doubt: {doubt}" for doubt in doubts]
