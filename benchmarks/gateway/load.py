"""The load: a process of its own that reads a plan, puts it on a door, and says what it saw.

    python -m benchmarks.gateway.load < plan.json

A plan is a JSON object, see ``Plan``; the answer is a line "started", when the first request is about to be sent, and
a line of JSON, when everything is over.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
import time
from dataclasses import asdict, dataclass, field

import uvloop

from benchmarks.gateway.asked import Asked
from benchmarks.gateway.grpc_door import GrpcDoor
from benchmarks.gateway.http_door import HttpDoor
from benchmarks.gateway.lifetime import raise_open_files
from benchmarks.gateway.script import Pace


@dataclass(frozen=True)
class Plan:
    """What is asked of a door (``http`` or ``grpc``) at ``url``.

    Exactly one of three: streams that are asked for again as they end, for duration_s (a closed loop; the first
    warmup_s do not count); each once, over ramp_s; or phases (requests per second, seconds) of arrivals by chance.
    kept: HTTP connections are used again.
    """

    door: str
    url: str
    pace: Pace
    tokens: int
    model: str = "demo"
    streams: int = 0
    duration_s: float = 0.0
    warmup_s: float = 0.0
    ramp_s: float = 0.0
    phases: tuple[tuple[float, float], ...] = ()
    kept: bool = True
    connections: int = 4
    seed: int = 1

    @classmethod
    def from_json(cls, text: str) -> Plan:
        table = json.loads(text)
        return cls(**{**table, "pace": Pace(**table["pace"]), "phases": tuple(map(tuple, table["phases"]))})

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class Seen:
    """What came of a plan. Instants are seconds since the first request; travelled and gaps are in ms.

    rows: (sent, time to the first token or 0, took, end, hinted) of each request.
    """

    tokens: int
    wall_s: float
    cpu_s: float
    ttft_ms: list[float]
    travelled_ms: list[float]
    gaps_ms: list[float]
    ends: dict[str, int]
    hinted: int
    rows: list[list] = field(default_factory=list)


async def drive(plan: Plan, started) -> Seen:
    door = HttpDoor(plan.url, plan.model, plan.kept) if plan.door == "http" else GrpcDoor(plan.url, plan.connections)
    all_of_it: list[Asked] = []
    rng = random.Random(plan.seed)
    began_s = time.monotonic()
    started()

    async def one() -> None:
        all_of_it.append(await door.ask(plan.pace, plan.tokens))

    async def again_and_again() -> None:
        # Not all in the same instant: streams that begin together stay together.
        await asyncio.sleep(rng.uniform(0.0, min(plan.duration_s, max(0.05, plan.pace.gap_s * 4))))
        while time.monotonic() < began_s + plan.duration_s:
            await one()

    async def once(after_s: float) -> None:
        await asyncio.sleep(after_s)
        await one()

    if plan.phases:
        await asyncio.gather(*(once(at_s) for at_s in arrivals(plan.phases, rng)))
    elif plan.duration_s:
        await asyncio.gather(*(again_and_again() for _ in range(plan.streams)))
    else:
        await asyncio.gather(*(once(plan.ramp_s * n / plan.streams) for n in range(plan.streams)))
    wall_s = time.monotonic() - began_s
    await door.close()
    return seen(all_of_it, began_s, plan.warmup_s, wall_s)


def arrivals(phases: tuple[tuple[float, float], ...], rng: random.Random) -> list[float]:
    """Instants of Poisson arrivals, in seconds from the beginning of the first phase."""
    found, begin_s = [], 0.0
    for rate, seconds in phases:
        at_s = begin_s + rng.expovariate(rate)
        while at_s < begin_s + seconds:
            found.append(at_s)
            at_s += rng.expovariate(rate)
        begin_s += seconds
    return found


def seen(asked: list[Asked], began_s: float, warmup_s: float, wall_s: float) -> Seen:
    counted = [one for one in asked if one.sent_s >= began_s + warmup_s]
    ends: dict[str, int] = {}
    for one in asked:
        ends[one.end] = ends.get(one.end, 0) + 1
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Seen(
        tokens=sum(one.tokens for one in asked),
        wall_s=wall_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
        ttft_ms=[(one.first_s - one.sent_s) * 1e3 for one in counted if one.tokens],
        travelled_ms=[ns / 1e6 for one in counted for ns in one.travelled_ns],
        gaps_ms=[ns / 1e6 for one in counted for ns in one.gaps_ns],
        ends=ends,
        hinted=sum(one.hinted for one in asked),
        rows=[
            [one.sent_s - began_s, max(0.0, one.first_s - one.sent_s), one.ended_s - one.sent_s, one.end, one.hinted]
            for one in asked
        ],
    )


def main() -> None:
    raise_open_files()
    plan = Plan.from_json(sys.stdin.readline())
    found = uvloop.run(drive(plan, lambda: print("started", flush=True)))
    print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main()
