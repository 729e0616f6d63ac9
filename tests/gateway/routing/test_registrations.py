"""Replicas that register: their leases, what routing may pick, and no state that a lost beat leaves behind."""

from __future__ import annotations

import time

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

    def pass_time(self, *seconds: float) -> None:
        """Check so many seconds from now, one after the other."""
        now_s = time.monotonic()
        for later_s in seconds:
            self.registrations.check(now_s + later_s)


def test_only_a_ready_one_gets_requests():
    pools = Pools()
    for state, picked in (("starting", set()), ("ready", {("", "h:1")}), ("draining", set()), ("ready", {("", "h:1")})):
        pools.put("a", state=state)
        assert pools.picked == picked, state
    assert pools.registrations.withdraw("a") and not pools.picked
    assert not pools.registrations.withdraw("a")


def test_a_lease_ends_unless_it_is_renewed():
    pools = Pools()
    pools.put("a", 1, lease_s=3)
    pools.put("b", 2, lease_s=10)
    pools.pass_time(0, 1, 2, 2.9)
    assert len(pools.picked) == 2
    pools.pass_time(3.1)
    assert pools.picked == {("", "h:2")} and len(pools.registrations.entries()) == 1


def test_a_gateway_that_stood_still_reads_the_beats_before_it_forgets_replicas():
    pools = Pools()
    pools.put("a", 1, lease_s=3)
    pools.pass_time(0, 60)
    assert pools.picked == {("", "h:1")}
    pools.pass_time(61)
    assert not pools.picked


def test_a_change_of_pool_leaves_the_old_one_and_a_new_process_replaces_a_killed_one():
    pools = Pools()
    pools.put("a", 1, pool="stable")
    pools.put("a", 1, pool="canary")
    assert pools.picked == {("canary", "h:1")}
    pools.put("b", 1, pool="canary")
    assert [entry["name"] for entry in pools.registrations.entries()] == ["b"]


def test_their_number_is_bounded(monkeypatch):
    monkeypatch.setattr(registrations, "MAX_REGISTERED", 2)
    pools = Pools()
    pools.put("a", 1)
    pools.put("b", 2)
    with pytest.raises(Overloaded, match="2 replicas"):
        pools.put("c", 3)
    pools.put("b", 2)


def test_those_that_start_are_told_with_the_time_that_is_left():
    pools = Pools()
    pools.put("a", 1, state="starting", expected_s=30)
    pools.put("b", 2, state="starting")
    known, unknown = pools.registrations.starting("")
    assert 29 < known <= 30 and unknown is None
    assert not pools.registrations.starting("other") and not pools.picked


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
    pools.put("a", 1, state="draining")  # although the list names it
    assert await both.replicas() == ("h:2", "h:9")
    pools.put("a", 1, state="starting")
    assert await both.replicas() == ("h:2", "h:9")
    pools.put("a", 1)
    assert await both.replicas() == ("h:1", "h:2", "h:9")
    source.urls = ()  # the list of before serves on
    assert await both.replicas() == ("h:1", "h:2", "h:9")


async def test_a_source_that_fails_is_told_while_nothing_has_registered():
    pools = Pools()
    both = Registered(Source(), pools.registrations, "")
    with pytest.raises(Unavailable, match="resolve"):
        await both.replicas()
    pools.put("a", 1)
    assert await both.replicas() == ("h:1",)


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
    pools.pass_time(0, 1, 2, 3.1)
    assert not pools.picked and not pools.registrations.entries()


def test_what_another_process_knows_is_taken_over_with_its_age_and_does_not_replace_what_was_heard():
    one, other = Pools(), Pools()
    one.put("a", 1, lease_s=3)
    one.put("b", 2, state="starting")
    other.put("c", 1, state="draining")
    other.registrations.learn(one.registrations.known())
    assert not other.picked and [entry["name"] for entry in other.registrations.entries()] == ["b", "c"]
    third = Pools()
    third.registrations.learn(one.registrations.known())
    assert third.picked == {("", "h:1")}
    third.pass_time(0, 1, 2, 3.1)
    assert not third.picked
