"""All of it in one run, with its goals: ``python -m benchmarks gateway``."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks import machine, report, self_check
from benchmarks.gateway import burst, contenders, crowd, relaying
from benchmarks.gateway.burst import Burst
from benchmarks.gateway.contenders import FASTAPI, GATEWAY, LITELLM, Contender
from benchmarks.gateway.crowd import Crowd
from benchmarks.gateway.relaying import Relayed, Way
from contract.errors import EngineFailed, NotFound

PARTS = ("latency", "cost", "crowd", "burst")
PEERS = (LITELLM, FASTAPI)
DIRECT_GRPC, DIRECT_OPENAI = "replica itself", "OpenAI upstream itself"
ADDED_P50_MS, ADDED_P99_MS = 1.0, 5.0
CPU_US = 100.0
CROWD, CROWD_MIB = 10_000, 2048.0
BACK_WITHIN_S = 5.0
Goal = tuple[str, float, float, bool]  # what, found, the bound, whether it is met


def run(
    parts: Sequence[str], peers: bool, rounds: int, seconds: float, streams: int, doors: Sequence[str], out: Path
) -> int:
    """Measures, prints, writes gateway.json; 0 whether goals are met or not, they are findings."""
    conditions, clock = machine.described(), machine.cpu_time()
    before = _children_s()
    print(report.on(conditions), flush=True)
    logs = out / "logs"
    rows: list[Relayed] = []
    crowds: list[Crowd] = []
    bursts: list[Burst] = []
    skipped: dict[str, str] = {}
    if {"latency", "cost"} & set(parts):
        with ways(peers, logs, skipped) as found:
            loads = [(relaying.MODERATE, True)] if "latency" in parts else []
            if "cost" in parts:
                loads += [(64, True), (8, False), (64, False)]
            rows = relaying.measure(found, loads, rounds, seconds, logs)
        print(
            f"\nms; {relaying.TOKENS} tokens an answer, {rounds} rounds of {seconds:g} s\n{relaying.described(rows)}\n"
        )
    with ExitStack() as stack:
        if {"crowd", "burst"} & set(parts):
            replica = stack.enter_context(contenders.scripted("replica", logs))
        for door in doors if "crowd" in parts else ():
            with contenders.gateway(replica, logs) as ours:
                crowds.append(crowd.measure(ours, door, streams, streams / 500, 8.0, logs))
            print(crowd.described(crowds[-1]), flush=True)
        for door in doors if "burst" in parts else ():
            with contenders.gateway(replica, logs, burst.RUNNING, burst.WAITING, burst.WAIT_S) as ours:
                bursts.append(burst.measure(ours, door, logs))
            print(burst.described(bursts[-1]), flush=True)
    for name, why in skipped.items():
        print(f"  skipped: {name}: {why}")
    verdicts = goals(rows, crowds, bursts)
    for what, value, goal, met in verdicts:
        print(f"  {'met   ' if met else 'MISSED'}  {what} {goal:g}: {value:.3g}")
    others = machine.company(clock, machine.cpu_time(), _children_s() - before).others
    doubt = "; too much, none of this is to be believed" if others > self_check.OTHERS_SHARE else ""
    print(f"  others used {others:.0%} of the machine meanwhile{doubt}", flush=True)
    table = {
        "conditions": {**conditions, "command": " ".join(sys.argv[1:]), "others_share": others},
        "relayed": [row.to_json() for row in rows],
        "crowd": [one.to_json() for one in crowds],
        "burst": [one.to_json() for one in bursts],
        "skipped": skipped,
        "goals": [dict(zip(("what", "found", "goal", "met"), one, strict=True)) for one in verdicts],
    }
    (out / "gateway.json").write_text(json.dumps(table) + "\n")
    print(f"\n  written: {out / 'gateway.json'}")
    return 0


@contextmanager
def ways(peers: bool, logs: Path, skipped: dict[str, str]) -> Iterator[list[Way]]:
    """The replica and the gateway's doors, and the peers that can be had here; ``skipped`` gets why one cannot."""
    with ExitStack() as stack:
        replica = stack.enter_context(contenders.scripted("replica", logs))
        ours = stack.enter_context(contenders.gateway(replica, logs))
        found = [Way(DIRECT_GRPC, "grpc", replica)]
        found += [Way(f"{GATEWAY}, {door}", door, ours.doors[door], DIRECT_GRPC, ours) for door in ("grpc", "http")]
        if peers:
            upstream = stack.enter_context(contenders.scripted("openai", logs))
            starts = {FASTAPI: (contenders.fastapi_relay, replica), LITELLM: (contenders.litellm, upstream)}
            for name, (start, source) in starts.items():
                try:
                    peer: Contender = stack.enter_context(start(source, logs))
                except (NotFound, EngineFailed) as error:
                    skipped[name] = str(error)
                    continue
                if source == upstream:
                    found.append(Way(DIRECT_OPENAI, "http", upstream))
                direct = DIRECT_OPENAI if source == upstream else DIRECT_GRPC
                found.append(Way(name, "http", peer.doors["http"], direct, peer))
        yield found


def goals(rows: Sequence[Relayed], crowds: Sequence[Crowd], bursts: Sequence[Burst]) -> list[Goal]:
    """The gateway's own; peers have none."""
    out: list[Goal] = []
    for row in rows:
        if not row.way.startswith(GATEWAY):
            continue
        load = f"{row.way}, {row.streams} streams {'paced' if row.paced else 'flat out'}"
        if row.paced and row.streams == relaying.MODERATE:
            for figure, what in (("ttft_ms", "to the first token"), ("travelled_ms", "to a token")):
                for quantile, bound in (("p50", ADDED_P50_MS), ("p99", ADDED_P99_MS)):
                    added = relaying.added_ms(rows, row, figure, quantile)
                    out.append((f"{load}: added {what}, {quantile}, ms, at most", added, bound, added <= bound))
        out.append((f"{load}: CPU, µs per token, at most", row.us_per_token, CPU_US, row.us_per_token <= CPU_US))
        failed = sum(row.errors.values())
        out.append((f"{load}: requests failed, at most", failed, 0, not failed))
    for one in crowds:
        name = f"{one.streams} slow streams, {one.door}"
        out.append((f"{name}: at once, at least", one.at_once, CROWD, one.at_once >= CROWD))
        failed = sum(one.errors.values()) + one.lost
        out.append((f"{name}: errors and lost tokens, at most", failed, 0, not failed))
        out.append((f"{name}: MiB, at most", one.peak_rss_mib, CROWD_MIB, one.peak_rss_mib <= CROWD_MIB))
    for one in bursts:
        name = f"burst, {one.door}"
        failed = sum(one.errors.values()) + (not one.alive)
        out.append((f"{name}: answers that are neither tokens nor a refusal, at most", failed, 0, not failed))
        unhinted = one.refused - one.hinted
        out.append((f"{name}: refusals without a time to come back, at most", unhinted, 0, not unhinted))
        met = one.recovered_s <= BACK_WITHIN_S
        out.append((f"{name}: back to the usual, s, at most", one.recovered_s, BACK_WITHIN_S, met))
        grown = one.peak_rss_mib - one.rss_before_mib
        out.append((f"{name}: MiB more than before, at most", grown, 256, grown <= 256))
    return out


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
