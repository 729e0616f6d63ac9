"""Run every part of the gateway's benchmark and compare with its goals: ``python -m benchmarks gateway``."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from benchmarks import figures, machine, report
from benchmarks.gateway import contenders, limits, relaying
from benchmarks.gateway.contenders import BARE, ENVOY, FASTAPI, GATEWAY, LITELLM, Contender
from benchmarks.gateway.limits import Limit
from benchmarks.gateway.relaying import Loads, Relayed, RelayPath
from contract.errors import EngineFailed, NotFound

PARTS = ("latency", "cost", "workers", "connections", "burst")
PACED, UNPACED = (1, 64, 256), (8, 64)  # streams of the part "cost"
PEERS_LOADS: Loads = ((relaying.MODERATE, True), (UNPACED[-1], False))  # LiteLLM the first: it takes minutes for more
WORKERS, OF_WORKER = 2, 32  # processes; streams of each
DIRECT_GRPC, DIRECT_OPENAI = "replica itself", "OpenAI upstream itself"
ADDED_P50_MS, ADDED_P99_MS = 1.0, 5.0
CPU_OF_BARE, SCALING = 1.25, 1.8
STREAMS, STREAMS_MIB = 10_000, 2048.0
BURST_MIB = 256.0
RECOVERY_S = 5.0


def run(
    parts: Sequence[str],
    without_peers: bool,
    rounds: int,
    seconds: float,
    streams: int,
    protocols: Sequence[str],
    out: Path,
) -> int:
    """Measure, print, write gateway.json.

    without_peers: compare with the bare relay only, not with LiteLLM's proxy, Envoy and the FastAPI relay.
    rounds, seconds: of each path in the relaying parts. streams, protocols: of the connections and burst parts.
    """
    conditions, watch = machine.described(), machine.Watch()
    print(report.on(conditions), flush=True)
    logs, skipped = out / "logs", dict[str, str]()
    relayed, scaled, results, bursts = list[Relayed](), list[Relayed](), list[Limit](), list[Limit]()

    def keep() -> list[report.Goal]:
        """Write what was measured so far: a run that is cut off has kept it."""
        verdicts = goals(relayed, results, bursts, scaled)
        written = {
            "conditions": {**conditions, "command": " ".join(sys.argv[1:]), "others_share": watch.others()},
            "relayed": [row.to_json() for row in (*relayed, *scaled)],
            "connections": results,
            "burst": bursts,
            "goals": verdicts,
            "notes": [f"skipped: {name}: {reason}" for name, reason in skipped.items()],
            "compared": compared(relayed, scaled, results, bursts),
        }
        report.write_json(written, out, "gateway")
        return verdicts

    loads = [(relaying.MODERATE, True)] if "latency" in parts else []
    if "cost" in parts:
        loads += [*((n, True) for n in PACED), *((n, False) for n in UNPACED)]
    print(f"\nms; {relaying.TOKENS} tokens an answer, {rounds} rounds of {seconds:g} s")
    if loads:
        with relay_paths(not without_peers, logs, skipped) as found:
            for rows in relaying.measure(found, loads, rounds, seconds):
                relayed += rows
                keep()
        print(f"{relaying.described(relayed)}\n", flush=True)
    if "workers" in parts:
        with worker_paths(logs) as found:
            [scaled] = relaying.measure(found, [(OF_WORKER, True)], rounds, seconds)
        print(f"{relaying.described(scaled)}\n", flush=True)
        keep()
    with ExitStack() as stack:
        if {"connections", "burst"} & set(parts):
            replica = stack.enter_context(contenders.scripted("replica", logs))
        for protocol in protocols if "connections" in parts else ():
            with contenders.gateway(replica, logs) as gateway:
                results.append(limits.connections(gateway, protocol, streams))
            print(limits.described_connections(results[-1]), flush=True)
            keep()
        for protocol in protocols if "burst" in parts else ():
            with contenders.gateway(replica, logs, limits.RUNNING, limits.WAITING, limits.WAIT_S) as gateway:
                bursts.append(limits.burst(gateway, protocol))
            print(limits.described_burst(bursts[-1]), flush=True)
    for name, reason in skipped.items():
        print(f"  skipped: {name}: {reason}")
    print(report.verdicts(keep()))
    print(report.disturbance(watch.others()), flush=True)
    return 0


@contextmanager
def relay_paths(peers: bool, logs: Path, skipped: dict[str, str]) -> Iterator[list[RelayPath]]:
    """Start the sources and proxies; yield the paths. ``skipped`` receives why a peer cannot run here."""
    with ExitStack() as stack:
        replica = stack.enter_context(contenders.scripted("replica", logs))
        found = [RelayPath(DIRECT_GRPC, "grpc", replica)]

        def add(start: AbstractContextManager[Contender], http: str = DIRECT_GRPC, loads: Loads | None = None) -> None:
            one = stack.enter_context(start)
            for protocol, url in sorted(one.urls.items()):
                direct = http if protocol == "http" else DIRECT_GRPC
                found.append(RelayPath(f"{one.name}, {protocol}", protocol, url, direct, one, loads))

        add(contenders.gateway(replica, logs))
        add(contenders.bare_relay(replica, logs))
        if peers:
            upstream = stack.enter_context(contenders.scripted("openai", logs))
            found.append(RelayPath(DIRECT_OPENAI, "http", upstream, loads=PEERS_LOADS))
            starts = {
                FASTAPI: (contenders.fastapi_relay(replica, logs), DIRECT_GRPC),
                ENVOY: (contenders.envoy(replica, upstream, logs), DIRECT_OPENAI),
                LITELLM: (contenders.litellm(upstream, logs), DIRECT_OPENAI),
            }
            for name, (start, source) in starts.items():
                try:
                    add(start, source, PEERS_LOADS[: 1 if name == LITELLM else None])
                except (NotFound, EngineFailed) as error:
                    skipped[name] = str(error)
        yield found


@contextmanager
def worker_paths(logs: Path) -> Iterator[list[RelayPath]]:
    """Start a gateway of one process and one of WORKERS; yield their paths.

    Load and replica take cores too, so that throughput says nothing: ``relaying.scalings`` tells it from the CPU of a
    token. Every worker has as many paced streams as the one process, each on a connection of its own.
    """
    with ExitStack() as stack:
        replica = stack.enter_context(contenders.scripted("replica", logs))
        kinds = [(n, stack.enter_context(contenders.gateway(replica, logs, workers=n))) for n in (1, WORKERS)]
        yield [
            RelayPath(f"{one.name}, {name}", name, url, "", one, workers=n, connections=OF_WORKER)
            for n, one in kinds
            for name, url in one.urls.items()
        ]


def goals(
    relayed: Sequence[Relayed], results: Sequence[Limit], bursts: Sequence[Limit], scaled: Sequence[Relayed] = ()
) -> list[report.Goal]:
    """Compare the gateway's figures with its goals; peers have none. scaled: of ``worker_paths``."""
    out: list[report.Goal] = []
    at_most = lambda *goal: out.append(report.at_most(*goal))  # noqa: E731
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
            scaling = statistics.median(relaying.scalings(scaled, row, f"{GATEWAY}, {protocol}", WORKERS) or [math.nan])
            out.append(report.at_least(f"{row.path}: of one worker's throughput", scaling, SCALING))
    for one in results:
        name = f"{one['streams']} slow streams, {one['protocol']}"
        out.append(report.at_least(f"{name}: at once", one["in_flight"], one["streams"]))
        at_most(f"{name}: errors and lost tokens", sum(one["errors"].values()) + one["lost"], 0)
        at_most(f"{name}: MiB", one["peak_rss_mib"], STREAMS_MIB)
    for one in bursts:
        name = f"burst, {one['protocol']}"
        at_most(f"{name}: failures other than refusals", sum(one["errors"].values()) + (not one["alive"]), 0)
        at_most(f"{name}: refusals without retry-after", one["refused"] - one["hinted"], 0)
        at_most(f"{name}: recovery, s", one["recovered_s"], RECOVERY_S)
        at_most(f"{name}: MiB more than before", one["peak_rss_mib"] - one["rss_before_mib"], BURST_MIB)
    return out


def compared(
    relayed: Sequence[Relayed], scaled: Sequence[Relayed], results: Sequence[Limit], bursts: Sequence[Limit]
) -> dict[str, dict[str, object]]:
    """Return what ``benchmarks.suite`` compares."""
    found: dict[str, list[float]] = {}
    for row in relayed:
        ttft = figures.spread(row.ttft_ms)
        for quantile in ("p50", "p99") if row.paced else ():
            found[f"TTFT {quantile}, ms: {row.path}, {row.streams} paced"] = [getattr(ttft, quantile)]
    for rows in (relayed, scaled):
        for row in rows:
            name, _, protocol = row.path.rpartition(", ")
            load = f"{row.streams} {'paced' if row.paced else 'unpaced'}"
            if name:
                found[f"CPU of a token, µs: {row.path}, {load}"] = row.us_of_rounds
            if name == GATEWAY:
                if ratios := relaying.cpu_ratios(rows, row, f"{BARE}, {protocol}"):
                    found[f"CPU of the bare relay's: {protocol}, {load}"] = ratios
            elif name.startswith(GATEWAY):
                ratios = relaying.cpu_ratios(rows, row, f"{GATEWAY}, {protocol}")
                found[f"CPU of one worker's: {protocol}, {load}"] = ratios
    found |= {f"MiB of {one['streams']} streams: {one['protocol']}": [one["peak_rss_mib"]] for one in results}
    found |= {f"recovery after a burst, s: {one['protocol']}": [one["recovered_s"]] for one in bursts}
    return figures.compared(figures.LOWER, found)
