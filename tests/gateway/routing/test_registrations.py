"""Replicas that register: their leases, what routing may pick, and no state that a lost beat leaves behind."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import Overloaded, Unavailable
from gateway.routing import registrations
from gateway.routing.registrations import Registered, Registration, Registrations


class Pools:
    """What routing may pick, as the calls tell it."""

    def __init__(self) -> None:
        self.picked: set[tuple[str, str]] = set()
        self.registrations = Registrations(
            lambda pool, url: self.picked.add((pool, url)), lambda pool, url: self.picked.discard((pool, url))
        )

    def put(self, name: str, port: int = 1, **fields) -> None:
        self.registrations.put(name, Registration(address=f"h:{port}", **fields))


@pytest.fixture
def leases(monkeypatch):
    """Leases of any length, so that no test waits for a second."""
    monkeypatch.setattr(registrations, "GRACE_S", 0.01)
    return lambda address, lease_s, **fields: Registration.model_construct(
        **Registration(address=address, **fields).model_dump() | {"lease_s": lease_s}
    )


async def test_only_a_ready_one_gets_requests():
    pools = Pools()
    for state, picked in (("starting", set()), ("ready", {("", "h:1")}), ("draining", set()), ("ready", {("", "h:1")})):
        pools.put("a", state=state)
        assert pools.picked == picked, state
    assert pools.registrations.withdraw("a") and not pools.picked
    assert not pools.registrations.withdraw("a")


async def test_a_lease_ends_unless_it_is_renewed(leases):
    pools = Pools()
    for _ in range(10):
        pools.registrations.put("a", leases("h:1", 0.05))
        pools.registrations.put("once", leases("h:2", 0.05)) if not pools.picked else None
        await asyncio.sleep(0.015)
    assert pools.picked == {("", "h:1")}
    await asyncio.sleep(0.15)
    assert not pools.picked and not pools.registrations.entries()


async def test_a_gateway_that_stood_still_reads_the_beats_before_it_forgets_replicas(leases, monkeypatch):
    monkeypatch.setattr(registrations, "GRACE_S", 0.1)
    pools = Pools()
    pools.registrations.put("a", leases("h:1", 0.02))
    await asyncio.sleep(0.06)
    assert pools.picked == {("", "h:1")}
    pools.registrations.put("a", leases("h:1", 30.0))
    await asyncio.sleep(0.12)
    assert pools.picked == {("", "h:1")}
    pools.registrations.close()


async def test_a_change_of_pool_or_address_leaves_the_old_one():
    pools = Pools()
    pools.put("a", 1, pool="stable")
    pools.put("a", 1, pool="canary")
    assert pools.picked == {("canary", "h:1")}
    pools.put("a", 2, pool="canary")
    assert pools.picked == {("canary", "h:2")}
    pools.put("b", 2, pool="canary")  # a new process at the address of a killed one
    assert [entry["name"] for entry in pools.registrations.entries()] == ["b"]
    pools.registrations.close()


async def test_their_number_is_bounded(monkeypatch):
    monkeypatch.setattr(registrations, "MAX_REGISTERED", 2)
    pools = Pools()
    pools.put("a", 1)
    pools.put("b", 2)
    with pytest.raises(Overloaded, match="2 replicas"):
        pools.put("c", 3)
    pools.put("b", 2)
    pools.registrations.close()


async def test_those_that_start_are_told_with_the_time_that_is_left():
    pools = Pools()
    pools.put("a", 1, state="starting", expected_s=30)
    pools.put("b", 2, state="starting")
    known, unknown = pools.registrations.starting("")
    assert 29 < known <= 30 and unknown is None
    assert not pools.registrations.starting("other") and not pools.picked
    pools.registrations.close()


class Source:
    refresh_s = 7.0

    def __init__(self, *urls: str) -> None:
        self.urls = urls

    async def replicas(self):
        if not self.urls:
            raise Unavailable("the name does not resolve")
        return self.urls


async def test_a_list_and_registrations_make_one_set():
    pools, source = Pools(), Source("h:1", "h:9")
    both = Registered(source, pools.registrations, "")
    assert both.refresh_s == 7.0
    pools.put("a", 1)
    pools.put("b", 2)
    pools.put("c", 3, pool="other")
    assert await both.replicas() == ("h:1", "h:2", "h:9")
    pools.registrations.withdraw("a")  # although the list names it
    assert await both.replicas() == ("h:2", "h:9")
    pools.put("a", 1, state="starting")
    assert await both.replicas() == ("h:2", "h:9")
    pools.put("a", 1)
    assert await both.replicas() == ("h:1", "h:2", "h:9")
    source.urls = ()  # the list of before serves on
    assert await both.replicas() == ("h:1", "h:2", "h:9")
    pools.registrations.close()


async def test_a_source_that_fails_is_told_while_nothing_has_registered():
    pools = Pools()
    both = Registered(Source(), pools.registrations, "")
    with pytest.raises(Unavailable, match="resolve"):
        await both.replicas()
    pools.put("a", 1)
    assert await both.replicas() == ("h:1",)
    pools.registrations.close()


NAMES = st.sampled_from("abcd")
ACTIONS = st.one_of(
    st.tuples(
        st.just("put"), NAMES, st.integers(1, 3), st.sampled_from(["p", "q"]),
        st.sampled_from(["starting", "ready", "draining"]),
    ),
    st.tuples(st.just("withdraw"), NAMES),
)  # fmt: skip


@given(st.lists(ACTIONS, max_size=25))
def test_what_is_picked_is_always_what_is_registered_as_ready(actions):
    async def run() -> None:
        pools = Pools()
        for kind, name, *rest in actions:
            if kind == "put":
                port, pool, state = rest
                pools.put(name, port, pool=pool, state=state)
            else:
                pools.registrations.withdraw(name)
            entries = pools.registrations.entries()
            ready = {(entry["pool"], entry["address"]) for entry in entries if entry["state"] == "ready"}
            assert pools.picked == ready
            assert ready == {(pool, url) for pool in "pq" for url in pools.registrations.replicas(pool, ())}
            assert len({entry["address"] for entry in entries}) == len(entries)
        pools.registrations.close()
        assert not pools.registrations.entries()

    asyncio.run(run())
