"""Caps: taken at once or refused, and given back once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import Overloaded
from gateway.admission.concurrency import Concurrency, Slot
from gateway.config.tenant import Level, Limits

LEVELS = (Level("acme", Limits(max_in_flight=3)), Level("acme/r"), Level("acme/r/k", Limits(max_in_flight=2)))


def test_the_hard_cap_refuses_the_next_one() -> None:
    caps = Concurrency(2)
    slots = [caps.try_acquire((), 1) for _ in range(2)]
    with pytest.raises(Overloaded, match="2 requests are in flight, the most allowed"):
        caps.try_acquire((), 1)
    slots[0].release()
    assert caps.try_acquire((), 1).taken


@pytest.mark.parametrize(
    ("levels", "priority", "problem"), [(LEVELS, 1, "acme/r/k has 2"), (LEVELS[:1], 0, "class 0 has 1")]
)
def test_a_cap_of_a_level_or_class_is_named(levels: tuple[Level, ...], priority: int, problem: str) -> None:
    caps = Concurrency(100, {0: 1})
    with pytest.raises(Overloaded, match=problem):
        for _ in range(3):
            caps.try_acquire(levels, priority)


@given(st.lists(st.tuples(st.sampled_from([0, 1]), st.sampled_from([1, 2, 3]), st.integers(0, 9), st.booleans())))
def test_no_cap_is_ever_passed_and_nothing_is_lost(steps: list[tuple[int, int, int, bool]]) -> None:
    caps = Concurrency(4, {0: 2})
    held: list[tuple[int, int, Slot]] = []
    for priority, depth, which, give_back in steps:
        if give_back and held:
            slot = held.pop(which % len(held))[2]
            slot.release()
            slot.release()
        else:
            full = (
                len(held) >= 4
                or (priority == 0 and sum(one[0] == 0 for one in held) >= 2)
                or len(held) >= 3
                or (depth == 3 and sum(one[1] == 3 for one in held) >= 2)
            )
            try:
                held.append((priority, depth, caps.try_acquire(LEVELS[:depth], priority)))
                assert not full
            except Overloaded:
                assert full
        assert caps.in_flight == len(held) == caps._counts.get("level acme", 0)
    for _, _, slot in held:
        slot.release()
    assert caps.in_flight == 0 and not caps._counts
