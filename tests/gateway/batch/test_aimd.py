"""The law of batch work: laws by hypothesis, and a simulated replica that interactive callers share with it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batch.aimd import HEADROOM, LATE_SHARE, Pace, PacePolicy, Reason, Signals

POLICY = PacePolicy(max_running=32)
signals = st.builds(
    Signals,
    waiting=st.integers(0, 5),
    first_tokens=st.integers(0, 100),
    late=st.integers(0, 5),
    fullness=st.floats(0, 1),
    degraded=st.booleans(),
    healthy=st.booleans(),
)


def troubled(seen: Signals) -> bool:
    return seen.degraded or not seen.healthy or seen.waiting > 0 or seen.late > LATE_SHARE * seen.first_tokens


@pytest.mark.slow
@given(st.lists(signals, max_size=60))
def test_the_pace_stays_in_its_bounds_and_grows_by_one_step_at_most(ticks):
    pace = Pace()
    for seen in ticks:
        before, pace = pace, pace.after(seen, POLICY)
        assert 0 <= pace.rate <= POLICY.max_running and pace.rate <= before.rate + POLICY.step
        if troubled(seen):
            assert pace.cut and pace.rate <= before.rate / 2
        if seen.degraded or not seen.healthy:
            assert pace.allowed == 0
        if seen.fullness >= HEADROOM:
            assert pace.rate <= before.rate


@given(st.floats(0, 32))
def test_trouble_ends_all_batch_work_within_six_ticks(rate):
    pace = Pace(rate)
    for _ in range(6):
        pace = pace.after(Signals(waiting=1), POLICY)
    assert pace.allowed == 0


@given(st.floats(0, 32))
def test_calm_brings_the_whole_pace_back(rate):
    pace = Pace(rate)
    for _ in range(POLICY.max_running):
        pace = pace.after(Signals(), POLICY)
    assert pace.allowed == POLICY.max_running


def test_each_reason_is_said():
    calm, half = Signals(), Pace(8.0)
    for seen, rate, reason in [
        (calm, 9.0, Reason.GROWS),
        (replace(calm, fullness=0.8), 8.0, Reason.FULL),
        (replace(calm, waiting=1), 4.0, Reason.QUEUE),
        (replace(calm, first_tokens=100, late=5), 9.0, Reason.GROWS),
        (replace(calm, first_tokens=100, late=6), 4.0, Reason.LATE),
        (replace(calm, degraded=True), 0.0, Reason.DEGRADED),
        (replace(calm, healthy=False, degraded=True), 0.0, Reason.UNHEALTHY),
    ]:
        found = half.after(seen, POLICY)
        assert (found.rate, found.reason) == (rate, reason)


def test_a_pace_that_is_not_used_does_not_grow():
    assert Pace(8.0).after(Signals(), POLICY, running=2).rate == 8.0
    assert Pace(8.0).after(Signals(), POLICY, running=8).rate == 9.0


def simulate(seed: int, interactive_per_s: float, paced: bool) -> tuple[float, int]:
    """Ten minutes of one replica of 32 slots in steps of 0.1 s. Interactive requests run 4 s and are first in the
    engine's queue; batch lines run 10 s. Returns the P95 of waits for a slot, and the lines done."""
    rng = random.Random(seed)
    step_s, slots = 0.1, 32
    interactive: list[float] = []  # seconds left
    lines: list[float] = []
    queue: list[float] = []  # when they came
    waits: list[float] = []
    done, pace, base = 0, Pace(), 0
    for step in range(6000):
        now_s = step * step_s
        interactive = [left - step_s for left in interactive if left > step_s]
        before = len(lines)
        lines = [left - step_s for left in lines if left > step_s]
        done += before - len(lines)
        for _ in range(sum(rng.random() < interactive_per_s * step_s / 8 for _ in range(8))):
            queue.append(now_s)
        while queue and len(interactive) + len(lines) < slots:
            waits.append(now_s - queue.pop(0))
            interactive.append(rng.expovariate(1 / 4.0))
        if step % 10 == 0:
            late = sum(wait > 0.5 for wait in waits[base:])
            seen = Signals(len(queue), len(waits) - base, late, (len(interactive) + len(lines)) / slots)
            pace = pace.after(seen, POLICY, len(lines))
            if pace.cut:
                base = len(waits)
                del lines[pace.allowed :]  # the youngest are given up
        allowed = pace.allowed if paced else POLICY.max_running
        while len(lines) < allowed and len(interactive) + len(lines) < slots:
            lines.append(rng.expovariate(1 / 10.0))
    return sorted(waits)[int(len(waits) * 0.95)], done


@pytest.mark.parametrize("seed", range(5))
def test_interactive_callers_do_not_notice_batch_work_that_is_paced(seed):
    wait_s, done = simulate(seed, interactive_per_s=3.0, paced=True)
    assert wait_s < 0.2 and done > 200  # of the 20 slots that are left it uses what the headroom leaves
    unpaced_s, _ = simulate(seed, interactive_per_s=3.0, paced=False)
    assert unpaced_s > 0.5  # what the law is for


def test_batch_work_gives_way_altogether_where_there_is_no_room():
    _, quiet = simulate(1, interactive_per_s=0.5, paced=True)
    _, busy = simulate(1, interactive_per_s=7.5, paced=True)
    assert busy < quiet / 5
