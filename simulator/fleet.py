"""The replicas of all pools: started, stopped, scaled by the law, made to fail; and the gateways in front of them."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from prometheus_client import generate_latest

from clients.replica_set.discovery import Discovery
from clients.replica_set.replica_set import ReplicaSet
from cluster.scaling.law import Decision, decide
from cluster.scaling.reader import PREFIXES, Reader
from contract import prometheus
from contract.background import Background
from contract.errors import InvalidArgument
from gateway.config import pools
from gateway.config.configuration import Configuration
from gateway.config.settings import NoReplicas, Settings
from gateway.config.tenants import API_KEYS
from gateway.routing.registrations import Registered
from gateway.routing.replica_metrics import ReplicaMetrics
from gateway.routing.replicas import Replicas, RoutedReplica
from gateway.service import Service
from simulator.replica import Channel, Engine, Prompt, Replica
from simulator.routes import Routes
from simulator.scenario import Fault, Pool, Scenario

BEAT_S = 1.0
_DRAIN_S = 0.5  # between two looks at a replica that drains
# Settings for what is outside the process, and those that the scenario has itself.
_OUTSIDE = frozenset(
    "audit_log batch_db config key_store metrics_urls otlp_endpoint redis redis_file replicas response_db samples "
    "semantic_url tokenizer usage_db workers".split()
)


class Fleet:
    """The replicas, by pool in the order of their starts. wanted, used_s (replica-seconds): by pool.

    decisions: all of the law by pool, with their times, and whether a part of the load was not known.
    blind: outages of the gateways' metrics that last. missed: numbers of the faults that hit no replica.
    violations: of what must hold, and how often.
    """

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._scenario, self._seed, self._rng = scenario, seed, random.Random(f"{seed} fleet")
        self._loop = asyncio.get_running_loop()
        self.replicas: dict[str, list[Replica]] = {name: [] for name in scenario.pools}
        self.hosts: dict[str, Replica] = {}
        self.wanted = {name: pool.replicas for name, pool in scenario.pools.items()}
        self.blind, self.missed, self.violations = 0, list[int](), Counter[str]()
        self.gateways: list[Service] = []
        self.decisions: dict[str, list[tuple[float, Decision, bool]]] = {name: [] for name in scenario.pools}
        self.used_s = dict.fromkeys(scenario.pools, 0.0)
        self._tasks = Background()
        for name, pool in scenario.pools.items():
            for _ in range(pool.replicas):
                self._start(name, pool, 0.0)

    def present(self, pool: str) -> list[Replica]:
        """Return the replicas that were ordered and not given back."""
        return [replica for replica in self.replicas[pool] if replica.state not in ("draining", "gone")]

    @property
    def calls(self) -> int:
        """Requests of people that replicas work on, without probes."""
        every = (call for replicas in self.replicas.values() for replica in replicas for call in replica.calls)
        return sum(isinstance(call.prompt, Prompt) for call in every)

    def slots(self, pool: str) -> int:
        """Return the slots of the replicas that are not gone."""
        return len(self.replicas[pool]) * self._scenario.pools[pool].slots

    def broken(self, text: str) -> None:
        self.violations[text] += 1

    def order(self, pool: str, wanted: int) -> None:
        """Start or stop replicas; the youngest are stopped."""
        self.wanted[pool], rules = wanted, self._scenario.pools[pool]
        present = self.present(pool)
        for _ in range(wanted - len(present)):
            self._start(pool, rules, rules.start_s * self._rng.uniform(1 - rules.start_spread, 1 + rules.start_spread))
        for replica in present[wanted:]:
            self._tasks.start(self._stop(replica))

    async def run(self) -> None:
        """Send the beats and count replica-seconds, until cancelled."""
        before_s = self._loop.time()
        while True:
            now_s = self._loop.time()
            for pool, replicas in self.replicas.items():
                for replica in replicas:
                    if replica.state == "starting" and now_s >= replica.ready_s:
                        replica.state = "ready"
                        replica.engine.resume(now_s)
                    self.used_s[pool] += (replica.state != "gone") * (now_s - before_s)
                    self._beat(replica)
                replicas[:] = [replica for replica in replicas if replica.state != "gone"]
            before_s = now_s
            await asyncio.sleep(BEAT_S)

    async def scale(self) -> None:
        """Read the gateways' pages and do what the law decides, until cancelled."""
        assert self._scenario.scaling is not None, "there are rules"
        reader = _Reader(self)
        while True:
            await asyncio.sleep(self._scenario.interval_s)
            await reader.read(cast(Any, None))
            for pool in self._scenario.pools:
                load, made = reader.load(pool), self.decisions[pool]
                if load is None and not made:  # nothing was ever known of it
                    continue
                state = made[-1][1].state if made else None
                decision = decide(self._scenario.scaling.of(pool), load, state, time.time())
                made.append((self._loop.time(), decision, not reader.complete))
                if decision.wanted != self.wanted[pool]:
                    self.order(pool, decision.wanted)

    async def fail(self, number: int, began_s: float) -> None:
        """Bring the scenario's fault of this number about, and end it."""
        fault = self._scenario.faults[number]
        await asyncio.sleep(began_s + fault.at_s - self._loop.time())
        present = self.present(fault.pool)
        hit = present if fault.replica is None else present[fault.replica : fault.replica + 1]
        if fault.kind == "hang":  # what is dead has no process that could
            hit = [replica for replica in hit if replica.state != "dead"]
        if not hit:
            self.missed.append(number)
        for more in (1, -1):  # it begins, it ends
            self.blind += more * (fault.kind == "metrics_outage")
            for replica in hit:
                if fault.kind == "slow":
                    replica.engine.slow *= fault.factor**more
                elif fault.kind == "network_delay":
                    replica.delay_s += more * fault.delay_s
                elif fault.kind == "metrics_outage":
                    replica.blind += more
                elif fault.kind == "fail":
                    replica.failing += more
                elif more > 0:
                    self._hold(replica, fault, number)
                elif number in replica.held:
                    replica.held.remove(number)
                    if not replica.held and replica.state in ("dead", "hung"):
                        replica.state, replica.ready_s = "starting", self._loop.time() + replica.left_s
            if more > 0:
                await asyncio.sleep(fault.for_s)

    async def close(self) -> None:
        await self._tasks.cancel()

    def _hold(self, replica: Replica, fault: Fault, number: int) -> None:
        """Let a replica die or hang until the last of such faults ends."""
        if fault.kind == "kill":
            if replica.state != "dead":
                replica.held.clear()  # a process that hung is gone
            replica.left_s = self._scenario.pools[replica.pool].start_s
            replica.die()
        elif replica.state != "hung":
            replica.left_s = max(0.0, replica.ready_s - self._loop.time())
            replica.hang()
        replica.held.add(number)

    def _start(self, pool: str, rules: Pool, after_s: float) -> None:
        number = len(self.hosts) + 1
        rng = random.Random(f"{self._seed} engine {pool} {number}")
        replica = Replica(pool, number, partial(Engine, rules, rng), self._loop.time() + after_s)
        if not after_s:
            replica.state = "ready"
        self.hosts[replica.host] = replica
        self.replicas[pool].append(replica)
        self._beat(replica)

    async def _stop(self, replica: Replica) -> None:
        """Withdraw, drain, end."""
        replica.state = "draining" if replica.state == "ready" else "gone"
        for gateway in self.gateways:
            gateway.replicas.registrations.withdraw(replica.address)
        while replica.state == "draining":
            await asyncio.sleep(_DRAIN_S)
            if not replica.calls:
                replica.state = "gone"

    def _beat(self, replica: Replica) -> None:
        if replica.state in ("starting", "ready"):
            registration = replica.registration(self._loop.time())
            for gateway in self.gateways:
                gateway.replicas.registrations.put(replica.address, registration)


class _Replicas(Replicas):
    """The gateway's own, whose replicas are models and register themselves whatever the policy lists."""

    def __init__(self, settings: Settings, rng: random.Random, fleet: Fleet) -> None:
        self._fleet, self._routes = fleet, Routes(settings, self._replicas_of, fleet.broken)
        super().__init__(settings, rng)

    def _source(self, pool: str, where: str) -> Discovery:
        return Registered(NoReplicas(), self.registrations, pool)

    def _set(self, pool: str, discovery: Discovery) -> ReplicaSet[RoutedReplica]:
        made = super()._set(pool, discovery)
        make = made._make

        def connected(url: str) -> RoutedReplica:
            replica = make(url)
            host, connection = self._fleet.hosts[url.rpartition(":")[0]], replica.channel.connection
            replica.channel = cast(Any, Channel(host, connection, self._routes))
            return replica

        made._make = connected
        return made

    async def _scrape(self, url: str) -> ReplicaMetrics | None:
        return self._fleet.hosts[url.removeprefix("http://").rpartition(":")[0]].metrics()


class _Reader(Reader):
    """The scaler's own, but for the HTTP between it and the gateways."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__([f"http://gateway:{number + 1}/metrics" for number in range(len(fleet.gateways))])
        self._fleet = fleet

    async def _read(self, http: object, url: str, page: Any) -> None:
        if not self._fleet.blind:
            gateway = self._fleet.gateways[int(url.split(":")[2].removesuffix("/metrics")) - 1]
            text = generate_latest(cast(Any, gateway.state_metrics)).decode()
            page.take(prometheus.parse(text, PREFIXES), time.monotonic())


def gateway(scenario: Scenario, keys: Sequence[str], fleet: Fleet, seed: int, number: int, folder: Path) -> Service:
    """Return one gateway, not started. keys: org/team/key of the people. folder: for its copy of the policy. Raises
    InvalidArgument for a policy or settings that cannot be used."""
    given = scenario.gateway
    for name in given.settings:
        if name.lower() in _OUTSIDE:
            raise InvalidArgument(f"gateway.settings.{name}", "must be left out in a simulation")
        if name.lower() not in Settings.model_fields:
            allowed = ", ".join(sorted(Settings.model_fields))
            raise InvalidArgument(f"gateway.settings.{name}", f"must be one of {allowed}")
    if given.policy and not Path(given.policy).is_file():
        raise InvalidArgument("gateway.policy", f"must be a file that can be read, got {given.policy}")
    environ = {f"TRIDENT_GATEWAY_{name.upper()}": value for name, value in given.settings.items()}
    environ |= {"TRIDENT_GATEWAY_REPLICAS": ";".join(f"{pool}=registered" for pool in scenario.pools)}
    database = {"TRIDENT_GATEWAY_USAGE_DB": str(folder / f"{number}.sqlite")}  # keeps days and months
    settings = Settings.from_environment(environ)
    path = Path(shutil.copy(given.policy, folder / f"{number}.toml")) if given.policy else None
    try:
        known = Configuration(path, database, pools.of(settings))
    except InvalidArgument as exc:
        raise InvalidArgument(exc.field.replace(str(path), given.policy), exc.problem) from exc
    if known._reading.keys.quotas:
        settings = Settings.from_environment(environ | database)
    new = [key for key in dict.fromkeys(keys) if key and known.named(key.rpartition("/")[0], key) is None]
    environ = {API_KEYS: ",".join(f"{key}=simulated-key-of-{key}" for key in new)} if new else {}
    configuration = Configuration(path, environ | database, pools.of(settings))
    policy, sources = configuration.policy, configuration.pools.sources
    for field, problem, holds in (
        ("overflow", "must be pools in a simulation", any(one.upstreams for one in policy.overflow.values())),
        ("models", "must have no tokenizer in a simulation", any(model.tokenizer for model in policy.models.values())),
        ("budgets.redis", "must be left out in a simulation", policy.budgets.redis),
        ("pools", f"must be of {', '.join(scenario.pools)}, got {', '.join(sources)}", sources.keys() - scenario.pools),
    ):
        if holds:
            raise InvalidArgument(f"{given.policy}: {field}", problem)
    rng = random.Random(f"{seed} gateway {number}")
    service = Service(settings, configuration, replicas=_Replicas(settings, rng, fleet), rng=rng)
    cast(Any, service.budgets)._wall = time.time  # the simulation's, here; the default is the machine's
    return service
