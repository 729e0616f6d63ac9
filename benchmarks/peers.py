"""Our server beside other people's: the same weights, machine, prompts, precision and load generator, in one run.

All are started first, then take turns at every concurrency, round after round, so that a noisy machine disturbs all
alike; a turn in which others used more of the machine than a figure bears is taken again, a few times, and the least
disturbed one is kept. A server that keeps a core busy while nobody asks is named. Greedy, answers of a fixed length,
prompts that no server has seen before.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import figures, machine, peer_servers, report
from benchmarks.driver import Extent, drive
from benchmarks.lengths import parse as lengths_of
from benchmarks.machine import Company
from benchmarks.peer_servers import PEERS, Running, Subject
from benchmarks.progress import ProgressLine
from benchmarks.prompts import Prompts
from benchmarks.record import Record
from benchmarks.self_check import OTHERS_SHARE
from benchmarks.workload import Workload
from contract.errors import EngineFailed, InvalidArgument, NotFound

WARMUP_S = 1.0
IDLE_SAMPLE_S = 2.0
IDLE_SHARE = 0.05  # of a core; more, and it is no quiet neighbour
TRIES = 3  # of a turn, while others disturb it
COMPARED_PROMPTS = 8
COMPARED_TOKENS = 32
BATCHED = 8


@dataclass
class Turn:
    """One server's turn at one concurrency. CPU in seconds, of the server's processes and of the client."""

    peer: str
    concurrency: int
    round: int
    tokens_per_s: float
    tokens: int
    ttfts_s: list[float]
    failed: int
    input_tokens: list[int]
    server_cpu_s: float
    client_cpu_s: float
    company: Company

    @property
    def disturbed(self) -> float:
        """The share of the machine that went to others."""
        return self.company.others + self.company.stolen


@dataclass
class Standing:
    """What one server showed apart from its turns. texts: greedy answers asked one by one, then eight at once."""

    load_s: float
    peak_rss_bytes: int = 0
    idle_share: float = 0.0
    alone: list[str] = field(default_factory=list)
    batched: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """What everybody is asked."""

    subject: Subject
    levels: tuple[int, ...]
    rounds: int
    duration_s: float
    input: str
    output: str

    def workload(self, level: int, turn: int) -> Workload:
        """Prompts depend on the round and the level, never on who is asked."""
        lengths = {"input_tokens": lengths_of(self.input, "input"), "output_tokens": lengths_of(self.output, "output")}
        return Workload(concurrency=level, seed=1000 * turn + level, **lengths)


def run(names: Sequence[str], plan: Plan, out: Path) -> int:
    """Measures, prints the tables and writes peers.json. 1 if nobody could be measured."""
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise InvalidArgument("only", f"got {unknown[0]!r}; allowed are {', '.join(PEERS)}")
    found = _Found(plan)
    running: list[Running] = []
    try:
        # All installing comes before all starting: it takes minutes, and servers would wait.
        for name in [name for name in names if _installed(name, found)]:
            _start(name, plan.subject, out / "logs", running, found)
        if not running:
            print("nobody could be started:\n" + "\n".join(found.skipped.values()), file=sys.stderr)
            return 1
        asyncio.run(_measured(running, plan, found))
    finally:
        for server in running:
            server.stop()
        if found.turns:  # what was measured before an interruption is kept
            _keep(found, out)
    return 0


def _keep(found: _Found, out: Path) -> None:
    text = _report(found)
    print(text)
    out.mkdir(parents=True, exist_ok=True)
    (out / "peers.json").write_text(json.dumps(found.to_json(), indent=1) + "\n")
    (out / "peers.txt").write_text(text + "\n")
    print(f"\n  written: {out / 'peers.json'}, {out / 'peers.txt'}; their logs: {out / 'logs'}")


@dataclass
class _Found:
    plan: Plan
    turns: list[Turn] = field(default_factory=list)
    standings: dict[str, Standing] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    conditions: dict[str, object] = field(default_factory=machine.described)

    def to_json(self) -> dict[str, object]:
        table = asdict(self)
        table["plan"]["subject"]["checkpoint"] = str(self.plan.subject.checkpoint)
        return table


def _installed(name: str, found: _Found) -> bool:
    peer = PEERS[name]
    try:
        if peer.environment is not None:
            peer.environment.ensure()
    except NotFound as error:
        found.skipped[peer.name] = str(error)
        print(f"skipped, {peer.name}: {error}", file=sys.stderr, flush=True)
        return False
    return True


def _start(name: str, subject: Subject, logs: Path, running: list[Running], found: _Found) -> None:
    """Adds a server that has answered to ``running``, or the reason why there is none to ``found.skipped``."""
    peer = PEERS[name]
    print(f"starting {peer.name}", file=sys.stderr, flush=True)
    try:
        running.append(server := peer_servers.start(peer, subject, logs))
        try:
            server.load_s = asyncio.run(peer_servers.answered(server))
        except EngineFailed:
            running.remove(server)
            server.stop()
            raise
    except EngineFailed as error:
        found.skipped[peer.name] = str(error)
        print(f"  skipped: {error}", file=sys.stderr, flush=True)
        return
    found.standings[peer.name] = Standing(server.load_s)
    found.said[peer.name] = peer.said


async def _measured(running: list[Running], plan: Plan, found: _Found) -> None:
    prompts = Prompts.for_engine(plan.subject.checkpoint)
    asked = [plan.workload(1, 10_000).request(n, prompts).prompt for n in range(COMPARED_PROMPTS)]
    for server in running:
        standing, door = found.standings[server.name], server.door()
        try:
            standing.alone = [await peer_servers.text(door, prompt, COMPARED_TOKENS) for prompt in asked]
            many = (peer_servers.text(door, prompt, COMPARED_TOKENS) for prompt in asked[:BATCHED])
            standing.batched = list(await asyncio.gather(*many))
        finally:
            await door.close()
    before = {server.name: server.use().cpu_s for server in running}
    await asyncio.sleep(IDLE_SAMPLE_S)
    for server in running:
        found.standings[server.name].idle_share = (server.use().cpu_s - before[server.name]) / IDLE_SAMPLE_S
    for turn in range(plan.rounds):
        order = running[turn % len(running) :] + running[: turn % len(running)]
        for level in plan.levels:
            for server in order:
                found.turns.append(await _quiet_turn(server, level, turn, plan, prompts))
                found.standings[server.name].peak_rss_bytes = server.use().peak_rss_bytes


async def _quiet_turn(server: Running, level: int, turn: int, plan: Plan, prompts: Prompts) -> Turn:
    """The first try that nobody disturbed, or the least disturbed of a few."""
    tries: list[Turn] = []
    while not tries or (tries[-1].disturbed > OTHERS_SHARE and len(tries) < TRIES):
        # Prompts of their own for every try, or the second would find the first's in a cache.
        tries.append(await _turn(server, level, turn, plan, prompts, plan.workload(level, turn + 100 * len(tries))))
    return min(tries, key=lambda one: one.disturbed)


async def _turn(server: Running, level: int, turn: int, plan: Plan, prompts: Prompts, workload: Workload) -> Turn:
    extent, door = Extent(plan.duration_s, WARMUP_S), server.door()
    machine_before, used_before = machine.cpu_time(), server.use().cpu_s
    try:
        with ProgressLine(f"{server.name}, {level} at once, round {turn + 1}") as progress:
            driven = await drive(workload, door, prompts, extent, on_progress=progress)
    finally:
        await door.close()
    server_cpu_s, client_cpu_s = server.use().cpu_s - used_before, sum(use.cpu_s for use in driven.generators)
    company = machine.company(machine_before, machine.cpu_time(), server_cpu_s + client_cpu_s)
    window = figures.window_of(driven.records, driven.started_s, WARMUP_S, plan.duration_s)
    summary = figures.compute(driven.records, window)
    mine = [record for record in driven.records if window[0] <= record.intended_s <= window[1]]
    return Turn(
        server.name,
        level,
        turn,
        summary.output_tokens_per_s,
        sum(record.tokens for record in driven.records),
        [record.ttft_s for record in mine if record.ttft_s is not None],
        sum(_wrong(record) for record in driven.records),
        sorted({record.input_tokens for record in driven.records if record.ok}),
        server_cpu_s,
        client_cpu_s,
        company,
    )


def _wrong(record: Record) -> bool:
    """An answer that failed, or is not as long as it says."""
    return not record.ok or (record.usage_tokens is not None and record.usage_tokens != record.tokens)


def _report(found: _Found) -> str:
    plan, subject = found.plan, found.plan.subject
    parts = [
        f"{subject.name}, {subject.precision}: in {plan.input}, out {plan.output} tokens, greedy, end tokens ignored; "
        f"{plan.rounds} rounds of {plan.duration_s:g} s each; {report.on(found.conditions)}",
        report.table(
            [row for level in plan.levels for row in _rows(found, level)],
            ("server", "at", "tok/s", "range", "of best peer", "TTFT p50 ms", "p95", "CPU µs/tok", "client", "wrong"),
        ),
        report.table(
            [
                (
                    name,
                    f"{one.load_s:.1f}",
                    f"{one.peak_rss_bytes / 1e6:,.0f}",
                    f"{one.idle_share:.0%}",
                    *_same(found, name),
                )
                for name, one in found.standings.items()
            ],
            ("server", "load s", "peak RSS MB", "idle CPU", "text as reference", "text among 8 as alone"),
        ),
        f"  reference for text: {_reference(found)}; {COMPARED_PROMPTS} prompts, {COMPARED_TOKENS} tokens each",
        *(f"  {name}: {said}" for name, said in found.said.items()),
        *(f"  skipped, {name}: {reason}" for name, reason in found.skipped.items()),
        *_doubts(found),
    ]
    return "\n\n".join(parts[:3]) + "\n" + "\n".join(parts[3:])


def _rows(found: _Found, level: int) -> list[tuple]:
    mine = {
        name: [turn for turn in found.turns if (turn.peer, turn.concurrency) == (name, level)] for name in found.said
    }
    mine = {name: turns for name, turns in mine.items() if turns}
    pace = {name: statistics.median(turn.tokens_per_s for turn in turns) for name, turns in mine.items()}
    best = max((pace[name] for name in pace if not name.startswith("Trident")), default=float("nan"))
    rows = []
    for name, turns in mine.items():
        paces, tokens = [turn.tokens_per_s for turn in turns], sum(turn.tokens for turn in turns) or 1
        ttft = figures.spread([ttft_s for turn in turns for ttft_s in turn.ttfts_s])
        cpu = [1e6 * sum(getattr(turn, kind) for turn in turns) / tokens for kind in ("server_cpu_s", "client_cpu_s")]
        rows.append(
            (name, level, report.number(pace[name], 0), f"{min(paces):,.0f}–{max(paces):,.0f}")
            + (report.number(pace[name] / best, 2), report.ms(ttft.p50), report.ms(ttft.p95))
            + (*(report.number(one, 0) for one in cpu), sum(turn.failed for turn in turns))
        )
    return rows


def _reference(found: _Found) -> str:
    """Whose text the others' is held to: transformers', which everybody's weights were made with."""
    return PEERS["transformers"].name if PEERS["transformers"].name in found.standings else next(iter(found.standings))


def _same(found: _Found, name: str) -> tuple[str, str]:
    one, reference = found.standings[name], found.standings[_reference(found)]
    as_reference = sum(a == b for a, b in zip(one.alone, reference.alone, strict=True))
    as_alone = sum(a == b for a, b in zip(one.batched, one.alone, strict=False))
    return f"{as_reference} of {len(one.alone)}", f"{as_alone} of {len(one.batched)}"


def _doubts(found: _Found) -> list[str]:
    """What makes these figures less than they seem."""
    doubts = []
    disturbed = [turn for turn in found.turns if turn.disturbed > OTHERS_SHARE]
    if disturbed:
        most = max(turn.disturbed for turn in disturbed)
        which = ", ".join(f"{turn.peer} at {turn.concurrency}" for turn in disturbed)
        doubts.append(f"others used more than {OTHERS_SHARE:.0%} of the machine, up to {most:.0%}, during: {which}")
    busy = [name for name, one in found.standings.items() if one.idle_share > IDLE_SHARE]
    if busy:
        doubts.append(f"not idle while others had their turn: {', '.join(busy)}; measure them apart with --only")
    prompts = {name: {n for turn in found.turns if turn.peer == name for n in turn.input_tokens} for name in found.said}
    if len({frozenset(counts) for counts in prompts.values()}) > 1:
        counted = ", ".join(f"{name} {sorted(counts)}" for name, counts in prompts.items())
        doubts.append(f"they count the prompts' tokens differently: {counted}")
    return [f"  doubt: {doubt}" for doubt in doubts]
