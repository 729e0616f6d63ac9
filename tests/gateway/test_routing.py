"""Filter → Score → Pick."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients import picks
from clients.picks import Ask
from contract.errors import Unavailable
from contract.load import ReplicaLoad
from gateway.routing import Candidate, Question, Router, choose_pool


def candidate(name: str, *, open_breaker: bool = False, age_s: float = 1e9, **load: object) -> Candidate:
    return Candidate(ReplicaLoad(name, **load), open_breaker, age_s)


def shares(router: Router, candidates: list[Candidate], question: Question | None = None, times: int = 2000) -> Counter:
    rng = random.Random(1)
    return Counter(router.choose(candidates, question or Question(), rng).name for _ in range(times))


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
    question = Question(Ask(session=session), tried)
    for router in (Router(), Router(pick=picks.token_aware)):
        if not fit:
            with pytest.raises(Unavailable):
                router.choose(found, question, random.Random(seed))
            continue
        name = router.choose(found, question, random.Random(seed)).name
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
    question = Question(Ask(session="conversation"))
    home = next(iter(shares(Router(), found, question)))
    assert len(shares(Router(), found, question)) == 1
    busy = [candidate(one.load.name, outstanding=50 * (one.load.name == home)) for one in found]
    assert home not in shares(Router(), busy, question)


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
