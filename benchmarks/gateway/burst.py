"""Fifty times the usual load within an instant: what is answered, what is refused and how, and how soon it is over."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gateway.contenders import Contender
from benchmarks.gateway.driven import drive
from benchmarks.gateway.load import Plan
from benchmarks.gateway.relaying import spread
from benchmarks.gateway.script import Pace

USUAL_PER_S, TIMES = 20.0, 50.0
BEFORE_S, BURST_S, AFTER_S = 5.0, 5.0, 12.0
PACE, TOKENS = Pace(0.05, 0.02, 0.004), 16  # of one answer, 0.35 s
RUNNING, WAITING, WAIT_S = 128, 128, 2.0  # what the gateway may have on the replica, and in its queue, and how long
WINDOW_S = 0.5
SLACK_MS = 10.0


@dataclass
class Burst:
    """Of the requests sent in the burst: answered, refused (hinted: with a time to come back), failed. recovered_s:
    from the burst's end until the median TTFT of a window is back within SLACK_MS of what it was before, and stays."""

    door: str
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

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def measure(contender: Contender, door: str, logs: Path) -> Burst:
    phases = ((USUAL_PER_S, BEFORE_S), (USUAL_PER_S * TIMES, BURST_S), (USUAL_PER_S, AFTER_S))
    plan = Plan(door, contender.doors[door], PACE, TOKENS, phases=phases, kept=False)
    found = drive(plan, contender, logs)
    rows = found.seen.rows
    end_s = BEFORE_S + BURST_S
    burst = [row for row in rows if BEFORE_S <= row[0] < end_s]
    refused = [row for row in burst if row[3] == "refused"]
    before_ms = spread([row[1] * 1e3 for row in rows if 1.0 <= row[0] < BEFORE_S and row[1]])["p50"]
    return Burst(
        door,
        len(burst) / BURST_S,
        len(burst),
        sum(row[3] == "ok" for row in burst),
        len(refused),
        sum(row[4] for row in refused),
        found.errors,
        found.alive,
        before_ms,
        spread([row[1] * 1e3 for row in burst if row[1]])["p99"],
        spread([row[2] * 1e3 for row in refused])["p99"],
        recovered_s(rows, before_ms, end_s, end_s + AFTER_S),
        found.rss_before_bytes / 2**20,
        found.peak_rss_bytes / 2**20,
    )


def recovered_s(rows: list[list], before_ms: float, end_s: float, last_s: float) -> float:
    """From ``end_s`` to the first window from which on no window is slow or refused anything; inf if there is none."""
    good_from_s = end_s
    at_s = end_s
    while at_s + WINDOW_S <= last_s:
        window = [row for row in rows if at_s <= row[0] < at_s + WINDOW_S]
        slow = spread([row[1] * 1e3 for row in window if row[1]])["p50"] > before_ms + SLACK_MS
        if slow or any(row[3] != "ok" for row in window):
            good_from_s = at_s + WINDOW_S
        at_s += WINDOW_S
    return good_from_s - end_s if good_from_s + WINDOW_S <= last_s else float("inf")


def described(one: Burst) -> str:
    failed = ", ".join(f"{count} {end}" for end, count in one.errors.items()) or "none"
    return (
        f"  {one.door}: {one.per_s:.0f} requests/s for {BURST_S:g} s after {USUAL_PER_S:g}/s: {one.answered} answered, "
        f"{one.refused} refused ({one.hinted} with a time to come back), errors: {failed}\n"
        f"  TTFT p50 {one.ttft_before_ms:.1f} ms before, p99 {one.ttft_in_burst_p99_ms:.0f} ms in the burst; refusals "
        f"within {one.refusal_p99_ms:.0f} ms (p99); back after {one.recovered_s:.1f} s; {one.rss_before_mib:.0f} MiB "
        f"before, {one.peak_rss_mib:.0f} at most{'' if one.alive else '; IT DIED'}"
    )
