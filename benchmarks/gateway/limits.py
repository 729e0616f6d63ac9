"""The gateway's limits: ten thousand slow streams at once, and a burst of fifty times the normal load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.arrivals import Arrival, Phases, Trace
from benchmarks.driver import Extent
from benchmarks.figures import spread
from benchmarks.gateway import load_test
from benchmarks.gateway.contenders import Contender
from benchmarks.gateway.load_test import LoadTest, ttft_ms
from benchmarks.gateway.script import Pace
from benchmarks.lengths import Fixed
from benchmarks.record import Record
from benchmarks.workload import Workload

# Slow streams: tokens of each, how many are opened in a second, and seconds before each token.
TOKENS, RATE_PER_S, GAP_S = 6, 500.0, 8.0
IN_FLIGHT = "trident_gateway_in_flight"
NORMAL_PER_S, TIMES = 20.0, 50.0
BEFORE_S, BURST_S, AFTER_S = 5.0, 5.0, 12.0
SETTLED_S = 1.0  # of the time before the burst, not counted
BURST_PACE, BURST_TOKENS = Pace(0.05, 0.02, 0.004), 16  # of one answer, 0.35 s
# The gateway's limits in a burst: requests on the replica, in its queue, and seconds in the queue.
RUNNING, WAITING, WAIT_S = 128, 128, 2.0
WINDOW_S, SLACK_MS = 0.5, 10.0


Limit = dict[str, Any]  # the figures of one protocol


def connections(
    contender: Contender, protocol: str, streams: int, rate_per_s: float = RATE_PER_S, gap_s: float = GAP_S
) -> Limit:
    """Open ``rate_per_s`` streams per second; each has TOKENS tokens, ``gap_s`` before each of them.

    in_flight: the most streams at one instant, by the gateway's own gauge. ok: complete answers; lost: tokens that
        never arrived; errors: failures by type. cpu_share: cores; us_per_token: opening the streams included.
        ttft_p50_ms: without the script's own delay.
    """
    evenly = Trace(tuple(Arrival(n / rate_per_s) for n in range(streams)))
    workload, extent = Workload(arrivals=evenly, output_tokens=Fixed(TOKENS)), Extent(None, 0.0, streams)
    found = _loaded(contender, protocol, Pace(gap_s, gap_s), workload, extent, 16, (IN_FLIGHT,))
    transit = spread(found.transit_ms)
    return {
        "protocol": protocol,
        "streams": streams,
        "in_flight": round(found.highest[IN_FLIGHT]),
        "ok": sum(record.ok for record in found.records),
        "lost": streams * TOKENS - found.tokens,
        "errors": found.errors,
        "cpu_share": found.cpu_s / found.wall_s,
        "us_per_token": found.us_per_token,
        **_memory(found),
        "ttft_p50_ms": spread(found.ttft_ms).p50 - gap_s * 1e3,
        "token_p50_ms": transit.p50,
        "token_p99_ms": transit.p99,
    }


def burst(contender: Contender, protocol: str) -> Limit:
    """Run the three phases of a burst; all but errors and memory is of the requests sent during it.

    answered, refused: complete answers and refusals; hinted: refusals with a retry-after; errors: other failures by
        type. recovered_s: from its end until the median TTFT of a window is within SLACK_MS of that before, and stays.
    """
    phases = ((NORMAL_PER_S, BEFORE_S), (NORMAL_PER_S * TIMES, BURST_S), (NORMAL_PER_S, AFTER_S))
    workload = Workload(arrivals=Phases(phases), output_tokens=Fixed(BURST_TOKENS))
    found = _loaded(contender, protocol, BURST_PACE, workload, Extent(BEFORE_S + BURST_S + AFTER_S))
    begin_s = found.result.started_s + BEFORE_S
    end_s = begin_s + BURST_S
    sent = _sent_between(found.records, begin_s, end_s)
    refused = [record for record in sent if record.error_type == "Overloaded"]
    before_ms = spread(ttft_ms(_sent_between(found.records, begin_s - BEFORE_S + SETTLED_S, begin_s))).p50
    return {
        "protocol": protocol,
        "per_s": len(sent) / BURST_S,
        "sent": len(sent),
        "answered": sum(record.ok for record in sent),
        "refused": len(refused),
        "hinted": sum(record.retry_after for record in refused),
        "errors": {error: count for error, count in found.errors.items() if error != "Overloaded"},
        "alive": found.alive,
        "ttft_before_ms": before_ms,
        "ttft_in_burst_p99_ms": spread(ttft_ms(sent)).p99,
        "refusal_p99_ms": spread([(record.ended_s - record.sent_s) * 1e3 for record in refused]).p99,
        "recovered_s": recovered_s(found.records, before_ms, end_s, end_s + AFTER_S),
        **_memory(found),
    }


def _memory(found: LoadTest) -> Limit:
    return {"rss_before_mib": found.rss_before_bytes / 2**20, "peak_rss_mib": found.peak_rss_bytes / 2**20}


def _loaded(
    contender: Contender,
    protocol: str,
    pace: Pace,
    workload: Workload,
    extent: Extent,
    connections: int = 4,
    gauges: Sequence[str] = (),
) -> LoadTest:
    options = {"keep_alive": False} if protocol == "http" else {"connections": connections}
    load = load_test.load(protocol, contender.urls[protocol], pace, workload, extent, **options)
    return load_test.run(load, contender, gauges)


def recovered_s(records: Sequence[Record], before_ms: float, end_s: float, last_s: float) -> float:
    """Seconds from ``end_s`` to the first window after which no window is slow or has a failure; inf if none is."""
    good_from_s = at_s = end_s
    while at_s + WINDOW_S <= last_s:
        window = _sent_between(records, at_s, at_s + WINDOW_S)
        slow = spread(ttft_ms(window)).p50 > before_ms + SLACK_MS
        if slow or not all(record.ok for record in window):
            good_from_s = at_s + WINDOW_S
        at_s += WINDOW_S
    return good_from_s - end_s if good_from_s + WINDOW_S <= last_s else float("inf")


def _sent_between(records: Sequence[Record], from_s: float, to_s: float) -> list[Record]:
    return [record for record in records if from_s <= record.sent_s < to_s]


def described_connections(of: Limit) -> str:
    return (
        "  {protocol}: {streams} streams, {in_flight} at once, {ok} complete, {lost} tokens lost, errors: {failed}\n"
        "  {rss_before_mib:.0f} MiB before, peak {peak_rss_mib:.0f}; {cpu_share:.2f} cores, {us_per_token:.0f} µs per "
        "token, opening included; first token {ttft_p50_ms:.1f} ms late (p50), tokens {token_p50_ms:.2f} ms in transit "
        "(p50), {token_p99_ms:.1f} (p99)"
    ).format(**of, failed=_counts(of))


def described_burst(of: Limit) -> str:
    return (
        f"  {{protocol}}: {{per_s:.0f}} requests/s for {BURST_S:g} s after {NORMAL_PER_S:g}/s: {{answered}} answered, "
        "{refused} refused ({hinted} with a retry-after), errors: {failed}\n"
        "  TTFT p50 {ttft_before_ms:.1f} ms before, p99 {ttft_in_burst_p99_ms:.0f} ms in the burst; refusals within "
        "{refusal_p99_ms:.0f} ms (p99); recovered after {recovered_s:.1f} s; {rss_before_mib:.0f} MiB before, peak "
        "{peak_rss_mib:.0f}{ended}"
    ).format(**of, failed=_counts(of), ended="" if of["alive"] else "; IT ENDED")


def _counts(of: Limit) -> str:
    return ", ".join(f"{count} {error}" for error, count in of["errors"].items()) or "none"
