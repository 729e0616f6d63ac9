"""One replica: its health, its reserved work, and the end of a request there."""

from __future__ import annotations

import asyncio

import pytest

from clients.replica_set.replica import HealthPolicy, Replica
from clients.wire.connection import Connection
from contract.errors import EngineFailed, Overloaded, Unavailable


def replica() -> Replica:
    return Replica(Connection("127.0.0.1:1"), HealthPolicy(fail_after=2, recover_after=2))


async def test_its_load_shows_health_and_reserved_work():
    one = replica()
    assert one.load().healthy is False  # not checked yet
    one.observe(True)
    one.work.reserve(7.0)
    load = one.load()
    assert (load.name, load.healthy, load.outstanding, load.pending_tokens) == ("127.0.0.1:1", True, 1, 7)


@pytest.mark.parametrize(
    ("error", "healthy"), [(Unavailable("x"), False), (EngineFailed("x"), True), (Overloaded("x"), True)]
)
async def test_only_an_unavailable_replica_loses_its_health_by_requests(error, healthy: bool):
    one = replica()
    one.observe(True)
    for _ in range(2):
        one.ended(error, 0.0)
    assert one.health.healthy is healthy


async def test_it_closes_when_its_last_request_has_ended_and_its_tasks_are_cancelled():
    one = replica()
    task = asyncio.create_task(asyncio.sleep(3600))
    one.watch(task)
    one.work.reserve(1.0)
    closing = asyncio.create_task(one.close_when_idle())
    await asyncio.sleep(0)
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled() and not closing.done()
    one.work.release()
    await asyncio.wait_for(closing, 30)
