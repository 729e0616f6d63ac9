"""The choice of the draft length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.scheduling import RETRY_AFTER, SHARED_DRAFT, TIMED_TOGETHER, UNDRAFTED_FROM
from python_backends.cpu_engine.draft_length import DraftLength


def timed(length: DraftLength, plain_s: float, drafted_s: float, sequences: int = 1, *, idle: bool = False) -> None:
    for _ in range(15):
        for taken_s, drafts in ((plain_s, False), (drafted_s, True)):
            length.timed(sequences, taken_s, drafts=drafts, idle=idle)


def known(most: int, cost: float = 0.0, of_many: float | None = None) -> DraftLength:
    """A length whose steps are timed. cost: of drafts in plain steps, of one sequence and, unless given, of many."""
    length = DraftLength(most, UNDRAFTED_FROM)
    timed(length, 0.02, 0.02 * (1 + cost), idle=True)
    timed(length, 0.02, 0.02 * (1 + (cost if of_many is None else of_many)), UNDRAFTED_FROM, idle=True)
    return length


def of_all(*costs: float) -> DraftLength:
    """A length whose idle steps are timed: of each of TIMED_TOGETHER drafts cost so many plain steps."""
    length = DraftLength(8, UNDRAFTED_FROM)
    for sequences, cost in zip(TIMED_TOGETHER, costs, strict=True):
        timed(length, 0.02, 0.02 * (1 + cost), sequences, idle=True)
    return length


def test_the_length_follows_the_load():
    length = known(8)
    chosen = [length.choose(running) for running in (0, 1, UNDRAFTED_FROM - 1, UNDRAFTED_FROM, 64)]
    assert chosen == [8, SHARED_DRAFT, SHARED_DRAFT, 0, 0]
    assert known(2).choose(1) == 2


def test_before_the_engine_was_idle_one_sequence_is_drafted_for_and_several_are_not():
    length = DraftLength(8, 64)
    for sequences, drafts in [(1, False), (1, True), (UNDRAFTED_FROM, False), (UNDRAFTED_FROM, True)]:
        assert length.untimed == (sequences, drafts)
        assert [length.choose(running) for running in (0, 1, UNDRAFTED_FROM - 1)] == [8, 0, 0]
        for _ in range(8):
            length.timed(sequences, 0.02, drafts=drafts, idle=True)
    assert length.choose(1) == SHARED_DRAFT
    # Numbers in between are estimated from these until they are timed, too.
    for sequences, drafts in [(2, False), (2, True), (4, False), (4, True)]:
        assert length.untimed == (sequences, drafts)
        for _ in range(8):
            length.timed(sequences, 0.06 if drafts else 0.02, drafts=drafts, idle=True)
    assert length.untimed is None and length.cost(2) == length.cost(3) == pytest.approx(2.0)
    assert length.cost(1) == length.cost(8) == 0


def test_a_slow_moment_in_service_is_forgotten_while_nothing_is_drafted():
    length = known(8, cost=0.2)
    timed(length, 0.02, 0.08, sequences=4)  # five steps suffice
    assert length.cost(4) == pytest.approx(3.0) and length.choose(0, 3) == 0
    for _ in range(1100):
        length.timed(9, 0.03, drafts=False)
    assert length.cost(4) == pytest.approx(0.2) and length.choose(0, 3) == 8


def test_in_service_both_kinds_of_step_are_compared_or_none():
    """Plain steps that take longer there say nothing of those with drafts, which also do: on AVX-512 0.8 plain steps
    were expected of eight sequences so, 1.15 by the idle engine alone, and 1.65 seen."""
    length = known(8, cost=1.15)
    for _ in range(15):
        length.timed(8, 0.044, drafts=False)
    assert length.cost(8) == pytest.approx(1.15) and not length.tries(8)
    for _ in range(15):
        length.timed(8, 0.066, drafts=True)
    assert length.cost(8) == pytest.approx(0.5) and length.cost(1) == pytest.approx(1.15) and length.tries(8)


def test_drafting_begins_where_it_gains_and_goes_on_until_it_loses():
    """Else those that are drafted for would be read again for one that comes, and once more when it has ended."""
    length = of_all(0.4, 1.1, 1.1, 1.1)  # with 1.2 accepted tokens 1.05 times the tokens of plain steps
    assert [length.choose(running) for running in (0, 1, 3, 7)] == [8, SHARED_DRAFT, SHARED_DRAFT, SHARED_DRAFT]
    assert [length.choose(0, behind) for behind in (0, 1, 7)] == [8, 0, 0] and not length.tries(2)
    for _ in range(12):
        length.observe(0, 16)
    assert [length.choose(running) for running in (0, 1, 3)] == [8, 0, 0]


def test_rejected_drafts_end_drafting_and_it_is_tried_again():
    length = known(8, cost=0.1, of_many=1.3)
    for _ in range(400):
        length.observe(0, 16)
    for _ in range(RETRY_AFTER):
        assert length.choose(0) == 0
        length.refused()
    # Not where drafts that are accepted as in most texts would not earn their time.
    assert length.choose(UNDRAFTED_FROM - 1) == 0
    assert length.choose(0) == 8
    for _ in range(100):
        length.observe(0, 16)
    assert length.choose(0) == 8
    for _ in range(200):
        length.observe(0, 16)
    for _ in range(RETRY_AFTER - 1):
        length.refused()
    assert length.choose(0) == 0


def test_one_text_that_does_not_repeat_itself_ends_no_drafting_that_gains():
    length = known(8, cost=0.6)
    for _ in range(3):
        for _ in range(60):
            length.observe(3, 16)
    for _ in range(100):
        length.observe(0, 16)
    assert length.choose(0) == 8


def test_the_beginnings_of_answers_tell_less_than_what_follows():
    """Bursts that end drafting after ten tokens, and one answer that is drafted for to its end."""
    length = known(8)
    for position in [*range(1, 11)] * 50:
        length.observe(0, position)
    assert length.choose(0) == 8
    for position in [*range(1, 11)] * 50:
        length.observe(0, position)
    assert length.choose(0) == 0
    for position in range(1, 200, 9):
        length.observe(8, position)
    assert length.choose(0) == 8


def test_drafts_have_to_earn_the_time_of_their_steps():
    free, dear = known(4), known(4, cost=1.25)
    for length in (free, dear):
        for _ in range(200):
            length.observe(1, 16)
    assert (free.choose(0), dear.choose(0)) == (4, 0)
    for _ in range(200):
        dear.observe(3, 16)
    assert dear.choose(0) == 4


def test_the_cost_of_drafts_lies_between_those_of_the_nearest_numbers_of_sequences_that_are_known():
    length = known(4, cost=1.5)
    assert length.cost(1) == length.cost(3) == pytest.approx(1.5)
    timed(length, 0.04, 0.06, sequences=3)
    assert length.cost(3) == pytest.approx(0.5) and length.cost(1) == length.cost(8) == pytest.approx(1.5)
    assert length.cost(2) == pytest.approx(1.0)
    for _ in range(7):
        length.timed(3, 10.0, drafts=True)  # waited for a core
    assert length.cost(3) == pytest.approx(0.5)
    timed(length, 0.05, 0.02, sequences=2)
    assert length.cost(2) == 0


def test_where_both_kinds_of_step_were_seen_in_service_they_alone_count():
    length = known(8, cost=1.0)
    timed(length, 0.04, 0.07, UNDRAFTED_FROM)
    assert length.cost(UNDRAFTED_FROM) == pytest.approx(0.75) and length.cost(1) == pytest.approx(1.0)


def test_drafts_that_gain_for_few_sequences_may_not_for_many():
    length = known(8, of_many=2.0)
    for _ in range(1000):
        length.observe(8, 16)  # of which three count beside others
    assert [length.choose(running) for running in (0, 1, UNDRAFTED_FROM - 1)] == [8, SHARED_DRAFT, SHARED_DRAFT]
    for _ in range(1000):
        length.observe(1, 16)
    assert [length.choose(running) for running in (0, 1, UNDRAFTED_FROM - 1)] == [8, SHARED_DRAFT, 0]
    # Those that come together are one batch: not one is read with drafts and again without.
    assert length.choose(0, behind=UNDRAFTED_FROM - 1) == 0 and length.choose(0, behind=1) == 8


@given(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 8)), max_size=50), st.integers(1, 16))
def test_no_length_is_longer_than_the_recipe_allows(history: list[tuple[int, int]], most: int):
    length = known(most)
    for running, accepted in history:
        chosen = length.choose(running)
        assert 0 <= chosen <= most and (running < UNDRAFTED_FROM or not chosen)
        if chosen:
            length.observe(min(chosen, accepted), running)
