"""A burst of fifty times the normal load: what is answered, what is refused and how, and how soon it is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.arrivals import Phases
from benchmarks.driver import Extent
from benchmarks.figures import spread
from benchmarks.gateway import load_test
from benchmarks.gateway.contenders import Contender
from benchmarks.gateway.load_test import ttft_ms
from benchmarks.gateway.script import Pace
from benchmarks.lengths import Fixed
from benchmarks.record import Record
from benchmarks.workload import Workload

NORMAL_PER_S, TIMES = 20.0, 50.0
BEFORE_S, BURST_S, AFTER_S = 5.0, 5.0, 12.0
SETTLED_S = 1.0  # of the time before the burst, not counted
PACE, TOKENS = Pace(0.05, 0.02, 0.004), 16  # of one answer, 0.35 s
# The gateway's limits: requests on the replica, in its queue, and seconds in the queue.
RUNNING, WAITING, WAIT_S = 128, 128, 2.0
WINDOW_S = 0.5
SLACK_MS = 10.0


@dataclass
class Burst:
    """The result for one protocol, of the requests sent during the burst.

    answered, refused: complete answers and refusals; hinted: refusals with a retry-after.
    errors: other failures by type, of the whole run.
    recovered_s: from the burst's end until the median TTFT of a window is within SLACK_MS of that before, and stays.
    """

    protocol: str
    per_s: float
    sent: int
    answered: int
    refused: int
    hinted: int
    errors: dict[str, int]
    alive: bool
    ttft_before_ms: float
    ttft_in_burst_p99_ms: float
    refusal_p99_ms: float
    recovered_s: float
    rss_before_mib: float
    peak_rss_mib: float


def measure(contender: Contender, protocol: str) -> Burst:
    """Run the three phases against one endpoint of a contender."""
    phases = ((NORMAL_PER_S, BEFORE_S), (NORMAL_PER_S * TIMES, BURST_S), (NORMAL_PER_S, AFTER_S))
    options = {"keep_alive": False} if protocol == "http" else {}
    target = load_test.target(protocol, contender.urls[protocol], **options)
    workload = Workload(arrivals=Phases(phases), output_tokens=Fixed(TOKENS))
    load = load_test.load(target, PACE, workload, Extent(BEFORE_S + BURST_S + AFTER_S))
    found = load_test.run(load, contender)
    zero_s, end_s = found.result.started_s, BEFORE_S + BURST_S
    before = _sent_between(found.records, zero_s + SETTLED_S, zero_s + BEFORE_S)
    burst = _sent_between(found.records, zero_s + BEFORE_S, zero_s + end_s)
    refused = [record for record in burst if record.error_type == "Overloaded"]
    before_ms = spread(ttft_ms(before)).p50
    return Burst(
        protocol,
        len(burst) / BURST_S,
        len(burst),
        sum(record.ok for record in burst),
        len(refused),
        sum(record.retry_after for record in refused),
        found.errors,
        found.alive,
        before_ms,
        spread(ttft_ms(burst)).p99,
        spread([(record.ended_s - record.sent_s) * 1e3 for record in refused]).p99,
        recovered_s(found.records, before_ms, zero_s + end_s, zero_s + end_s + AFTER_S),
        found.rss_before_bytes / 2**20,
        found.peak_rss_bytes / 2**20,
    )


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


def described(one: Burst) -> str:
    failed = ", ".join(f"{count} {error}" for error, count in one.errors.items()) or "none"
    return (
        f"  {one.protocol}: {one.per_s:.0f} requests/s for {BURST_S:g} s after {NORMAL_PER_S:g}/s: {one.answered} "
        f"answered, {one.refused} refused ({one.hinted} with a retry-after), errors: {failed}\n"
        f"  TTFT p50 {one.ttft_before_ms:.1f} ms before, p99 {one.ttft_in_burst_p99_ms:.0f} ms in the burst; refusals "
        f"within {one.refusal_p99_ms:.0f} ms (p99); recovered after {one.recovered_s:.1f} s; "
        f"{one.rss_before_mib:.0f} MiB before, peak {one.peak_rss_mib:.0f}{'' if one.alive else '; IT ENDED'}"
    )
