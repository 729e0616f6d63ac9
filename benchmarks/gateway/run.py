"""Run every part of the gateway's benchmark and compare with its goals: ``python -m benchmarks gateway``."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from benchmarks import machine, report
from benchmarks.gateway import burst, connections, contenders, relaying
from benchmarks.gateway.burst import Burst
from benchmarks.gateway.connections import Connections
from benchmarks.gateway.contenders import FASTAPI, GATEWAY, LITELLM, Contender
from benchmarks.gateway.relaying import Relayed, RelayPath
from contract.errors import EngineFailed, NotFound

PARTS = ("latency", "cost", "connections", "burst")
DIRECT_GRPC, DIRECT_OPENAI = "replica itself", "OpenAI upstream itself"
ADDED_P50_MS, ADDED_P99_MS = 1.0, 5.0
CPU_US = 100.0
STREAMS, STREAMS_MIB = 10_000, 2048.0
BURST_MIB = 256.0
RECOVERY_S = 5.0


def run(
    parts: Sequence[str], peers: bool, rounds: int, seconds: float, streams: int, protocols: Sequence[str], out: Path
) -> int:
    """Measure, print, write gateway.json. Returns 0 whether the goals are met or not.

    peers: compare with LiteLLM's proxy and the FastAPI relay.
    rounds, seconds: of each path in the relaying parts.
    streams, protocols: of the connections and burst parts.
    """
    conditions, cpu_before = machine.described(), machine.cpu_time()
    ours_before_s = _children_s()
    print(report.on(conditions), flush=True)
    logs = out / "logs"
    relayed: list[Relayed] = []
    results: list[Connections] = []
    bursts: list[Burst] = []
    skipped: dict[str, str] = {}
    if {"latency", "cost"} & set(parts):
        with relay_paths(peers, logs, skipped) as found:
            loads = [(relaying.MODERATE, True)] if "latency" in parts else []
            if "cost" in parts:
                loads += [(64, True), (8, False), (64, False)]
            relayed = relaying.measure(found, loads, rounds, seconds)
        table = relaying.described(relayed)
        print(f"\nms; {relaying.TOKENS} tokens an answer, {rounds} rounds of {seconds:g} s\n{table}\n")
    with ExitStack() as stack:
        if {"connections", "burst"} & set(parts):
            replica = stack.enter_context(contenders.scripted("replica", logs))
        for protocol in protocols if "connections" in parts else ():
            with contenders.gateway(replica, logs) as gateway:
                results.append(connections.measure(gateway, protocol, streams))
            print(connections.described(results[-1]), flush=True)
        for protocol in protocols if "burst" in parts else ():
            with contenders.gateway(replica, logs, burst.RUNNING, burst.WAITING, burst.WAIT_S) as gateway:
                bursts.append(burst.measure(gateway, protocol))
            print(burst.described(bursts[-1]), flush=True)
    for name, reason in skipped.items():
        print(f"  skipped: {name}: {reason}")
    verdicts = goals(relayed, results, bursts)
    print(report.verdicts(verdicts))
    others = machine.host_load(cpu_before, machine.cpu_time(), _children_s() - ours_before_s).others
    print(report.disturbance(others), flush=True)
    written = {
        "conditions": {**conditions, "command": " ".join(sys.argv[1:]), "others_share": others},
        "relayed": [row.to_json() for row in relayed],
        "connections": [asdict(result) for result in results],
        "burst": [asdict(result) for result in bursts],
        "skipped": skipped,
        "goals": [dict(zip(("what", "measured", "goal", "met"), verdict, strict=True)) for verdict in verdicts],
    }
    return report.write_json(written, out, "gateway")


@contextmanager
def relay_paths(peers: bool, logs: Path, skipped: dict[str, str]) -> Iterator[list[RelayPath]]:
    """Start the sources and proxies; yield the paths. ``skipped`` receives why a peer cannot run here."""
    with ExitStack() as stack:
        replica = stack.enter_context(contenders.scripted("replica", logs))
        ours = stack.enter_context(contenders.gateway(replica, logs))
        found = [RelayPath(DIRECT_GRPC, "grpc", replica)]
        for protocol in ("grpc", "http"):
            found.append(RelayPath(f"{GATEWAY}, {protocol}", protocol, ours.urls[protocol], DIRECT_GRPC, ours))
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
                    found.append(RelayPath(DIRECT_OPENAI, "http", upstream))
                direct = DIRECT_OPENAI if source == upstream else DIRECT_GRPC
                found.append(RelayPath(name, "http", peer.urls["http"], direct, peer))
        yield found


def goals(relayed: Sequence[Relayed], results: Sequence[Connections], bursts: Sequence[Burst]) -> list[report.Goal]:
    """Compare the gateway's figures with its goals; peers have none."""
    out: list[report.Goal] = []

    def at_most(what: str, value: float, bound: float) -> None:
        out.append((f"{what}, at most", value, bound, value <= bound))

    for row in relayed:
        if not row.path.startswith(GATEWAY):
            continue
        load = f"{row.path}, {row.streams} streams {'paced' if row.paced else 'unpaced'}"
        if row.paced and row.streams == relaying.MODERATE:
            for figure, what in (("ttft_ms", "to the first token"), ("transit_ms", "to a token")):
                for quantile, bound in (("p50", ADDED_P50_MS), ("p99", ADDED_P99_MS)):
                    added = relaying.added_ms(relayed, row, figure, quantile)
                    at_most(f"{load}: added {what}, {quantile}, ms", added, bound)
        at_most(f"{load}: CPU, µs per token", row.us_per_token, CPU_US)
        at_most(f"{load}: failed requests", sum(row.errors.values()), 0)
    for one in results:
        name = f"{one.streams} slow streams, {one.protocol}"
        out.append((f"{name}: at once, at least", one.in_flight, STREAMS, one.in_flight >= STREAMS))
        at_most(f"{name}: errors and lost tokens", sum(one.errors.values()) + one.lost, 0)
        at_most(f"{name}: MiB", one.peak_rss_mib, STREAMS_MIB)
    for found in bursts:
        name = f"burst, {found.protocol}"
        at_most(f"{name}: failures other than refusals", sum(found.errors.values()) + (not found.alive), 0)
        at_most(f"{name}: refusals without retry-after", found.refused - found.hinted, 0)
        at_most(f"{name}: recovery, s", found.recovered_s, RECOVERY_S)
        at_most(f"{name}: MiB more than before", found.peak_rss_mib - found.rss_before_mib, BURST_MIB)
    return out


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
