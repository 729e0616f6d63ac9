"""Run one scenario on a fleet: load, faults, what is seen meanwhile, and the judgement."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from chaos import alerts, invariants
from chaos.fleet import BUDGET_TOKENS, CAPPED_REQUESTS, KEYS, LEAST_REPLICAS, MAX_IN_FLIGHT, TOKENIZER, Fleet
from chaos.invariants import Happened, Record, Violation
from chaos.load import LEFT, Load, Outcome, undisturbed
from chaos.scenario import Fault, Scenario, possible
from contract.prometheus import Metrics

SAMPLE_S = 0.25
# In a line of a gateway's log: no request and no fault may cause it.
DEFECTS = ("unhandled exception", "never retrieved", "never awaited")
# In compressed time its 99th percentile is the latest of 13 timers: two late ones of a busy machine fire it.
NOT_JUDGED = "TridentEventLoopLate"
FIRING, UNREAD = 'ALERTS{alertstate="firing"}', 'up{job="trident-gateway"} == 0'
WARM_S, CLOSING_S = 2.0, 4.0  # of the loads before the first fault and after the last recovery
REDIS_LATE = "each gateway goes on by itself"  # in a line of a gateway's log: Redis did not answer it in time
LONGEST_STREAM_S = 40.0
CAPS_S = 5.0  # in which a gateway that Redis did not answer in time has written again what it holds
# The longest wait for gauges, alerts and processes after the load: those that are slower are violations.
SETTLE_S = 25.0


async def run(scenario: Scenario, folder: Path, plant: str = "") -> tuple[list[Violation], Record, frozenset[str]]:
    """Start a fleet, run the scenario and stop it. Return violations, record, and what is not installed. folder: of
    logs, and of outcomes.jsonl, a line for each request. Raises TridentError if the fleet does not start."""
    fleet = Fleet(folder, plant)
    try:
        await fleet.start()
        record = await _observed(fleet, possible(scenario, fleet.without))
    finally:
        await fleet.close()
    lines = (json.dumps(dataclasses.asdict(one)) for one in record.outcomes)
    (folder / "outcomes.jsonl").write_text("\n".join(lines), "utf-8")
    return invariants.check(record), record, fleet.without


async def _observed(fleet: Fleet, scenario: Scenario) -> Record:
    begun_s = time.monotonic()
    expected, inputs = await undisturbed(fleet.replicas["replica-1"].grpc_url, TOKENIZER)
    patience_s = max(LONGEST_STREAM_S, 8 * (time.monotonic() - begun_s))  # on a machine that is busy with other things
    record = Record(expected, LEAST_REPLICAS, max(invariants.RECOVERY_S, 3 * fleet.start_s), inputs=inputs)
    record.held_s = {name: alerts.held_s(name) for name in invariants.ALERTS}
    warm = Load(fleet.http, fleet.grpc, dict.fromkeys(KEYS, KEYS["plain"]), name="warm")
    await warm.run(scenario.seed, WARM_S, scenario.rate)
    before, wall_s = fleet.resources(), time.time()
    begun_s = time.monotonic()
    load = Load(fleet.http, fleet.grpc, KEYS, patience_s)
    watching = [asyncio.create_task(fleet.keep()), asyncio.create_task(_sample(fleet, record))]
    try:
        doing = [asyncio.create_task(_do(fleet, fault, begun_s, record)) for fault in scenario.faults]
        await asyncio.gather(load.run(scenario.seed, scenario.duration_s, scenario.rate), *doing)
        record.outcomes, record.stored, record.load_ended_s = load.outcomes, load.stored, time.monotonic()
        await _close(fleet, load, scenario, record)
        record.settled_s = next((at_s for at_s in record.well_s if at_s >= record.load_ended_s), 0.0)
        pages = await _settle(fleet, record)
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
    record.samples.append((time.monotonic(), pages))  # a later reading may meet a probe
    record.resources = before, fleet.resources()
    record.defects = _read_logs(fleet.folder, record.outcomes)
    record.redis_late_s = _redis_late_s(fleet.folder)
    # Without Redis each gateway counts by itself, and from the beginning where it is started again.
    restarts = sum(this.fault.kind == "kill.gateway" for this in record.happened)
    counts, caps = (1, 1) if fleet.redis_url else (len(fleet.http) + restarts, len(fleet.http))
    record.admitted = counts * (CAPPED_REQUESTS + int((time.monotonic() - begun_s) / 60) + 1)
    record.at_once = caps * MAX_IN_FLIGHT
    await _read_redis(fleet, record)
    if fleet.prometheus_url:
        shift_s = time.monotonic() - time.time()
        names = {url.split("/")[2]: name for name, url in fleet.pages.items()}
        found = []
        for query in (FIRING, UNREAD):
            answer = await _query(fleet, "query_range", query, start=wall_s, end=time.time(), step=alerts.STEP_S)
            spans = alerts.spans(answer, names).items()
            found.append({name: [(a + shift_s, b + shift_s) for a, b in pairs] for name, pairs in spans})
        record.alerts, record.unread = found
    return record


async def _close(fleet: Fleet, load: Load, scenario: Scenario, record: Record) -> None:
    """When no fault may be felt any more, send more load, until every breaker is closed."""
    over_s = max((this.ended_s for this in record.happened), default=0.0) + record.recovery_s
    await asyncio.sleep(over_s - time.monotonic())
    record.closing_s = time.monotonic()
    for seed in count(scenario.seed + 1):
        await load.run(seed, CLOSING_S, scenario.rate)
        if not invariants.broken(await fleet.read()) or time.monotonic() > record.closing_s + record.recovery_s:
            return


async def _do(fleet: Fleet, fault: Fault, begun_s: float, record: Record) -> None:
    """Wait for the fault's moment, do it, and take it back; take note of whether both could be done."""
    await asyncio.sleep(begun_s + fault.at_s - time.monotonic())
    at_s, target = time.monotonic(), fault.target
    action, _, what = fault.kind.partition(".")
    done = True
    if fault.kind == "envoy.reset":
        envoy = fleet.processes[f"envoy-{target}"]
        done = _signal(envoy.pid, signal.SIGKILL)
        envoy.process.wait()
        envoy.start()
    elif action == "envoy":
        done = await fleet.set_envoy(fault.kind, target, 100)
        await asyncio.sleep(fault.for_s)
        done = await fleet.set_envoy(fault.kind, target, 0) and done
    elif action == "fail":
        (armed := fleet.failpoint(target, what)).touch()
        await asyncio.sleep(fault.for_s)
        armed.unlink(missing_ok=True)
    elif action == "kill":
        done = _signal(fleet.pid(target, what), signal.SIGKILL)
    else:
        done = _signal(pid := fleet.pid(target, what), signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.for_s)
        finally:  # also of a run that is cancelled: SIGTERM does not end a stopped process
            _signal(pid, signal.SIGCONT)
    (record.happened if done else record.missed).append(Happened(fault, at_s, time.monotonic()))


def _signal(pid: int, number: signal.Signals) -> bool:
    """Return whether a process got the signal. pid: 0 for none."""
    with contextlib.suppress(ProcessLookupError):
        if pid:
            os.kill(pid, number)
        return bool(pid)
    return False


async def _sample(fleet: Fleet, record: Record) -> None:
    while True:
        at_s, pages = time.monotonic(), await fleet.read()
        record.samples.append((at_s, pages))
        if fleet.is_well(pages):
            record.well_s.append(at_s)
        await asyncio.sleep(SAMPLE_S)


def _read_logs(folder: Path, outcomes: Sequence[Outcome]) -> list[str]:
    """Take from the gateways' logs what each request used: of callers that left nobody else was told. Return the lines
    that tell of a defect."""
    by_id, defects = {one.id: one for one in outcomes}, []
    for gateway, line in _log_lines(folder):
        if any(words in line for words in DEFECTS):
            defects.append(f"{gateway}: {_told(line)}")
        with contextlib.suppress(ValueError):  # the line that a killed process was writing
            row = json.loads(line) if '"duration_s"' in line else {}
            one = by_id.get(row.get("request_id", ""))
            if one is not None and not row.get("reuse"):
                one.logged = row.get("input_tokens", 0), row.get("output_tokens", 0)  # none: it had no slot yet
                one.logged_s = row["duration_s"]
                if one.error == LEFT:
                    one.tokens = one.logged
    return defects


def _log_lines(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of a gateway and a line of its log."""
    for path in folder.glob("gateway-*.log"):
        for line in path.read_text("utf-8", "replace").splitlines():
            yield path.stem, line


def _told(line: str) -> str:
    """Return message and last line of the exception of a line of the log."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        row = json.loads(line)
        return f"{row['message']}: {row.get('exception', '').rpartition(chr(10))[2]}"[:500]
    return line[:500]


def _redis_late_s(folder: Path) -> list[float]:
    """Return when Redis did not answer a gateway in time, as its log tells."""
    shift_s, found = time.monotonic() - time.time(), []
    for _, line in _log_lines(folder):
        with contextlib.suppress(ValueError):
            row = json.loads(line) if REDIS_LATE in line else {}
            if REDIS_LATE in row.get("message", ""):
                found.append(datetime.fromisoformat(row["time"].replace("Z", "+00:00")).timestamp() + shift_s)
    return found


async def _settle(fleet: Fleet, record: Record) -> Mapping[str, Metrics]:
    """Wait until every process is well, gauges are 0 and no alert fires; return the metrics then."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        pages = await fleet.read()
        well = fleet.is_well(pages)
        if well and not record.settled_s:
            record.settled_s = time.monotonic()
        if fleet.prometheus_url:
            firing = (await _query(fleet, "query", FIRING))["data"]["result"]
            record.alerts_left = sorted({series["metric"]["alertname"] for series in firing} - {NOT_JUDGED})
        if (well and not invariants.left(pages) and not record.alerts_left) or time.monotonic() > deadline_s:
            return pages
        await asyncio.sleep(SAMPLE_S)


async def _query(fleet: Fleet, path: str, query: str, **parameters: float) -> Mapping:
    form = {"query": query, **{name: str(value) for name, value in parameters.items()}}
    async with aiohttp.request("POST", f"{fleet.prometheus_url}/api/v1/{path}", data=form) as answer:
        return await answer.json()


async def _read_redis(fleet: Fleet, record: Record) -> None:
    if not fleet.redis_url:
        return
    from redis.asyncio import Redis

    async with Redis.from_url(fleet.redis_url, decode_responses=True) as redis:
        stored = await redis.hgetall("trident:{metered}:tokens:metered/chaos")  # a bucket that is not there is full
        held, balance = float(stored.get("held", 0)), float(stored.get("balance", BUDGET_TOKENS))
        record.budgets = BUDGET_TOKENS - balance - held, held
        for _ in range(round(CAPS_S / SAMPLE_S)):
            if not (caps := await _caps_held(redis)):
                return
            await asyncio.sleep(SAMPLE_S)
        record.caps = caps


async def _caps_held(redis: Any) -> int:
    """Return the requests that gateways with a lease hold under caps."""
    alive = await redis.zrangebyscore("trident:{caps}:gateways", time.time() * 1000, "+inf")
    keys = [key async for key in redis.scan_iter("trident:{caps}:*", _type="hash")]
    held = [await redis.hgetall(key) for key in keys]
    return sum(int(count) for by in held for gateway, count in by.items() if gateway in alive)
