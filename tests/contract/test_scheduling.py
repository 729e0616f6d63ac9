from hypothesis import example, given
from hypothesis import strategies as st

from contract.scheduling import (
    LEAST_SPEEDUP,
    MAX_SLOWDOWN,
    QUEUE_LOSS,
    READ_PER_STEP,
    RESUME_TOKENS,
    RESUME_UP_TO,
    SHARED_DRAFT,
    UNDRAFTED_FROM,
    DraftResumption,
    drafts_beside,
    slowdown,
)


@given(st.integers(0, 32), st.integers(0, 100))
def test_others_beside_a_sequence_never_lengthen_its_drafts(most, others):
    assert drafts_beside(most, 0) == most
    assert drafts_beside(most, others + 1) == min(SHARED_DRAFT, most)


MANY = st.lists(st.integers(1, 2000), min_size=RESUME_UP_TO + 1, max_size=UNDRAFTED_FROM)


@given(MANY, st.floats(LEAST_SPEEDUP, 4), st.integers(1, 50))
def test_plain_steps_of_many_end_when_drafts_would_have_saved_two_readings_of_their_texts(texts, speedup, steps):
    resumption, left, made = DraftResumption(), [1000] * len(texts), 0
    while not resumption.due(texts, left):
        resumption.observe(len(texts), speedup, steps)
        made += steps
    saved, reading = made * (1 - 1 / speedup), 2 * sum(texts) / READ_PER_STEP
    assert reading <= saved * (1 + 1e-9) and saved <= reading + steps
    assert not resumption.due(texts, left)


def test_plain_steps_of_few_end_at_once_where_they_have_enough_left():
    resumption = DraftResumption()
    assert resumption.due([500] * RESUME_UP_TO, [RESUME_TOKENS] * RESUME_UP_TO)
    assert not resumption.due([500], [RESUME_TOKENS - 1])


@given(MANY, st.floats(1.1, 4), st.integers(0, 100), st.floats(0, 1))
@example([1] * 8, 2.9, 100, 1.0)  # it is due, though a step saves less than their texts grow by
@example([1] * 8, 3.0, 0, 1.0)  # a step saves what their texts grow by, but for rounding
def test_it_is_told_how_many_more_of_them_there_are(texts, speedup, before, share):
    resumption = DraftResumption()
    resumption.observe(len(texts), speedup, before)
    left = resumption.steps_left(texts, speedup)
    made = int(share * (left or 1000))
    if 0 < made and made != left:
        resumption.observe(len(texts), speedup, made)
        assert not resumption.due([text + made for text in texts], [1000] * len(texts))
    elif left and not resumption.due(texts, [1000] * len(texts)):
        resumption.observe(len(texts), speedup, left + 1)  # rounding may take one more
        assert resumption.due([text + left for text in texts], [1000] * len(texts))


@given(MANY)
def test_a_busier_time_and_drafts_that_gain_too_little_let_plain_steps_go_on(texts):
    resumption, left = DraftResumption(), [1000] * len(texts)
    resumption.observe(len(texts), 2.0, 10_000)
    resumption.observe(UNDRAFTED_FROM + 1, 1.0)
    resumption.observe(len(texts), LEAST_SPEEDUP - 0.01, 10_000)
    assert not resumption.due(texts, left)


@given(st.integers(1, 256), st.integers(1, 256))
def test_steps_beside_a_queue_lose_little_by_decoding_before_its_prompts_are_read(running, waiting):
    factor, queued = slowdown(running, waiting), waiting - 1
    assert queued / (running + queued) / factor <= QUEUE_LOSS * (1 + 1e-9)
    assert factor >= MAX_SLOWDOWN and slowdown(running, waiting + 1) >= factor


@given(st.integers(1, 256))
def test_beside_a_prompt_that_waits_alone_streams_keep_half_of_their_pace(running):
    assert slowdown(running, 1) == MAX_SLOWDOWN + 1 / running
