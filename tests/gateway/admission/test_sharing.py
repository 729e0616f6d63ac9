"""How several gateways share the slots of replicas: by hand, and in simulations of gateways that know each other's load
only from the replicas' metrics."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission.fair_queue import Entry
from gateway.admission.pool_slots import Claim, PoolSlots
from gateway.admission.sharing import ALONE, WEIGHT, Capacity, OthersLoad, capacity, part
from gateway.config.policy import AdmissionRules
from tests.fakes.replica import FakeReplica, Script, SeenRequest
from tests.gateway.running import Running, gateway, until

KEYED = AdmissionRules(max_waiting_per_class=10**6, max_waiting_per_tenant=10**6)


def test_alone_a_gateway_sends_a_quarter_more_than_can_run() -> None:
    assert capacity(8, 0.0) == Capacity(8, 10) == capacity(8, ALONE - 0.01)


def test_others_take_their_part_and_at_least_one_slot_stays() -> None:
    assert capacity(8, 2.0) == Capacity(5, 5, others=2.0, pool_slots=8)
    assert capacity(8, 100.0) == Capacity(1, 1, others=100.0, pool_slots=8)


@given(st.integers(1, 500), st.floats(0, 1000), st.floats(0, 1000))
def test_more_load_of_others_never_leaves_more(slots: int, one: float, other: float) -> None:
    assert capacity(slots, max(one, other)).limit <= capacity(slots, min(one, other)).limit
    assert part(slots, max(one, other)) <= part(slots, min(one, other))


@given(st.integers(2, 500), st.integers(2, 50))
def test_equal_parts_are_stable_and_never_more_than_the_slots(slots: int, gateways: int) -> None:
    each = WEIGHT * slots / (1 + WEIGHT * (gateways - 1))
    assert part(slots, each * (gateways - 1)) == pytest.approx(max(1.0, each))
    assert WEIGHT * slots <= each * gateways <= slots


def test_own_requests_are_not_taken_for_others() -> None:
    others = OthersLoad()
    for reported, own, most_own in ((8, 8, 8), (3, 2, 8), (8, 2, 8), (0, 2, 2)):
        others.observe(reported, own, most_own)
        assert others.requests == 0
    others.observe(9, 2, 2)
    assert others.requests == 0  # one request that ends and one that begins in its place
    others.observe(9, 2, 2)
    assert others.requests == 7
    others.observe(6, 2, 2)
    assert 4 < others.requests < 7
    for _ in range(60):
        others.observe(2, 2, 2)
    assert others.requests == 0


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=50))
def test_a_gateway_without_others_never_sees_any_whatever_is_reported_late(steps: list[tuple[int, int]]) -> None:
    others = OthersLoad()
    for most_own, late in steps:
        others.observe(min(late, most_own), 0, most_own)
        assert others.requests == 0


@given(st.integers(2, 12), st.integers(1, 12), st.integers(0, 10**6))
def test_the_load_of_others_is_neither_under_nor_overestimated(own: int, theirs: int, seed: int) -> None:
    """Requests come and go, so that at every scrape up to two of either's are reported too early or too late."""
    rng, others, seen = random.Random(seed), OthersLoad(), []
    for _ in range(400):
        now = own + rng.choice((-1, 0, 1))
        others.observe(now + theirs + rng.choice((-1, 0, 1)), now + rng.choice((-0.5, 0, 0.5)), own + 1)
        seen.append(others.requests)
    if theirs > 3:  # fewer may take a while to be told from own ones
        assert abs(sum(seen[100:]) / 300 - theirs) < 0.5


@dataclass(eq=False)
class Request:
    """One request of a simulated gateway. life_s: seconds that it runs. came_s: when its client sent it."""

    gateway: int
    claim: Claim
    life_s: float
    came_s: float
    short: bool
    sent: bool = False


class Simulation:
    """Gateways with the real slots and queues, in front of one replica whose queue is first come, first served.

    Every gateway has ``clients`` of each of ``tenants`` that send long requests without a pause, and one tenant that
    sends a short one now and then. Each reads the metrics once a second, at a time of its own.
    """

    def __init__(
        self, gateways: int, slots: int, life_s: float, seed: int, *, tenants: int = 3, rules: AdmissionRules = KEYED
    ) -> None:
        self.rng, self.slots, self.life_s, self.tenants = random.Random(seed), slots, life_s, tenants
        self.own, self.most, self.served = [0] * gateways, [0] * gateways, [0] * gateways
        self.loads = [OthersLoad() for _ in range(gateways)]
        self.clients = [slots] * gateways  # of each tenant
        self.sending = [[0] * tenants for _ in range(gateways)]
        self.short_waits_s: list[float] = []
        self.open: list[list[Request]] = [[] for _ in range(gateways)]
        self.at_replica: deque[Request] = deque()
        self.running, self.order, self.now_s = 0, itertools.count(), 0.0
        self.long_at_replica = 0
        self.pools = [
            PoolSlots(
                lambda: self.now_s,
                lambda load=load: capacity(slots, load.requests),
                rules,
                rng=self.rng,
            )
            for load in self.loads
        ]
        self.events: list[tuple[float, int, str, Any]] = []
        for number in range(gateways):
            self.later(self.rng.random(), "read", number)
            self.later(self.rng.random(), "short", number)

    def later(self, seconds: float, what: str, subject: Any) -> None:
        heapq.heappush(self.events, (self.now_s + seconds, next(self.order), what, subject))

    def send(self, gateway: int, tenant: str, tokens: int, life_s: float) -> None:
        claim = self.pools[gateway].claim(Entry(tenant, tokens, longest_tokens=tokens), math.inf)
        self.open[gateway].append(Request(gateway, claim, life_s, self.now_s, tokens < 100))

    def fill(self, gateway: int) -> None:
        """Send what the clients of a gateway have to send, and run what the replica has slots for."""
        for tenant, count in enumerate(self.sending[gateway]):
            for _ in range(self.clients[gateway] - count):
                self.send(gateway, f"t{tenant}", 100, self.life_s * self.rng.uniform(0.5, 1.5))
                self.sending[gateway][tenant] += 1
        for request in self.open[gateway]:
            if request.claim.given and not request.sent:
                request.sent = True
                self.own[gateway] += 1
                self.long_at_replica += not request.short
                self.most[gateway] = max(self.most[gateway], self.own[gateway])
                self.at_replica.append(request)
        while self.at_replica and self.running < self.slots:
            self.running += 1
            request = self.at_replica.popleft()
            if request.short:
                self.short_waits_s.append(self.now_s - request.came_s)
            self.later(request.life_s, "end", request)

    def end(self, request: Request) -> None:
        gateway = request.gateway
        self.running -= 1
        self.own[gateway] -= 1
        self.open[gateway].remove(request)
        if not request.short:
            self.served[gateway] += 1
            self.long_at_replica -= 1
            self.sending[gateway][int(request.claim.entry.tenant[1:])] -= 1
        request.claim.close(request.claim.entry.cost_tokens)

    def run(self, until_s: float) -> list[int]:
        """Long requests at the replica, at every reading."""
        totals = []
        while self.events[0][0] < until_s:
            self.now_s, _, what, subject = heapq.heappop(self.events)
            if what == "read":
                self.loads[subject].observe(sum(self.own), self.own[subject], self.most[subject])
                self.most[subject] = self.own[subject]
                self.pools[subject].dispatch()
                totals.append(self.long_at_replica)
                self.later(self.rng.uniform(0.9, 1.1), "read", subject)
            elif what == "short":
                self.send(subject, "chat", 5, self.life_s / 20)
                self.later(self.rng.uniform(0.5, 1.5), "short", subject)
            else:
                self.end(subject)
                subject = subject.gateway
            self.fill(subject)
        return totals


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.integers(2, 4), st.sampled_from([8, 16, 64]), st.sampled_from([0.5, 2.0]), st.integers(0, 10**6))
def test_busy_gateways_use_the_slots_equally_and_leave_the_reserve_to_short_requests(
    gateways: int, slots: int, life_s: float, seed: int
) -> None:
    simulation = Simulation(gateways, slots, life_s, seed)
    simulation.run(30)
    simulation.served, simulation.short_waits_s = [0] * gateways, []
    totals = simulation.run(130)
    open_slots = slots - max(1, slots // 10)
    assert 0.8 * open_slots <= sum(totals) / len(totals) <= open_slots
    shares = simulation.served
    assert sum(shares) ** 2 / (gateways * sum(share * share for share in shares)) > 0.85  # Jain's index
    waits = sorted(simulation.short_waits_s)
    assert waits[len(waits) // 2] <= life_s / 20
    assert waits[int(len(waits) * 0.9)] <= life_s / 8


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.integers(2, 6), st.integers(0, 10**6))
def test_what_one_gateway_does_not_use_or_leaves_the_others_have(gateways: int, seed: int) -> None:
    simulation = Simulation(gateways, 64, 1.0, seed)
    simulation.clients[0] = 1
    simulation.run(60)
    totals = simulation.run(90)
    assert sum(totals) / len(totals) >= 0.8 * 58
    simulation.clients = [0] * (gateways - 1) + [64]
    simulation.run(120)
    assert simulation.pools[-1].capacity == Capacity(64, 80)  # alone again
    assert set(simulation.run(130)) == {58}


@settings(max_examples=4)
@given(st.integers(2, 10), st.sampled_from([1, 2, 4, 8]), st.integers(0, 10**6))
def test_no_gateway_starves_where_there_are_fewer_slots_than_gateways(gateways: int, slots: int, seed: int) -> None:
    simulation = Simulation(gateways, slots, 1.0, seed)
    simulation.run(30)
    simulation.served = [0] * gateways
    simulation.run(130)
    assert min(simulation.served) > 0.3 * sum(simulation.served) / gateways


@pytest.mark.slow
async def test_two_gateways_in_front_of_one_replica_share_its_slots() -> None:
    slots = 8
    script = Script((" t",), first_token_s=0.3)
    async with FakeReplica(lambda seen: script, slots=slots) as replica:
        async with gateway(replica) as one, gateway(replica) as two:
            body = {"model": "demo", "max_tokens": 10, "temperature": 1}
            served = {"one": 0, "two": 0}

            async def flood(running: Running, name: str) -> None:
                while True:
                    status, _, _ = await running.post("/v1/completions", {**body, "prompt": name})
                    assert status == 200
                    served[name] += 1

            floods = [asyncio.ensure_future(flood(one, "one")) for _ in range(20)]
            await until(lambda: replica.counts.running == 10)  # alone, one sends ahead
            others = [asyncio.ensure_future(flood(two, "two")) for _ in range(20)]
            limits = [running.service.replicas.capacity for running in (one, two)]
            await until(lambda: served["two"] > 0 and limits[0]("").limit + limits[1]("").limit <= 10)
            before = dict(served)
            await until(lambda: sum(served.values()) - sum(before.values()) > 200)
            parts = [served[name] - before[name] for name in served]
            assert min(parts) > 0.25 * sum(parts)
            assert one.service.admission.running + two.service.admission.running <= 12  # 20 when each took all
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await until(lambda: replica.counts.running == 10 and limits[0]("") == Capacity(8, 10))
            for task in floods:
                task.cancel()
            await asyncio.gather(*floods, return_exceptions=True)


@pytest.mark.slow
async def test_long_requests_of_two_gateways_leave_the_replica_a_slot_for_short_ones() -> None:
    slots, keys = 8, {name: f"tri-{name}-0123456789abcdefghij" for name in ("flood", "flood2", "chat")}
    environ = {"TRIDENT_GATEWAY_API_KEYS": ",".join(f"{name}/t/k={key}" for name, key in keys.items())}

    options = {"environ": environ, "metrics_interval_s": 0.2}

    found_full: list[bool] = []  # by short request, when it reached the replica

    def paced(seen: SeenRequest) -> Script:
        if seen.value("max_tokens") == 5:
            found_full.append(replica.counts.running >= slots)
        return Script((" t",), first_token_s=seen.value("max_tokens") / 100)

    async with FakeReplica(paced, slots=slots) as replica:
        async with gateway(replica, **options) as one, gateway(replica, **options) as two:

            async def send(running: Running, tenant: str, max_tokens: int) -> None:
                body = {"model": "demo", "max_tokens": max_tokens, "temperature": 1, "prompt": tenant}
                status, _, _ = await running.post("/v1/completions", body, authorization=f"Bearer {keys[tenant]}")
                assert status == 200

            async def flood(running: Running, tenant: str) -> None:
                while True:
                    await send(running, tenant, 100)

            floods = [
                asyncio.ensure_future(flood(running, tenant))
                for running in (one, two)
                for tenant in ("flood", "flood2")
                for _ in range(10)
            ]
            pools = [running.service.admission.slots() for running in (one, two)]
            await until(lambda: all(pool.capacity.others for pool in pools) and replica.counts.running < slots)
            running_there = []
            for turn in range(60):
                short = asyncio.ensure_future(send((one, two)[turn % 2], "chat", 5))
                while not short.done():
                    running_there.append(replica.counts.running)
                    await asyncio.sleep(0.01)
                await short
            # Counted by request: by time, one request that a busy machine delays would count as many.
            assert len(found_full) == 60 and sum(found_full) < 0.2 * len(found_full)
            assert sum(running_there) / len(running_there) > 0.65 * slots
            for task in floods:
                task.cancel()
            await asyncio.gather(*floods, return_exceptions=True)
