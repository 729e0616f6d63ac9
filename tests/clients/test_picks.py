"""Picks on recorded vectors, by hand, and by law."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients import picks
from clients.picks import Ask
from contract.errors import InvalidArgument, Unavailable
from contract.load import ReplicaLoad

VECTORS = json.loads((Path(__file__).parent / "vectors" / "picks.json").read_text())


def fleet(*outstanding: int) -> list[ReplicaLoad]:
    return [ReplicaLoad(f"r{n}", outstanding=count) for n, count in enumerate(outstanding)]


def chosen(pick: picks.Pick, loads: list[ReplicaLoad], count: int = 1000, ask: Ask | None = None) -> Counter:
    """How often each replica is picked with these loads, the loads unchanged."""
    rng = random.Random(1)
    return Counter(pick(loads, ask or Ask(turn), rng).name for turn in range(count))


@pytest.mark.parametrize("vector", VECTORS, ids=[f"{n}-{vector['pick']}" for n, vector in enumerate(VECTORS)])
def test_a_pick_decides_as_it_was_recorded_to(vector: dict) -> None:
    """A change of any of these is a change of behaviour: every client in the field would route differently."""
    loads = [ReplicaLoad(**load) for load in vector["loads"]]
    picked = picks.BY_NAME[vector["pick"]](loads, Ask(**vector["ask"]), random.Random(vector["seed"]))
    assert picked.name == vector["picked"]


def test_the_vectors_cover_every_pick() -> None:
    assert {vector["pick"] for vector in VECTORS} == set(picks.BY_NAME)


def test_round_robin_gives_each_its_turn_whatever_the_load() -> None:
    assert chosen(picks.round_robin, fleet(9, 0, 0)) == {"r0": 334, "r1": 333, "r2": 333}


def test_least_outstanding_takes_the_least_and_breaks_ties_evenly() -> None:
    assert set(chosen(picks.least_outstanding, fleet(3, 1, 2))) == {"r1"}
    shares = chosen(picks.least_outstanding, fleet(1, 1, 5, 1))
    assert set(shares) == {"r0", "r1", "r3"} and min(shares.values()) > 280


def test_least_outstanding_is_not_stuck_on_one_when_its_loads_are_kept_up_to_date() -> None:
    counts, rng = [0, 0, 0], random.Random(0)
    for _ in range(999):
        counts[int(picks.least_outstanding(fleet(*counts), Ask(), rng).name[1])] += 1
    assert counts == [333, 333, 333]


def test_power_of_two_choices_never_takes_the_busiest_and_often_not_the_idlest() -> None:
    shares = chosen(picks.power_of_two_choices, fleet(0, 1, 2, 3))
    assert shares["r3"] == 0
    # The idlest is among two of four drawn with probability 1/2.
    assert shares["r0"] == pytest.approx(500, abs=60)


def test_token_aware_counts_work_not_requests() -> None:
    busy = ReplicaLoad("busy", outstanding=1, pending_tokens=5000)
    many = ReplicaLoad("many", outstanding=9, pending_tokens=900)
    assert picks.token_aware([busy, many], Ask(), random.Random(0)) is many
    assert picks.least_outstanding([busy, many], Ask(), random.Random(0)) is busy


def test_token_aware_books_what_it_routes_so_that_equal_replicas_get_equal_shares() -> None:
    pending, rng = {"r0": 0, "r1": 0, "r2": 0}, random.Random(0)
    shares: Counter = Counter()
    for _ in range(3000):
        loads = [ReplicaLoad(name, pending_tokens=tokens) for name, tokens in pending.items()]
        name = picks.token_aware(loads, Ask(), rng).name
        pending[name] += 100
        shares[name] += 1
    assert set(shares.values()) == {1000}


@pytest.mark.parametrize("name", picks.BY_NAME)
def test_no_pick_takes_an_unhealthy_replica_while_there_is_a_healthy_one(name: str) -> None:
    loads = [dataclasses.replace(load, healthy=n == 3) for n, load in enumerate(fleet(0, 0, 0, 9))]
    assert set(chosen(picks.BY_NAME[name], loads, 50, Ask(session="s", prefix="p"))) == {"r3"}


@pytest.mark.parametrize("name", picks.BY_NAME)
def test_if_none_is_healthy_all_are_tried_and_if_there_is_none_it_is_said(name: str) -> None:
    sick = [dataclasses.replace(load, healthy=False) for load in fleet(1, 2)]
    assert picks.BY_NAME[name](sick, Ask(), random.Random(0)) in sick
    with pytest.raises(Unavailable, match="no replica is known"):
        picks.BY_NAME[name]([], Ask(), random.Random(0))


@pytest.mark.parametrize("name", picks.BY_NAME)
@given(outstanding=st.lists(st.integers(0, 50), min_size=1, max_size=9), seed=st.integers(0, 99))
def test_a_pick_is_one_of_the_replicas_and_the_same_for_the_same_chance(name, outstanding, seed) -> None:
    loads, ask = fleet(*outstanding), Ask(seed, f"s{seed}", f"p{seed}")
    first = picks.BY_NAME[name](loads, ask, random.Random(seed))
    assert first in loads
    assert picks.BY_NAME[name](list(reversed(loads)), ask, random.Random(seed)).outstanding in outstanding
    assert picks.BY_NAME[name](loads, ask, random.Random(seed)) is first


def test_what_the_metrics_show_counts_if_it_is_more_than_ours() -> None:
    loads = [ReplicaLoad("a", running=5, waiting=2, outstanding=1), ReplicaLoad("b", outstanding=6)]
    assert picks.least_outstanding(loads, Ask(), random.Random(0)).name == "b"


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_when_a_replica_leaves_only_its_own_conversations_move(replicas: int) -> None:
    loads, keys = fleet(*[0] * replicas), [f"conversation-{n}" for n in range(4000)]
    before = {key: picks.rendezvous(key, loads)[0].name for key in keys}
    after = {key: picks.rendezvous(key, loads[:-1])[0].name for key in keys}
    moved = [key for key in keys if before[key] != after[key]]
    assert all(before[key] == loads[-1].name for key in moved)
    assert len(moved) == pytest.approx(len(keys) / replicas, rel=0.15)
    shares = Counter(before.values())
    assert max(shares.values()) < 1.15 * len(keys) / replicas


def test_a_conversation_stays_where_it_is_while_the_others_are_no_emptier() -> None:
    pick, ask = picks.session_affinity(), Ask(session="one")
    home = picks.rendezvous("one", fleet(0, 0, 0))[0].name
    for outstanding in ((0, 0, 0), (4, 4, 4), (10, 10, 10)):
        assert set(chosen(pick, fleet(*outstanding), 20, ask)) == {home}


@given(st.lists(st.integers(0, 30), min_size=2, max_size=8), st.floats(1.05, 3), st.text(min_size=1, max_size=5))
def test_affinity_never_exceeds_its_bound_on_the_mean_load(outstanding: list[int], bound: float, key: str) -> None:
    loads = fleet(*outstanding)
    picked = picks.session_affinity(bound)(loads, Ask(session=key), random.Random(0))
    assert picked.outstanding + 1 <= math.ceil(bound * (sum(outstanding) + 1) / len(outstanding))


def test_without_a_session_or_prefix_load_decides() -> None:
    for pick in (picks.session_affinity(), picks.prefix_affinity()):
        assert set(chosen(pick, fleet(5, 0), 20)) == {"r1"}
    assert set(chosen(picks.prefix_affinity(otherwise=picks.round_robin), fleet(5, 0), 20)) == {"r0", "r1"}


def test_a_bound_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="bound: got 1.0; allowed is more than 1"):
        picks.session_affinity(1.0)
