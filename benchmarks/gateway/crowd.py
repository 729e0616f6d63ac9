"""Ten thousand streams at once that say little: memory, errors, and whether all of them are really there."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gateway.contenders import Contender
from benchmarks.gateway.driven import drive
from benchmarks.gateway.load import Plan
from benchmarks.gateway.relaying import spread
from benchmarks.gateway.script import Pace

TOKENS = 6
IN_FLIGHT = "trident_gateway_in_flight"


@dataclass
class Crowd:
    """at_once: the most streams under way at an instant, by the gateway's own gauge. lost: tokens that never came."""

    door: str
    streams: int
    at_once: int
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

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def measure(contender: Contender, door: str, streams: int, ramp_s: float, gap_s: float, logs: Path) -> Crowd:
    """Each stream says TOKENS tokens, ``gap_s`` apart and the first after ``gap_s``; they open evenly over the ramp."""
    pace = Pace(gap_s, gap_s, 0.0)
    plan = Plan(door, contender.doors[door], pace, TOKENS, streams=streams, ramp_s=ramp_s, kept=False, connections=16)
    found = drive(plan, contender, logs, (IN_FLIGHT,))
    travelled = spread(found.seen.travelled_ms)
    return Crowd(
        door,
        streams,
        round(found.highest[IN_FLIGHT]),
        found.ended("ok"),
        streams * TOKENS - found.seen.tokens,
        {**found.errors, **({"refused": found.ended("refused")} if found.ended("refused") else {})},
        found.cpu_s / found.seen.wall_s,
        found.us_per_token,
        found.rss_before_bytes / 2**20,
        found.peak_rss_bytes / 2**20,
        spread(found.seen.ttft_ms)["p50"] - gap_s * 1e3,
        travelled["p50"],
        travelled["p99"],
    )


def described(one: Crowd) -> str:
    failed = ", ".join(f"{count} {end}" for end, count in one.errors.items()) or "none"
    return (
        f"  {one.door}: {one.streams} streams, {one.at_once} at once, {one.ok} whole, {one.lost} tokens lost, errors: "
        f"{failed}\n  {one.rss_before_mib:.0f} MiB before, {one.peak_rss_mib:.0f} at most; {one.cpu_share:.2f} cores, "
        f"{one.us_per_token:.0f} µs per token, opening included; first token {one.ttft_p50_ms:.1f} ms late (p50), "
        f"tokens {one.token_p50_ms:.2f} ms on the way (p50), {one.token_p99_ms:.1f} (p99)"
    )
