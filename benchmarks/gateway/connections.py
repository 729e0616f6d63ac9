"""Ten thousand slow streams at once: memory, errors, and whether all of them run at the same time."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.arrivals import Arrival, Trace
from benchmarks.driver import Extent
from benchmarks.figures import spread
from benchmarks.gateway import load_test
from benchmarks.gateway.contenders import Contender
from benchmarks.gateway.script import Pace
from benchmarks.lengths import Fixed
from benchmarks.workload import Workload

TOKENS = 6
RATE_PER_S, GAP_S = 500.0, 8.0
IN_FLIGHT = "trident_gateway_in_flight"


@dataclass
class Connections:
    """The result for one protocol.

    in_flight: the most streams at one instant, by the gateway's own gauge.
    ok: complete answers; errors: failures by type.
    lost: tokens that never arrived.
    cpu_share: cores; us_per_token: CPU microseconds, opening the streams included.
    ttft_p50_ms: without the script's own delay.
    """

    protocol: str
    streams: int
    in_flight: int
    ok: int
    lost: int
    errors: dict[str, int]
    cpu_share: float
    us_per_token: float
    rss_before_mib: float
    peak_rss_mib: float
    ttft_p50_ms: float
    token_p50_ms: float
    token_p99_ms: float


def measure(
    contender: Contender, protocol: str, streams: int, rate_per_s: float = RATE_PER_S, gap_s: float = GAP_S
) -> Connections:
    """Open ``rate_per_s`` streams per second; each has TOKENS tokens, ``gap_s`` before each of them."""
    options = {"keep_alive": False} if protocol == "http" else {"connections": 16}
    target = load_test.target(protocol, contender.urls[protocol], **options)
    evenly = Trace(tuple(Arrival(n / rate_per_s) for n in range(streams)))
    workload = Workload(arrivals=evenly, output_tokens=Fixed(TOKENS))
    load = load_test.load(target, Pace(gap_s, gap_s), workload, Extent(None, 0.0, streams))
    found = load_test.run(load, contender, (IN_FLIGHT,))
    transit = spread(found.transit_ms)
    return Connections(
        protocol,
        streams,
        round(found.highest[IN_FLIGHT]),
        sum(record.ok for record in found.records),
        streams * TOKENS - found.tokens,
        {**found.errors, **({"Overloaded": len(found.refused)} if found.refused else {})},
        found.cpu_s / found.wall_s,
        found.us_per_token,
        found.rss_before_bytes / 2**20,
        found.peak_rss_bytes / 2**20,
        spread(found.ttft_ms).p50 - gap_s * 1e3,
        transit.p50,
        transit.p99,
    )


def described(one: Connections) -> str:
    failed = ", ".join(f"{count} {error}" for error, count in one.errors.items()) or "none"
    return (
        f"  {one.protocol}: {one.streams} streams, {one.in_flight} at once, {one.ok} complete, {one.lost} tokens lost, "
        f"errors: {failed}\n  {one.rss_before_mib:.0f} MiB before, peak {one.peak_rss_mib:.0f}; {one.cpu_share:.2f} "
        f"cores, {one.us_per_token:.0f} µs per token, opening included; first token {one.ttft_p50_ms:.1f} ms late "
        f"(p50), tokens {one.token_p50_ms:.2f} ms in transit (p50), {one.token_p99_ms:.1f} (p99)"
    )
