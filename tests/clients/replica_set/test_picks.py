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

from clients.replica_set import picks
from clients.replica_set.picks import ReplicaLoad, RoutingRequest
from contract.errors import Unavailable

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "picks.json").read_text())


def fleet(*outstanding: int) -> list[ReplicaLoad]:
    return [ReplicaLoad(f"r{n}", outstanding=count) for n, count in enumerate(outstanding)]


def chosen(
    pick: picks.Pick, loads: list[ReplicaLoad], count: int = 1000, request: RoutingRequest | None = None
) -> Counter:
    """How often each replica is picked with these loads, the loads unchanged."""
    rng = random.Random(1)
    return Counter(pick(loads, request or RoutingRequest(turn), rng).name for turn in range(count))


@pytest.mark.parametrize("vector", VECTORS, ids=[f"{n}-{vector['pick']}" for n, vector in enumerate(VECTORS)])
def test_a_pick_decides_as_it_was_recorded_to(vector: dict) -> None:
    """A change of any of these is a change of behaviour: every client in the field would route differently."""
    loads = [ReplicaLoad(**load) for load in vector["loads"]]
    picked = picks.BY_NAME[vector["pick"]](loads, RoutingRequest(**vector["ask"]), random.Random(vector["seed"]))
    assert picked.name == vector["picked"]


def test_the_vectors_cover_every_pick() -> None:
    assert {vector["pick"] for vector in VECTORS} == set(picks.BY_NAME)


def test_a_key_may_hold_what_json_can_hold() -> None:
    request = RoutingRequest(prefix=json.loads('"\\ud800"'))
    assert len(chosen(picks.prefix_affinity, fleet(0, 0), 9, request)) == 1


def test_round_robin_gives_each_its_turn_whatever_the_load() -> None:
    assert chosen(picks.round_robin, fleet(9, 0, 0)) == {"r0": 334, "r1": 333, "r2": 333}


def test_least_outstanding_takes_the_least_and_breaks_ties_evenly() -> None:
    assert set(chosen(picks.least_outstanding, fleet(3, 1, 2))) == {"r1"}
    shares = chosen(picks.least_outstanding, fleet(1, 1, 5, 1))
    assert set(shares) == {"r0", "r1", "r3"} and min(shares.values()) > 280


def test_least_outstanding_is_not_stuck_on_one_when_its_loads_are_kept_up_to_date() -> None:
    counts, rng = [0, 0, 0], random.Random(0)
    for _ in range(999):
        counts[int(picks.least_outstanding(fleet(*counts), RoutingRequest(), rng).name[1])] += 1
    assert counts == [333, 333, 333]


def test_power_of_two_choices_never_takes_the_busiest_and_often_not_the_idlest() -> None:
    shares = chosen(picks.power_of_two_choices, fleet(0, 1, 2, 3))
    assert shares["r3"] == 0
    # The idlest is among two of four drawn with probability 1/2.
    assert shares["r0"] == pytest.approx(500, abs=60)


def test_token_aware_counts_work_not_requests() -> None:
    busy = ReplicaLoad("busy", outstanding=1, pending_tokens=5000)
    many = ReplicaLoad("many", outstanding=9, pending_tokens=900)
    assert picks.token_aware([busy, many], RoutingRequest(), random.Random(0)) is many
    assert picks.least_outstanding([busy, many], RoutingRequest(), random.Random(0)) is busy


def test_token_aware_books_what_it_routes_so_that_equal_replicas_get_equal_shares() -> None:
    pending, rng = {"r0": 0, "r1": 0, "r2": 0}, random.Random(0)
    shares: Counter = Counter()
    for _ in range(3000):
        loads = [ReplicaLoad(name, pending_tokens=tokens) for name, tokens in pending.items()]
        name = picks.token_aware(loads, RoutingRequest(), rng).name
        pending[name] += 100
        shares[name] += 1
    assert set(shares.values()) == {1000}


@pytest.mark.parametrize("name", picks.BY_NAME)
def test_no_pick_takes_an_unhealthy_replica_while_there_is_a_healthy_one(name: str) -> None:
    loads = [dataclasses.replace(load, healthy=n == 3) for n, load in enumerate(fleet(0, 0, 0, 9))]
    assert set(chosen(picks.BY_NAME[name], loads, 50, RoutingRequest(session="s", prefix="p"))) == {"r3"}


@pytest.mark.parametrize("name", picks.BY_NAME)
def test_if_none_is_healthy_all_are_tried_and_if_there_is_none_it_is_said(name: str) -> None:
    sick = [dataclasses.replace(load, healthy=False) for load in fleet(1, 2)]
    assert picks.BY_NAME[name](sick, RoutingRequest(), random.Random(0)) in sick
    with pytest.raises(Unavailable, match="no replica is known"):
        picks.BY_NAME[name]([], RoutingRequest(), random.Random(0))


@pytest.mark.parametrize("name", picks.BY_NAME)
@given(outstanding=st.lists(st.integers(0, 50), min_size=1, max_size=9), seed=st.integers(0, 99))
def test_a_pick_is_one_of_the_replicas_and_the_same_for_the_same_chance(name, outstanding, seed) -> None:
    loads, request = fleet(*outstanding), RoutingRequest(seed, f"s{seed}", f"p{seed}")
    first = picks.BY_NAME[name](loads, request, random.Random(seed))
    assert first in loads
    assert picks.BY_NAME[name](list(reversed(loads)), request, random.Random(seed)).outstanding in outstanding
    assert picks.BY_NAME[name](loads, request, random.Random(seed)) is first


def test_what_the_metrics_show_counts_if_it_is_more_than_ours() -> None:
    loads = [ReplicaLoad("a", running=5, waiting=2, outstanding=1), ReplicaLoad("b", outstanding=6)]
    assert picks.least_outstanding(loads, RoutingRequest(), random.Random(0)).name == "b"


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
    pick, request = picks.session_affinity, RoutingRequest(session="one")
    home = picks.rendezvous("one", fleet(0, 0, 0))[0].name
    for outstanding in ((0, 0, 0), (4, 4, 4), (10, 10, 10)):
        assert set(chosen(pick, fleet(*outstanding), 20, request)) == {home}


@given(st.lists(st.integers(0, 30), min_size=2, max_size=8), st.floats(1.05, 3), st.text(min_size=1, max_size=5))
def test_affinity_never_exceeds_its_bound_on_the_mean_load(outstanding: list[int], bound: float, key: str) -> None:
    loads = fleet(*outstanding)
    picked = picks.home(key, loads, bound)
    assert picked.outstanding + 1 <= math.ceil(bound * (sum(outstanding) + 1) / len(outstanding))


def test_without_a_session_or_prefix_load_decides() -> None:
    for pick in (picks.session_affinity, picks.prefix_affinity):
        assert set(chosen(pick, fleet(5, 0), 20)) == {"r1"}


def sized(slots: list[int], outstanding: list[int], tokens: list[int] | None = None) -> list[ReplicaLoad]:
    return [
        ReplicaLoad(f"r{n}", max_running=own, outstanding=count, pending_tokens=(tokens or [0] * len(slots))[n])
        for n, (own, count) in enumerate(zip(slots, outstanding, strict=True))
    ]


def placed(
    pick: picks.Pick, slots: list[int], requests: int, lasting: int, seed: int = 0
) -> tuple[list[int], list[int]]:
    """(requests that each replica got, most it had at once) of ``requests`` of 100 tokens, of which ``lasting`` are
    under way at once; which one ends next is chance."""
    rng, counts, total = random.Random(seed), [0] * len(slots), [0] * len(slots)
    most, under_way = [0] * len(slots), []
    for turn in range(requests):
        if len(under_way) >= lasting:
            counts[under_way.pop(rng.randrange(len(under_way)))] -= 1
        loads = sized(slots, counts, [100 * count for count in counts])
        place = int(pick(loads, RoutingRequest(turn, f"s{turn}", f"p{turn}"), rng).name[1:])
        under_way.append(place)
        counts[place] += 1
        total[place] += 1
        most[place] = max(most[place], counts[place])
    return total, most


IN_PROPORTION = ("round_robin", "least_outstanding", "power_of_two_choices", "token_aware", "session_affinity")


@pytest.mark.parametrize("name", IN_PROPORTION)
@pytest.mark.parametrize("slots", [[8, 64], [4, 8, 16], [1, 1, 1, 30], [16, 16, 20]], ids=str)
@pytest.mark.parametrize("fill", [0.0, 0.1, 0.5, 0.9], ids=str)
def test_shares_are_in_proportion_to_capacity_under_any_load(name: str, slots: list[int], fill: float) -> None:
    lasting = max(1, round(fill * sum(slots)))
    total, _ = placed(picks.BY_NAME[name], slots, 500, lasting)
    half_a_request = 0.5 / lasting if lasting > 1 else 0.0  # requests under way are whole ones
    for got, own in zip(total, slots, strict=True):
        assert got / 500 == pytest.approx(own / sum(slots), rel=0.3, abs=max(0.03, half_a_request))


@given(st.lists(st.integers(1, 64), min_size=2, max_size=6), st.floats(0.1, 1.0), st.integers(0, 99))
def test_no_request_waits_where_another_has_a_free_slot(slots: list[int], fill: float, seed: int) -> None:
    burst = max(1, int(fill * sum(slots)))
    for name in ("least_outstanding", "token_aware"):
        _, most = placed(picks.BY_NAME[name], slots, burst, burst, seed)
        assert all(count <= own for count, own in zip(most, slots, strict=True))


def test_a_burst_of_sixty_is_shared_by_eight_and_sixty_four_slots_as_they_are() -> None:
    for name in ("least_outstanding", "token_aware"):
        total, _ = placed(picks.BY_NAME[name], [8, 64], 60, 60)
        assert total[0] in (6, 7)


def test_unknown_capacity_counts_as_the_mean_of_the_known() -> None:
    assert picks.slot_capacities(sized([0, 0], [3, 3])) == [1.0, 1.0]
    assert picks.slot_capacities(sized([8, 0, 16], [0, 0, 0])) == [8.0, 12.0, 16.0]
    total, _ = placed(picks.least_outstanding, [0, 0, 0], 999, 30)
    assert max(total) - min(total) < 60


def test_a_replica_that_is_twice_as_fast_has_twice_the_tokens_pending() -> None:
    pending, rng = {"slow": 0, "fast": 0}, random.Random(0)
    for _ in range(300):
        loads = [
            ReplicaLoad(
                name, max_running=64, tokens_per_s=rate, pending_tokens=pending[name], outstanding=pending[name]
            )
            for name, rate in (("slow", 500.0), ("fast", 1000.0))
        ]
        pending[picks.token_aware(loads, RoutingRequest(), rng).name] += 1
    assert pending == {"slow": 100, "fast": 200}
    loads[0] = dataclasses.replace(loads[0], tokens_per_s=0.0)  # as long as one is not measured slots decide
    assert picks.token_capacities(loads) == [64.0, 64.0]


@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(0, 64)), min_size=2, max_size=8),
    st.floats(1.05, 3),
    st.text(min_size=1, max_size=5),
)
def test_the_affinity_bound_is_on_the_share_that_capacity_gives(replicas, bound: float, key: str) -> None:
    slots, outstanding = map(list, zip(*replicas, strict=True))
    picked = picks.home(key, sized(slots, outstanding), bound)
    share = picked.max_running / sum(slots)
    assert picked.outstanding + 1 <= math.ceil(bound * (sum(outstanding) + 1) * share + 1e-9)


def test_keys_are_spread_by_capacity_and_round_robin_takes_turns_evenly() -> None:
    loads = sized([8, 24], [0, 0])
    homes = Counter(picks.rendezvous(f"conversation-{n}", loads)[0].name for n in range(4000))
    assert homes["r0"] == pytest.approx(1000, rel=0.1)
    turns = [picks.round_robin(loads, RoutingRequest(turn), random.Random(0)).name for turn in range(400)]
    assert turns.count("r0") == 100 and "r0" in turns[:4] and turns[:8].count("r0") == 2


def test_a_replica_without_metrics_yet_is_idle_and_healthy_and_of_unknown_capacity():
    load = ReplicaLoad("a:8001")
    assert (load.running, load.waiting, load.kv_usage, load.outstanding) == (0, 0, 0.0, 0)
    assert load.healthy and (load.max_running, load.tokens_per_s) == (0, 0.0)


def test_a_snapshot_stays_what_it_was():
    load = ReplicaLoad("a:8001", running=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        load.running = 4
    assert dataclasses.replace(load, running=4) != load == ReplicaLoad("a:8001", running=3)
