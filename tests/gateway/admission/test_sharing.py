"""How several gateways share the slots of replicas: by hand, and in simulations of gateways that know each other's load
only from the replicas' metrics."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission.sharing import ALONE, Capacity, OthersLoad, capacity
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.running import Running, gateway, until


def test_alone_a_gateway_sends_a_quarter_more_than_can_run() -> None:
    assert capacity(8, 0.0) == Capacity(8, 10) == capacity(8, ALONE - 0.01)


def test_others_take_their_part_and_at_least_one_slot_stays() -> None:
    assert capacity(8, 2.0) == Capacity(6, 6)
    assert capacity(8, 2.0, dither=0.7) == Capacity(7, 7)
    assert capacity(8, 100.0) == Capacity(1, 1)


@given(st.integers(1, 500), st.floats(0, 1000), st.floats(0, 1000))
def test_more_load_of_others_never_leaves_more(slots: int, one: float, other: float) -> None:
    assert capacity(slots, max(one, other)).limit <= capacity(slots, min(one, other)).limit


def test_own_requests_are_not_taken_for_others() -> None:
    others = OthersLoad()
    for reported, own in ((8, 8), (3, 8), (0, 2)):
        others.observe(reported, own)
        assert others.requests == 0
    others.observe(9, 2)
    assert others.requests == 0  # one that ends and one that begins in its place
    others.observe(9, 2)
    assert others.requests == 7
    others.observe(6, 2)
    assert 4 < others.requests < 7
    for _ in range(60):
        others.observe(2, 2)
    assert others.requests == 0


class Simulation:
    """Gateways with as many requests as they may send, in front of one replica whose queue is first come, first served.
    Each reads the metrics once a second, at a time of its own."""

    def __init__(self, gateways: int, slots: int, life_s: float, seed: int) -> None:
        self.rng, self.slots, self.life_s = random.Random(seed), slots, life_s
        self.own, self.most, self.served = [0] * gateways, [0] * gateways, [0] * gateways
        self.loads = [OthersLoad() for _ in range(gateways)]
        self.limits, self.wanted = [1] * gateways, [10**9] * gateways
        self.queue: list[int] = []
        self.running, self.order, self.now_s = 0, itertools.count(), 0.0
        self.events: list[tuple[float, int, str, int]] = []
        for number in range(gateways):
            self.later(self.rng.random(), "read", number)

    def later(self, seconds: float, what: str, gateway: int) -> None:
        heapq.heappush(self.events, (self.now_s + seconds, next(self.order), what, gateway))

    def fill(self, gateway: int) -> None:
        while self.own[gateway] < min(self.limits[gateway], self.wanted[gateway]):
            self.own[gateway] += 1
            self.most[gateway] = max(self.most[gateway], self.own[gateway])
            self.queue.append(gateway)
        while self.queue and self.running < self.slots:
            self.running += 1
            self.later(self.life_s * self.rng.uniform(0.5, 1.5), "end", self.queue.pop(0))

    def run(self, until_s: float) -> list[int]:
        """Requests at the replica, at every reading."""
        totals = []
        while self.events[0][0] < until_s:
            self.now_s, _, what, gateway = heapq.heappop(self.events)
            if what == "read":
                self.loads[gateway].observe(sum(self.own), self.most[gateway])
                self.most[gateway] = self.own[gateway]
                self.limits[gateway] = capacity(self.slots, self.loads[gateway].requests, self.rng.random()).limit
                totals.append(sum(self.own))
                self.later(self.rng.uniform(0.9, 1.1), "read", gateway)
            else:
                self.own[gateway] -= 1
                self.served[gateway] += 1
                self.running -= 1
            self.fill(gateway)
        return totals


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 10), st.sampled_from([16, 64, 200]), st.sampled_from([0.1, 1.0, 4.0]), st.integers(0, 10**6))
def test_all_slots_are_used_few_requests_wait_there_and_the_parts_are_equal(
    gateways: int, slots: int, life_s: float, seed: int
) -> None:
    simulation = Simulation(gateways, slots, life_s, seed)
    simulation.run(100)
    simulation.served = [0] * gateways
    totals = simulation.run(300)
    assert slots <= sum(totals) / len(totals) <= 1.25 * slots + gateways
    assert min(totals) >= 0.95 * slots - gateways
    shares = simulation.served
    assert sum(shares) ** 2 / (gateways * sum(share * share for share in shares)) > 0.9  # Jain's index


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 6), st.integers(0, 10**6))
def test_what_one_does_not_use_or_leaves_the_others_have(gateways: int, seed: int) -> None:
    simulation = Simulation(gateways, 64, 1.0, seed)
    simulation.wanted[0] = 3
    simulation.run(60)
    totals = simulation.run(120)
    assert min(totals) >= 60
    simulation.wanted = [0] * (gateways - 1) + [10**9]
    simulation.run(180)
    assert set(simulation.run(240)) == {80}  # alone again: all slots and a quarter more


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
