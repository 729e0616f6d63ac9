"""Run every part of the gateway's benchmark and compare with its goals: ``python -m benchmarks gateway``."""

from __future__ import annotations

import resource
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from benchmarks import machine, report
from benchmarks.gateway import burst, connections, contenders, relaying
from benchmarks.gateway.burst import Burst
from benchmarks.gateway.connections import Connections
from benchmarks.gateway.contenders import BARE, ENVOY, FASTAPI, GATEWAY, LITELLM, Contender
from benchmarks.gateway.relaying import Relayed, RelayPath
from contract.errors import EngineFailed, NotFound

PARTS = ("latency", "cost", "workers", "connections", "burst")
PACED, UNPACED = (1, 64, 256), (8, 64)  # streams of the part "cost"
WORKERS = 2
DIRECT_GRPC, DIRECT_OPENAI = "replica itself", "OpenAI upstream itself"
ADDED_P50_MS, ADDED_P99_MS = 1.0, 5.0
CPU_OF_BARE, SCALING = 1.25, 1.8
STREAMS, STREAMS_MIB = 10_000, 2048.0
BURST_MIB = 256.0
RECOVERY_S = 5.0


def run(
    parts: Sequence[str], peers: bool, rounds: int, seconds: float, streams: int, protocols: Sequence[str], out: Path
) -> int:
    """Measure, print, write gateway.json. Returns 0 whether the goals are met or not.

    peers: compare with LiteLLM's proxy, Envoy and the FastAPI relay, not only with the bare relay.
    rounds, seconds: of each path in the relaying parts.
    streams, protocols: of the connections and burst parts.
    """
    conditions, cpu_before = machine.described(), machine.cpu_time()
    ours_before_s = _children_s()
    print(report.on(conditions), flush=True)
    logs = out / "logs"
    relayed: list[Relayed] = []
    scaled: list[Relayed] = []
    results: list[Connections] = []
    bursts: list[Burst] = []
    skipped: dict[str, str] = {}
    loads = [(relaying.MODERATE, True)] if "latency" in parts else []
    if "cost" in parts:
        loads += [*((n, True) for n in PACED), *((n, False) for n in UNPACED)]
    print(f"\nms; {relaying.TOKENS} tokens an answer, {rounds} rounds of {seconds:g} s")
    if loads:
        with relay_paths(peers, logs, skipped) as found:
            relayed = relaying.measure(found, loads, rounds, seconds)
        print(f"{relaying.described(relayed)}\n", flush=True)
    if "workers" in parts:
        with worker_paths(logs) as found:
            scaled = relaying.measure(found, [(UNPACED[-1], False)], rounds, seconds)
        print(f"{relaying.described(scaled)}\n", flush=True)
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
    verdicts = goals(relayed, results, bursts, scaled)
    print(report.verdicts(verdicts))
    others = machine.host_load(cpu_before, machine.cpu_time(), _children_s() - ours_before_s).others
    print(report.disturbance(others), flush=True)
    written = {
        "conditions": {**conditions, "command": " ".join(sys.argv[1:]), "others_share": others},
        "relayed": [row.to_json() for row in (*relayed, *scaled)],
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
        found = [RelayPath(DIRECT_GRPC, "grpc", replica)]

        def add(start: AbstractContextManager[Contender], http_source: str = DIRECT_GRPC) -> None:
            one = stack.enter_context(start)
            for protocol, url in sorted(one.urls.items()):
                direct = http_source if protocol == "http" else DIRECT_GRPC
                found.append(RelayPath(f"{one.name}, {protocol}", protocol, url, direct, one))

        add(contenders.gateway(replica, logs))
        add(contenders.bare_relay(replica, logs))
        if peers:
            upstream = stack.enter_context(contenders.scripted("openai", logs))
            found.append(RelayPath(DIRECT_OPENAI, "http", upstream))
            starts = {
                FASTAPI: (contenders.fastapi_relay(replica, logs), DIRECT_GRPC),
                ENVOY: (contenders.envoy(replica, upstream, logs), DIRECT_OPENAI),
                LITELLM: (contenders.litellm(upstream, logs), DIRECT_OPENAI),
            }
            for name, (start, source) in starts.items():
                try:
                    add(start, source)
                except (NotFound, EngineFailed) as error:
                    skipped[name] = str(error)
        yield found


@contextmanager
def worker_paths(logs: Path) -> Iterator[list[RelayPath]]:
    """Start a gateway of one process and one of WORKERS; yield their paths.

    Load and replica take cores too, so that throughput says nothing: with as many cores as workers, throughput grows as
    far as a token costs no more CPU with several workers, their parent's included.
    """
    with ExitStack() as stack:
        replica = stack.enter_context(contenders.scripted("replica", logs))
        kinds = [stack.enter_context(contenders.gateway(replica, logs, workers=n)) for n in (1, WORKERS)]
        yield [RelayPath(f"{one.name}, {name}", name, url, "", one) for one in kinds for name, url in one.urls.items()]


def goals(
    relayed: Sequence[Relayed],
    results: Sequence[Connections],
    bursts: Sequence[Burst],
    scaled: Sequence[Relayed] = (),
) -> list[report.Goal]:
    """Compare the gateway's figures with its goals; peers have none. scaled: of ``worker_paths``."""
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
        if ratios := relaying.cpu_ratios(relayed, row, row.path.replace(GATEWAY, BARE)):
            at_most(f"{load}: CPU of the bare relay's", statistics.median(ratios), CPU_OF_BARE)
        at_most(f"{load}: failed requests", sum(row.errors.values()), 0)
    for row in scaled:
        name, _, protocol = row.path.rpartition(", ")
        if name != GATEWAY:
            scaling = WORKERS / statistics.median(relaying.cpu_ratios(scaled, row, f"{GATEWAY}, {protocol}"))
            out.append((f"{row.path}: of one worker's throughput, at least", scaling, SCALING, scaling >= SCALING))
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
