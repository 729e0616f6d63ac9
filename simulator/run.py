"""Run a scenario: the gateways' own code, the law, people and faults on one virtual loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from benchmarks.record import Record
from cluster.scaling.rules import Rules
from contract.errors import InvalidArgument, TridentError
from gateway.config import release_file
from gateway.service import Service
from simulator import fleet, virtual_time
from simulator.fleet import Fleet
from simulator.invariants import Ledger
from simulator.people import HOUR_S, People, Sent
from simulator.replica import plain_wire
from simulator.scenario import Change, Scenario

_Request = TypeVar("_Request", bound=Record)
_T = TypeVar("_T")
SAMPLES = 240  # of pools, over a run
_GARBAGE = 50_000, 20, 100  # thresholds of the collector: a request makes hundreds of objects, and few cycles
SETTLE_S = 2.0  # before the first request: replicas register and are probed
BEGAN_S = virtual_time.START_S + SETTLE_S  # of all runs, on the loop's clock


class Sample(NamedTuple):
    """One pool at one time: replicas wanted, ready, and paid for; requests that hold a slot, and that wait for one."""

    at_s: float
    pool: str
    wanted: int
    ready: int
    present: int
    running: int
    waiting: int


@dataclass
class Result:
    """What a run came to.

    records: by persona, on the loop's clock. decisions: of the law when it changed its mind: time from BEGAN_S, pool,
    replicas, reason. drafted_tokens: of steps with drafts, by pool. counts: of the gateways. releases: their status.
    missed: numbers of faults that hit no replica. refused: why a change could not be made, by its number.
    """

    scenario: Scenario
    seed: int
    records: dict[str, list[Sent]]
    samples: list[Sample]
    decisions: list[tuple[float, str, int, str]]
    replica_hours: dict[str, float]
    drafted_tokens: dict[str, float]
    counts: Counter[str]
    releases: list[dict[str, Any]]
    violations: Counter[str]
    missed: list[int]
    refused: dict[int, str]

    @property
    def window(self) -> tuple[float, float]:
        """When the requests of the figures are sent: after the warm-up."""
        return BEGAN_S + self.scenario.warmup_s, BEGAN_S + self.scenario.duration_s

    def measured(self, records: Iterable[_Request]) -> Iterator[_Request]:
        """Yield the requests of the window."""
        begin_s, end_s = self.window
        return (record for record in records if begin_s <= record.intended_s <= end_s)

    @property
    def everyone(self) -> list[Record]:
        return [record for records in self.records.values() for record in records]


def run(scenario: Scenario, seed: int = 0) -> Result:
    """Return what the scenario comes to. Equal seeds give equal results. Raises InvalidArgument for a policy, settings
    or an engine that cannot be used."""
    return _simulated(scenario, seed, _run)


def check(scenario: Scenario) -> None:
    """Raise as ``run`` does, and simulate nothing."""
    _simulated(scenario, 0, _made)


def _simulated(scenario: Scenario, seed: int, work: Callable[[Scenario, int, Path], Coroutine[Any, Any, _T]]) -> _T:
    level, threshold = logging.root.manager.disable, gc.get_threshold()
    logging.disable(logging.CRITICAL)  # a line for each request would take longer than the request
    gc.set_threshold(*_GARBAGE)
    try:
        with plain_wire(), tempfile.TemporaryDirectory() as folder:
            return virtual_time.run(work(scenario, seed, Path(folder)), seed, scenario.start_hour * HOUR_S - SETTLE_S)
    finally:
        logging.disable(level)
        gc.set_threshold(*threshold)


async def _made(scenario: Scenario, seed: int, folder: Path) -> tuple[Fleet, Ledger, dict[str, People]]:
    replicas = Fleet(scenario, seed)
    keys, gateways = [persona.key for persona in scenario.personas.values()], replicas.gateways
    for number in range(scenario.gateway.count):
        gateways.append(fleet.gateway(scenario, keys, replicas, seed, number, folder))
    ledger = Ledger(len(gateways), replicas)
    given, hour = scenario.personas.items(), scenario.start_hour
    people = {name: People(name, persona, gateways, ledger, seed, hour) for name, persona in given}
    _check_changes(scenario, gateways[0], folder)
    return replicas, ledger, people


def _check_changes(scenario: Scenario, gateway: Service, folder: Path) -> None:
    """Make all changes in a copy of the policy. Raises InvalidArgument."""
    configuration, path = gateway.configuration, folder / "changes.toml"
    if scenario.changes and configuration.path is None:
        raise InvalidArgument("gateway.policy", "must be set, since there are changes")
    if configuration.path is not None:
        shutil.copy(configuration.path, path)
    shares = configuration.pools.generating
    for number, change in _in_order(scenario):
        try:
            release_file.apply(path, change.action, change.release, change.set, configuration.check, shares)
        except TridentError as exc:
            problem = str(exc).replace(str(path), scenario.gateway.policy)
            raise InvalidArgument(f"changes.{number}", f"cannot be made: {problem}") from exc


def _in_order(scenario: Scenario) -> list[tuple[int, Change]]:
    return sorted(enumerate(scenario.changes), key=lambda one: one[1].at_s)


async def _run(scenario: Scenario, seed: int, folder: Path) -> Result:
    replicas, ledger, people = await _made(scenario, seed, folder)
    gateways, samples, refused = replicas.gateways, list[Sample](), dict[int, str]()
    for gateway in gateways:
        await gateway.start()
    ledger.watch(gateways)
    until_s = BEGAN_S + scenario.duration_s
    work = [replicas.run(), _watch(scenario, replicas, ledger, samples), _change(scenario, gateways, refused)]
    work += [replicas.fail(number, BEGAN_S) for number in range(len(scenario.faults))]
    work += [replicas.scale()] if scenario.scaling is not None else []
    work += [one.run(BEGAN_S, until_s) for one in people.values()]
    tasks: list[asyncio.Task] = [asyncio.create_task(each) for each in work]
    await _until(BEGAN_S)
    replicas.used_s = dict.fromkeys(scenario.pools, 0.0)
    await _until(until_s)
    hours = {pool: used_s / HOUR_S for pool, used_s in replicas.used_s.items()}
    rules = gateways[0].configuration.policy
    await _until(until_s + 1.0)  # who was late sends
    for one in people.values():
        if one.tasks:
            await asyncio.wait(one.tasks, timeout=gateways[0].settings.request_timeout_s + rules.longest_wait_s)
    for gateway in gateways:
        await gateway.shadow.tasks.cancel()  # copies may take longer than any request
    await asyncio.sleep(1.0)  # the last settlements
    ledger.check_end(gateways, replicas.hosts.values())
    tasks += [task for one in people.values() for task in one.tasks]  # lost
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    changed = []
    for pool, made in replicas.decisions.items():
        ledger.check_decisions((scenario.scaling or Rules()).of(pool), pool, made)
        for wanted, same in groupby(made, key=lambda one: one[1].wanted):
            at_s, decision, _ = next(same)
            changed.append((round(at_s - BEGAN_S, 3), pool, wanted, decision.reason))
    changed.sort(key=lambda one: one[0])
    records = {name: one.records for name, one in people.items()}
    by_replica = [(replica.pool, replica.engine.drafted_tokens) for replica in replicas.hosts.values()]
    drafted = {name: sum(tokens for pool, tokens in by_replica if pool == name) for name in scenario.pools}
    counts = sum((_counts(gateway) for gateway in gateways), Counter[str]())
    releases = [{"gateway": nth, **one} for nth, gateway in enumerate(gateways) for one in gateway.releases.status()]
    problems = ledger.violations, replicas.missed, refused
    result = Result(scenario, seed, records, samples, changed, hours, drafted, counts, releases, *problems)
    await replicas.close()
    for gateway in gateways:
        await gateway.close()
    for end in ends:
        if isinstance(end, Exception):  # of the gateway, the law or the simulator itself
            found = "; ".join(ledger.violations)
            raise RuntimeError(f"the simulation failed: {end!r}; violated until then: {found or 'nothing'}") from end
    return result


async def _until(at_s: float) -> None:
    await asyncio.sleep(max(0.0, at_s - asyncio.get_running_loop().time()))


async def _watch(scenario: Scenario, replicas: Fleet, ledger: Ledger, samples: list[Sample]) -> None:
    """Sample the pools and check the invariants, until cancelled."""
    loop, every_s = asyncio.get_running_loop(), max(1.0, scenario.duration_s / SAMPLES)
    await _until(BEGAN_S)
    while True:
        ledger.check(replicas.gateways, replicas.calls)
        for pool in scenario.pools if loop.time() <= BEGAN_S + scenario.duration_s else ():
            slots = [gateway.admission.slots(pool) for gateway in replicas.gateways]
            held = sum(one.running for one in slots), sum(one.waiting for one in slots)
            ready = sum(replica.state == "ready" for replica in replicas.replicas[pool])
            counts = replicas.wanted[pool], ready, len(replicas.present(pool))
            samples.append(Sample(round(loop.time() - BEGAN_S, 3), pool, *counts, *held))
        await asyncio.sleep(every_s)


async def _change(scenario: Scenario, gateways: Iterable[Service], refused: dict[int, str]) -> None:
    """Start, shift and roll back releases at every gateway. refused: why a change could not be made, by its number."""
    for number, change in _in_order(scenario):
        await _until(BEGAN_S + change.at_s)
        for gateway in gateways:
            try:
                await gateway.change_release(change.release, change.action, change.set)
            except TridentError as exc:  # as after a rollback that the gateway made itself
                refused[number] = str(exc)


def _counts(gateway: Service) -> Counter[str]:
    """Return what a gateway counted beside the answers, without what is 0."""
    counts = Counter({f"refused: {reason}": count for reason, count in gateway.admission.rejected.items()})
    counts += Counter({f"degraded: {stage}": count for stage, count in gateway.admission.degraded.items()})
    value = gateway.metrics.registry.get_sample_value
    counts["retried"] = int(value("trident_gateway_retries_total") or 0)
    for result in ("continued", "refused", "suspect", "no_replica"):
        continued = value("trident_gateway_continuations_total", {"result": result})
        counts[f"lost its replica: {result}"] = int(continued or 0)
    return +counts
