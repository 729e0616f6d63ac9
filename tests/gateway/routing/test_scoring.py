"""Filter → Score → Pick."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.replica_set import picks
from clients.replica_set.picks import ReplicaLoad, RoutingRequest
from contract.errors import Unavailable
from gateway.routing.scoring import FILTERS, Candidate, Explanation, Router, choose_pool


def candidate(name: str, *, open_breaker: bool = False, age_s: float = 1e9, **load: object) -> Candidate:
    return Candidate(ReplicaLoad(name, **load), open_breaker, age_s)


def shares(
    router: Router, candidates: list[Candidate], request: RoutingRequest | None = None, times: int = 2000
) -> Counter:
    rng = random.Random(1)
    return Counter(router.choose(candidates, request or RoutingRequest(), rng).name for _ in range(times))


names = st.text("abcdef", min_size=1, max_size=4)
candidates = st.lists(
    st.builds(
        candidate,
        names,
        open_breaker=st.booleans(),
        age_s=st.floats(0, 100),
        healthy=st.booleans(),
        running=st.integers(0, 50),
        waiting=st.integers(0, 50),
        outstanding=st.integers(0, 50),
        pending_tokens=st.integers(0, 10_000),
        kv_usage=st.floats(0, 1),
    ),
    max_size=6,
    unique_by=lambda one: one.load.name,
)


@given(candidates, st.frozensets(names, max_size=4), names, st.integers(0, 100))
def test_only_a_fit_replica_is_chosen_and_one_is_whenever_there_is_one(found, tried, session, seed):
    fit = {one.load.name for one in found if one.load.healthy and not one.open_breaker}
    request = RoutingRequest(session=session, tried=tried)
    for router in (Router(), Router(pick=picks.token_aware)):
        if not fit:
            with pytest.raises(Unavailable):
                router.choose(found, request, random.Random(seed))
            continue
        name = router.choose(found, request, random.Random(seed)).name
        assert name in fit
        assert name not in tried or fit <= tried


def test_equal_replicas_get_equal_shares():
    found = shares(Router(), [candidate("a"), candidate("b"), candidate("c")])
    assert all(count > 550 for count in found.values()) and len(found) == 3


def test_the_less_busy_replica_is_chosen_by_its_own_page_as_by_our_books():
    assert set(shares(Router(), [candidate("a", outstanding=3), candidate("b", outstanding=2)])) == {"b"}
    assert set(shares(Router(), [candidate("a", running=9), candidate("b", outstanding=2)])) == {"b"}
    assert set(shares(Router(), [candidate("a", pending_tokens=900), candidate("b", pending_tokens=10)])) == {"b"}


def test_a_replica_with_a_queue_or_a_full_cache_is_passed_over_while_another_has_room():
    assert set(shares(Router(), [candidate("a", waiting=1), candidate("b", outstanding=30, running=30)])) == {"b"}
    assert set(shares(Router(), [candidate("a", kv_usage=0.97), candidate("b", outstanding=30)])) == {"b"}
    assert set(shares(Router(), [candidate("a", waiting=1), candidate("b", waiting=1, outstanding=5)])) == {"a"}


def test_a_session_stays_together_until_its_replica_has_more_than_its_share():
    found = [candidate(name) for name in "abcd"]
    request = RoutingRequest(session="conversation")
    home = next(iter(shares(Router(), found, request, times=1)))
    assert len(shares(Router(), found, request, times=500)) == 1
    busy = [candidate(one.load.name, outstanding=50 * (one.load.name == home)) for one in found]
    assert home not in shares(Router(), busy, request, times=500)


def test_a_new_replica_gets_its_share_little_by_little():
    router = Router(slow_start_s=30.0)
    early = shares(router, [candidate("old"), candidate("new", age_s=1.0)])
    later = shares(router, [candidate("old"), candidate("new", age_s=24.0)])
    assert 50 < early["new"] < 200 and 600 < later["new"] < 1000
    assert shares(router, [candidate("a", age_s=1.0), candidate("b", age_s=0.0)])["b"] > 800


def test_pools_are_drawn_by_weight_and_a_pool_that_is_down_is_not_drawn():
    rng, weights = random.Random(2), {"stable": 95.0, "canary": 5.0, "pinned": 0.0}
    up = dict.fromkeys(weights, True)
    drawn = Counter(choose_pool(weights, "", up, rng) for _ in range(4000))
    assert 130 < drawn["canary"] < 280 and drawn["pinned"] == 0
    assert {choose_pool(weights, "", {**up, "stable": False}, rng) for _ in range(50)} == {"canary"}
    assert choose_pool(weights, "pinned", {}, rng) == "pinned"
    sessions = [choose_pool(weights, "", up, rng, f"session {n}") for n in range(4000)]
    assert sessions == [choose_pool(weights, "", up, rng, f"session {n}") for n in range(4000)]
    assert 130 < Counter(sessions)["canary"] < 280 and "pinned" not in sessions
    more = [choose_pool({**weights, "canary": 10.0}, "", up, rng, f"session {n}") for n in range(4000)]
    moved = [(old, new) for old, new in zip(sessions, more, strict=True) if old != new]
    assert moved and set(moved) == {("stable", "canary")}
    with pytest.raises(Unavailable, match="other is not configured"):
        choose_pool(weights, "other", up, rng)


def under_load(slots: dict[str, int], requests: int, lasting: int) -> tuple[Counter, Counter]:
    """(requests that each replica got, most it had at once), with books that are up to date and pages that are not."""
    router, rng, under_way, total, most = Router(), random.Random(3), [], Counter(), Counter()
    for _ in range(requests):
        if len(under_way) >= lasting:
            under_way.pop(rng.randrange(len(under_way)))
        counts = Counter(under_way)
        found = [
            candidate(name, max_running=own, outstanding=counts[name], pending_tokens=100 * counts[name])
            for name, own in slots.items()
        ]
        name = router.choose(found, RoutingRequest(), rng).name
        under_way.append(name)
        total[name] += 1
        most[name] = max(most[name], counts[name] + 1)
    return total, most


@pytest.mark.parametrize("lasting", [1, 4, 20, 60, 72])
def test_replicas_get_work_in_proportion_to_their_slots(lasting: int):
    total, most = under_load({"small": 8, "large": 64}, 1000, lasting)
    assert total["small"] / 1000 == pytest.approx(8 / 72, abs=0.05)
    assert most["small"] <= 8 and most["large"] <= 64


def test_a_burst_finds_a_free_slot_as_long_as_there_is_one_anywhere():
    for pick in (None, *picks.BY_NAME.values()):
        router, rng, counts = Router(pick=pick), random.Random(4), {"small": 8, "large": 0}
        for turn in range(64):
            found = [candidate(name, max_running=own, outstanding=counts[name]) for name, own in SLOTS.items()]
            counts[router.choose(found, RoutingRequest(turn, "s", "p"), rng).name] += 1
        assert counts == {"small": 8, "large": 64}


SLOTS = {"small": 8, "large": 64}


def test_a_pick_says_why_if_it_is_asked():
    found = [
        candidate("a", max_running=8, outstanding=2, pending_tokens=90),
        candidate("b", max_running=8),
        candidate("c", waiting=3),
        candidate("d", healthy=False),
    ]
    why = Explanation()
    assert Router().choose(found, RoutingRequest(session="s"), random.Random(0), why).name == why.chosen
    assert why.passed_over == {"d": "not ready", "c": "no_queue"}
    assert set(why.scores) == {"a", "b"} and why.scores["b"]["least_outstanding"] == 1.0
    message = why.attributes()
    assert message["trident.route.policy"] == "scored"
    assert "a: 2/8 requests, 90 tokens, KV 0.00" in message["trident.route.loads"]
    assert "c: no_queue" in message["trident.route.passed_over"]
    assert any(text.startswith("b: affinity=") for text in message["trident.route.scores"])


def test_a_filter_that_would_remove_every_replica_is_skipped():
    for name, load in {"untried": {}, "kv_cache_room": {"kv_usage": 1.0}, "no_queue": {"waiting": 1}}.items():
        found, why = [candidate("a", **load), candidate("b", **load)], Explanation()
        request = RoutingRequest(tried=frozenset("ab") if name == "untried" else frozenset())
        assert Router().choose(found, request, random.Random(0), why).name in "ab"
        assert name not in why.passed_over.values()
    assert [*FILTERS] == ["untried", "slow_start", "kv_cache_room", "no_queue", "free_slot"]
