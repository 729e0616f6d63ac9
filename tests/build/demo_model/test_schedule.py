"""The learning rate's course, bounded by steps and by the clock."""

from hypothesis import given
from hypothesis import strategies as st

from build.demo_model.schedule import DECAY_SHARE, PLANNED_SHARE, WARMUP_STEPS, Schedule


def simulate(steps, seconds_per_step, budget_s):
    """The schedule after a run whose every step takes the same time, and the steps it took."""
    schedule, step = Schedule.planned(steps), 0
    while step < schedule.steps and step * seconds_per_step < budget_s:
        step += 1
        schedule = schedule.shortened(step, step * seconds_per_step, budget_s)
    return schedule, step


def test_the_rate_warms_up_stays_and_descends_to_nearly_nothing():
    schedule = Schedule.planned(1000)
    factors = [schedule.factor(step) for step in range(1000)]
    assert factors[0] == 1 / WARMUP_STEPS
    assert set(factors[WARMUP_STEPS : schedule.decay_from]) == {1.0}
    descent = factors[schedule.decay_from :]
    assert descent == sorted(descent, reverse=True)
    assert 0 < descent[-1] < 0.01


def test_a_machine_that_is_fast_enough_takes_the_planned_steps():
    assert simulate(500, 0.1, 1000) == (Schedule.planned(500), 500)


def test_a_slow_machine_descends_early_and_ends_in_time_with_the_whole_descent():
    schedule, taken = simulate(10_000, 1.0, 1000)
    assert taken == schedule.steps
    assert abs(taken - PLANNED_SHARE * 1000) <= 2
    assert abs((schedule.steps - schedule.decay_from) / schedule.steps - DECAY_SHARE) < 0.01


@given(st.integers(1, 3000), st.floats(0.01, 10), st.floats(1, 3000))
def test_no_run_takes_more_steps_than_planned_or_more_time_than_its_budget(steps, seconds_per_step, budget_s):
    schedule, taken = simulate(steps, seconds_per_step, budget_s)
    assert taken <= schedule.steps <= steps
    assert (taken - 1) * seconds_per_step < budget_s
    assert all(0 <= schedule.factor(step) <= 1 for step in range(taken))


@given(st.integers(100, 2000), st.floats(0.1, 3))
def test_steps_and_decay_from_repeat_a_shortened_run(steps, seconds_per_step):
    schedule, taken = simulate(steps, seconds_per_step, 300.0)
    repeated = Schedule.planned(schedule.steps, schedule.decay_from)
    assert [repeated.factor(step) for step in range(taken)] == [schedule.factor(step) for step in range(taken)]
