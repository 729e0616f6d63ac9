"""The hub with the links of several workers, each with an admission of its own, on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from contract.errors import DeadlineExceeded, InvalidArgument, Overloaded
from contract.generation import GenerationRequest, Usage
from gateway.admission.fair_admission import FairAdmission
from gateway.admission.hub import Hub
from gateway.admission.hub_link import HubLink, SharedBudgets, SharedCaps
from gateway.admission.sharing import capacity
from gateway.config.policy import AdmissionRules
from gateway.config.tenant import Level, Limits, Tenant

REQUEST = GenerationRequest(text_input="x", max_tokens=10)


class OnePool:
    def prompt_weight(self) -> float:
        return 1.0

    def draw(self, pinned, session="", without=None):
        return pinned

    def capacity(self, pool):
        return capacity(1, 0)  # of which only the KV usage counts: the hub has the slots


class Worker:
    def __init__(self, number: int, end: socket.socket, slots: int) -> None:
        self.link = HubLink(number, end, Path())
        self.link.reported = lambda: {"": (capacity(slots, 0), 0)}
        self.caps = SharedCaps(self.link)
        self.admission = FairAdmission(
            SharedBudgets(self.link),
            self.caps,
            time.monotonic,
            pools=OnePool(),
            make_slots=self.link.slots,
        )

    async def run(self, tenant: Tenant, hold_s: float = 0.0, request: GenerationRequest = REQUEST) -> None:
        permit = await self.admission.admit([request], tenant)
        try:
            await asyncio.sleep(hold_s)
        finally:
            permit.settle(Usage(1, 10))


@contextlib.asynccontextmanager
async def workers(count: int, slots: int = 4, limit: int = 1000, **rules) -> AsyncIterator[tuple[Hub, list[Worker]]]:
    hub = Hub(limit, 60.0)
    telling = asyncio.create_task(hub.run())
    made = []
    for number in range(count):
        own, end = socket.socketpair()
        await hub.attach(number, own)
        worker = Worker(number, end, slots)
        await worker.link.start()
        worker.link.check(time.monotonic())
        made.append(worker)
    chosen = AdmissionRules(tenant_share=1.0, short_reserve=0.0, **rules)
    for worker in made:
        worker.admission.change(chosen, None)
        worker.link.change(chosen, ("",))
    while hub.rules.tenant_share != 1.0:
        await asyncio.sleep(0.001)
    try:
        yield hub, made
    finally:
        for worker in made:
            worker.link.close()
        telling.cancel()
        await hub.close()


def capped(name: str, **limits: int) -> Tenant:
    return Tenant(name, levels=(Level(name, Limits(**limits)),))


async def idle(hub: Hub) -> None:
    while hub.caps.in_flight or any(not pool.slots.idle for pool in hub._pools.values()):
        await asyncio.sleep(0.001)


async def test_a_cap_holds_over_all_workers_and_what_is_released_can_be_taken_again():
    async with workers(3, slots=64) as (hub, made):
        tenant = capped("acme", max_in_flight=5)
        taken = await asyncio.gather(
            *(made[number % 3].admission.admit([REQUEST], tenant) for number in range(12)), return_exceptions=True
        )
        permits = [one for one in taken if not isinstance(one, Exception)]
        assert len(permits) == 5 and hub.caps.in_flight == sum(worker.caps.in_flight for worker in made) == 5
        assert {type(one) for one in taken if isinstance(one, Exception)} == {Overloaded}
        permits[0].settle(None)
        await made[2].run(tenant)
        with pytest.raises(InvalidArgument, match="at most 5"):
            await made[0].admission.admit([REQUEST] * 6, tenant)
        for permit in permits:
            permit.settle(None)
        await idle(hub)
        assert not any(worker.caps.in_flight for worker in made)


async def test_a_budget_holds_over_all_workers():
    async with workers(3, slots=64) as (hub, made):
        tenant = capped("acme", requests_per_minute=7, tokens_per_minute=100_000)
        ends = await asyncio.gather(*(made[n % 3].run(tenant) for n in range(20)), return_exceptions=True)
        assert sum(end is None for end in ends) == 7
        assert {end.reason for end in ends if end is not None} == {"budget"}
        await idle(hub)
        tokens = hub.budgets._buckets["tokens:acme"]
        assert not tokens.held and 100_000 - tokens.balance < 7 * 11 + 1


async def test_no_more_requests_run_than_the_pool_has_slots_whatever_worker_they_came_to():
    async with workers(4, slots=4) as (hub, made):
        running = most = 0

        async def one(number: int) -> None:
            nonlocal running, most
            permit = await made[number % 4].admission.admit([REQUEST], Tenant(f"t{number % 3}"))
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.002)
            running -= 1
            permit.settle(Usage(1, 10))

        await asyncio.gather(*map(one, range(60)))
        assert most == 5  # a quarter is sent ahead, as by a gateway with one process
        await idle(hub)


async def test_weights_hold_where_every_request_comes_to_a_random_worker():
    rng, served = random.Random(0), Counter()
    weights = {"one": 1.0, "two": 2.0, "four": 4.0}
    async with workers(4, slots=4, quantum_tokens=16, max_wait_s=60.0, max_waiting_per_tenant=1000) as (hub, made):

        async def one(tenant: Tenant) -> None:
            permit = await rng.choice(made).admission.admit([REQUEST], tenant)
            if sum(served.values()) < 350:
                served[tenant.name] += 1
            await asyncio.sleep(0.001)
            permit.settle(Usage(1, 10))

        tenants = [Tenant(name, weight=weight) for name, weight in weights.items()]
        many = [
            asyncio.create_task(one(tenant)) for _ in range(90) for tenant in tenants for _ in range(int(tenant.weight))
        ]
        rng.shuffle(many)
        await asyncio.gather(*many)
        await idle(hub)
    parts = [served[name] / weight for name, weight in weights.items()]
    jain = sum(parts) ** 2 / (len(parts) * sum(part**2 for part in parts))
    assert jain > 0.99, served


async def test_what_a_worker_holds_ends_with_it():
    async with workers(2, slots=4) as (hub, made):
        lost = [asyncio.create_task(made[0].run(Tenant(), 60.0)) for _ in range(8)]
        while hub.pool("").slots.running < 5:
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(made[1].run(Tenant("other")))
        made[0].link.close()
        await asyncio.wait_for(waiting, 60)
        await idle(hub)
        assert list(hub.workers) == [1]
        for task in lost:
            task.cancel()
        await asyncio.gather(*lost, return_exceptions=True)


async def test_what_a_worker_had_reserved_counts_as_used_when_it_ends():
    async with workers(2, slots=4) as (hub, made):
        tenant = capped("acme", tokens_per_minute=1000)
        running = asyncio.create_task(made[0].run(tenant, 60.0, GenerationRequest(text_input="x", max_tokens=500)))
        while hub.pool("").slots.running < 1:
            await asyncio.sleep(0.001)
        bucket = hub.budgets._buckets["tokens:acme"]
        assert bucket.held > 500
        made[0].link.close()
        while 0 in hub.workers:
            await asyncio.sleep(0.001)
        assert not bucket.held and bucket.balance < 500
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_reservation_that_is_granted_after_its_worker_ended_holds_nothing(monkeypatch):
    async with workers(1) as (hub, made):
        reserve, asked, gone = hub.budgets.reserve, asyncio.Event(), asyncio.Event()

        async def late(*parts):
            asked.set()
            await gone.wait()
            return await reserve(*parts)

        monkeypatch.setattr(hub.budgets, "reserve", late)
        running = asyncio.create_task(made[0].run(capped("acme", tokens_per_minute=1000)))
        await asked.wait()
        made[0].link.close()
        while hub.workers:
            await asyncio.sleep(0.001)
        gone.set()
        while hub.reserving:
            await asyncio.sleep(0.001)
        bucket = hub.budgets._buckets["tokens:acme"]
        assert not bucket.held and bucket.balance == 1000
        await asyncio.gather(running, return_exceptions=True)


async def test_a_caller_that_leaves_at_any_moment_leaves_nothing_behind():
    rng = random.Random(1)
    async with workers(2, slots=2, max_in_flight_of_class={"1": 30}) as (hub, made):
        tenant = capped("acme", max_in_flight=20, tokens_per_minute=1_000_000)
        callers = [asyncio.create_task(made[n % 2].run(tenant, 0.001)) for n in range(200)]
        while not all(caller.done() for caller in callers):
            rng.choice(callers).cancel()
            await asyncio.sleep(0.0005)
        await asyncio.gather(*callers, return_exceptions=True)
        await idle(hub)
        assert not hub.budgets._buckets["tokens:acme"].held


async def test_queue_bounds_and_deadlines_name_their_reason_and_when_to_come_back():
    async with workers(2, slots=1, max_waiting_per_tenant=1, max_wait_s=0.05) as (hub, made):
        callers = [asyncio.create_task(made[n % 2].run(Tenant(), 0.5)) for n in range(6)]
        ends = await asyncio.gather(*callers, return_exceptions=True)
        by_reason = Counter((type(end), end.reason) for end in ends if end is not None)
        assert by_reason == {(Overloaded, "queue"): 3, (DeadlineExceeded, "deadline"): 1}
        assert all(end.retry_after_s for end in ends if end is not None)


async def test_workers_tell_each_other():
    async with workers(3) as (hub, made):
        heard: list = []
        for number, worker in enumerate(made):
            worker.link.topics["news"] = lambda message, number=number: heard.append((number, message))
        made[1].link.publish("news", {"a": 1})
        while len(heard) < 2:
            await asyncio.sleep(0.001)
        assert sorted(number for number, _ in heard) == [0, 2]


async def test_other_gateways_requests_are_told_from_our_own():
    async with workers(2, slots=8) as (hub, made):
        permits = [await made[n % 2].admission.admit([REQUEST], Tenant()) for n in range(4)]
        pool = hub.pool("")
        for _ in range(5):
            pool.report(0, capacity(8, 0), 4)
            pool.report(1, capacity(8, 0), 4)
        assert pool.capacity().others == 0
        for _ in range(10):
            pool.report(0, capacity(8, 0), 8)
        assert 3 < pool.capacity().others <= 4
        for permit in permits:
            permit.settle(None)
