"""What a worker shows of the shared state; the shared state itself is tested in test_hub.py."""

import asyncio
import random
import socket
from pathlib import Path

import pytest

from contract.errors import Unavailable
from gateway.admission.hub import Hub
from gateway.admission.hub_link import Frames, HubLink, SharedBudgets, SharedCaps
from gateway.admission.sharing import capacity
from gateway.config.tenant import Level, Limits, Tenant
from tests.gateway.admission.test_hub import REQUEST, workers


async def test_every_worker_shows_the_load_of_all():
    async with workers(2, slots=4) as (hub, made):
        permits = [await made[0].admission.admit([REQUEST], Tenant("a")) for _ in range(5)]
        waiting = asyncio.create_task(made[0].run(Tenant("b")))
        other = made[1].admission
        while not (other.slots().waiting and other.running):
            await asyncio.sleep(0.005)
        slots = other.slots()
        assert (slots.running, slots.capacity.slots, slots.capacity.limit) == (5, 4, 5)
        assert slots.queue.by_class == {1: 1} and slots.queue.by_tenant == {"b": 1} and slots.queue.backlog_tokens > 0
        assert other.pressure(Tenant("b")) == pytest.approx(1 / slots.queue.rules.max_waiting_per_tenant, abs=0.01)
        assert slots.retry_after_s(random.Random()) > 0 and not slots.is_short_wait("b", 10)
        for permit in permits:
            permit.settle(None)
        await waiting


async def test_slots_are_reported_at_once_and_requests_every_second():
    own, end = socket.socketpair()
    link = HubLink(0, end, Path())
    sent = []
    link.frames.send = lambda *message: sent.append(message)
    reported: dict = {}
    link.reported = lambda: reported
    for now_s, load in ((10.0, (4, 1)), (10.2, (4, 3)), (10.4, (8, 3)), (10.6, (8, 9)), (11.1, (8, 5))):
        reported = {"": (capacity(load[0], 0), load[1])}
        link.check(now_s)
    assert [(message[2].slots, message[3]) for message in sent] == [(4, 1), (8, 3), (8, 5)]
    own.close()
    end.close()


async def test_without_the_parent_requests_are_refused_and_the_worker_is_told():
    hub, lost = Hub(10, 1.0), asyncio.Event()
    own, end = socket.socketpair()
    link = HubLink(0, end, Path())
    link.lost = lost.set
    await link.start()
    caps = SharedCaps(link)
    asking = asyncio.create_task(caps.acquire((), 1))
    await asyncio.sleep(0)
    own.close()
    with pytest.raises(Unavailable, match="stopping"):
        await asyncio.wait_for(asking, 60)
    assert lost.is_set() and not hub.workers
    with pytest.raises(Unavailable):
        await asyncio.wait_for(caps.acquire((), 1), 60)


async def test_what_has_no_budget_asks_nobody():
    own, end = socket.socketpair()
    budgets = SharedBudgets(HubLink(0, end, Path()))
    reservation = await budgets.reserve((Level("acme", Limits(max_in_flight=3)),), 100)
    assert reservation.granted
    budgets.settle(reservation, 5)
    await budgets.aclose()
    own.close()
    end.close()


async def test_what_others_publish_while_a_worker_starts_does_not_end_it():
    async with workers(2) as (hub, made):
        heard = asyncio.Queue()
        made[1].link.topics["last"] = heard.put_nowait
        for topic in ("register", "early", "last"):
            made[0].link.publish(topic, "early")
        assert await asyncio.wait_for(heard.get(), 60) == "early"
        made[1].link.topics["register"] = heard.put_nowait
        made[0].link.publish("register", "late")
        assert await asyncio.wait_for(heard.get(), 60) == "late"
        assert made[1].link.frames.open


async def test_messages_arrive_whole_and_in_order_and_the_end_is_told():
    one, other = socket.socketpair()
    received: list = []
    lost = asyncio.Event()
    sender, receiver = (
        Frames(lambda *parts: None, lambda: None),
        Frames(lambda *parts: received.append(parts), lost.set),
    )
    await sender.connect(one)
    await receiver.connect(other)
    sent = [("kind", number, "x" * 100_000) for number in range(20)]
    for message in sent:
        sender.send(*message)
    sender.close()
    await asyncio.wait_for(lost.wait(), 60)
    assert received == sent
    receiver.send("nobody reads this")
