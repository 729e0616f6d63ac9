"""The set of replicas that a source names: discovered, checked, replaced and let go."""

from __future__ import annotations

import asyncio

import pytest

from clients.replica_set.replica import HealthPolicy, Replica
from clients.replica_set.replica_set import Check, ReplicaSet
from clients.wire.connection import Connection
from contract.errors import Unavailable


class Source:
    def __init__(self, *urls: str) -> None:
        self.urls, self.calls = urls, 0

    async def replicas(self) -> tuple[str, ...]:
        self.calls += 1
        if not self.urls:
            raise Unavailable("no address")
        return self.urls


def made(source: Source, checked: list[str], **options) -> ReplicaSet[Replica]:
    async def check(replica: Replica) -> None:
        checked.append(replica.url)
        replica.observe(True)

    def make(url: str) -> Replica:
        return Replica(Connection(url), HealthPolicy())

    return ReplicaSet(source, make, (Check(check, 0.01),), **options)


async def until(condition) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not become true")


async def test_replicas_are_checked_before_they_are_known_and_again_and_again():
    checked: list[str] = []
    replicas = made(Source("a:1", "b:1"), checked)
    await asyncio.gather(replicas.found(), replicas.found())
    assert sorted(checked[:2]) == ["a:1", "b:1"] and set(replicas.replicas) == {"a:1", "b:1"}
    await until(lambda: len(checked) >= 6)
    await replicas.close()
    before = len(checked)
    await asyncio.sleep(0.05)
    assert len(checked) == before and not replicas.replicas


async def test_a_source_without_replicas_is_asked_again_by_the_next_caller():
    source = Source()
    replicas = made(source, [])
    with pytest.raises(Unavailable, match="no address"):
        await replicas.found()
    source.urls = ("a:1",)
    await replicas.found()
    assert set(replicas.replicas) == {"a:1"}
    await replicas.close()


async def test_an_error_of_the_first_discovery_is_forgotten_when_a_later_one_finds_replicas():
    source = Source()
    replicas = made(source, [], refresh_s=0.01)
    with pytest.raises(Unavailable, match="no address"):
        await replicas.found()
    source.urls = ("a:1",)
    await until(lambda: replicas.replicas)
    await replicas.found()
    await replicas.close()


async def test_a_source_that_fails_later_changes_nothing():
    source = Source("a:1")
    replicas = made(source, [], refresh_s=0.01)
    await replicas.found()
    source.urls = ()
    calls = source.calls
    await until(lambda: source.calls > calls + 2)
    assert set(replicas.replicas) == {"a:1"}
    await replicas.close()


async def test_a_replica_that_left_finishes_its_requests():
    source = Source("a:1", "b:1")
    replicas = made(source, [], refresh_s=0.01)
    await replicas.found()
    leaving = replicas.replicas["a:1"]
    leaving.work.reserve(1.0)
    closed = asyncio.Event()
    leaving.close = lambda: closed.set() or asyncio.sleep(0)  # type: ignore[method-assign]
    replicas.change(Source("b:1", "c:1"))
    await until(lambda: set(replicas.replicas) == {"b:1", "c:1"})
    assert not closed.is_set()
    leaving.work.release()
    await asyncio.wait_for(closed.wait(), 30)
    await replicas.close()


async def test_closing_does_not_wait_for_requests_at_replicas_that_left():
    replicas = made(Source("a:1"), [])
    await replicas.found()
    replicas.replicas["a:1"].work.reserve(1.0)
    replicas.retire()
    assert not replicas.replicas
    await asyncio.wait_for(replicas.close(), 30)


async def test_a_replica_whose_check_takes_long_holds_up_no_other():
    checking = asyncio.Event()
    source = Source("a:1")

    async def check(replica: Replica) -> None:
        if replica.url == "slow:1":
            checking.set()
            await asyncio.Event().wait()

    replicas = ReplicaSet(source, lambda url: Replica(Connection(url), HealthPolicy()), (Check(check, 60),))
    await replicas.found()
    replicas.add("slow:1")
    await checking.wait()
    replicas.add("b:1")
    replicas.add("a:1")
    await until(lambda: set(replicas.replicas) == {"a:1", "b:1"})
    replicas.remove("slow:1")
    replicas.remove("b:1")
    assert set(replicas.replicas) == {"a:1"}
    replicas.add("slow:1")
    await replicas.close()


async def test_discovery_is_as_frequent_as_the_source_wants():
    source = Source("a:1")
    source.refresh_s = 0.01  # type: ignore[attr-defined]
    replicas = made(source, [])
    await replicas.found()
    source.urls = ("b:1",)
    await until(lambda: set(replicas.replicas) == {"b:1"})
    await replicas.close()
