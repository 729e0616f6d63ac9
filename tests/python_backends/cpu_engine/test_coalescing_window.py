import os
import subprocess
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.scheduling import FEW_STREAMS, SENDING_SHARE, WAIT_OF_FEW_S, WAIT_OF_MANY_S
from python_backends.cpu_engine import coalescing_window
from python_backends.cpu_engine.coalescing_window import CpuUse, ServerCpu, ServingCost

MS = 1_000_000
LONG = 10**9
distances = st.integers(1, 50 * MS)


def window_of(max_ns, response_s=0.0003, cores=2.0):
    cost = ServingCost(lambda: None)
    cost.response_s, cost.cores = response_s, cores
    return coalescing_window.CoalescingWindow(max_ns, cost)


def wide(max_ns):
    """A window of ``max_ns``, whatever the streams."""
    return window_of(max_ns, response_s=1000)


def waits(window, steps_ns, live):
    """Return how long each step's tokens waited, and when those came that wait still.

    Between the steps a ticker looks when the window is over, as late as timers are.
    """
    waiting, waited = [], []
    for now_ns in steps_ns:
        remaining_ns = window.remaining_ns(waiting[-1], live) if waiting else None
        if remaining_ns is not None and (look_ns := waiting[-1] + remaining_ns + 1) < now_ns:
            assert window.expired(look_ns, live)
            waited += [look_ns - came_ns for came_ns in waiting]
            waiting = []
        waiting.append(now_ns)
        if window.add_step(now_ns, live):
            waited += [now_ns - came_ns for came_ns in waiting]
            waiting = []
    return waited, waiting


@given(st.integers(0, 10_000), st.integers(0, 10**9), st.floats(1e-6, 1e-2), st.floats(0.1, 256))
def test_bursts_take_their_share_of_the_cpu_unless_tokens_would_wait_too_long(live, bound, response_s, cores):
    window = window_of(bound, response_s, cores)
    assert window.width_ns(0) <= window.width_ns(live) <= window.width_ns(live + 1) <= bound
    longest_ns = min(bound, int(1e9 * (WAIT_OF_FEW_S if live <= FEW_STREAMS else WAIT_OF_MANY_S)))
    width_ns = window.width_ns(live)
    assert width_ns <= longest_ns
    if width_ns < longest_ns:
        assert abs(live * response_s * 1e9 - SENDING_SHARE * cores * width_ns) <= SENDING_SHARE * cores + 1


def test_a_dear_response_or_a_busy_neighbour_widens_the_window():
    usual, dear, busy = (window_of(50 * MS, *how).width_ns(6) for how in ((1e-4,), (2e-4,), (1e-4, 1.0)))
    assert (usual, dear, busy) == (2 * MS, 4 * MS, 4 * MS)


@given(st.lists(distances, min_size=1, max_size=60), st.integers(1, 200))
def test_whatever_the_steps_no_token_waits_longer_than_the_bound(gaps_ns, live):
    steps_ns, now_ns = [], LONG
    for gap_ns in gaps_ns:
        steps_ns.append(now_ns := now_ns + gap_ns)
    waited, waiting = waits(wide(LONG), steps_ns, live)
    assert max(waited, default=0) <= (18 * MS if live <= 32 else 44 * MS) + 1
    assert len(waited) + len(waiting) == len(gaps_ns)


@given(st.lists(distances, min_size=5, max_size=30), st.integers(1, 32))
def test_without_a_window_and_with_steps_that_are_wider_every_step_leaves_at_once(gaps_ns, live):
    now_ns, none, twenty = LONG, window_of(0), wide(LONG)
    for gap_ns in gaps_ns:
        now_ns += gap_ns + 27 * MS
        assert none.add_step(now_ns, live) and twenty.add_step(now_ns, live)


@given(st.integers(MS // 2, 50 * MS), st.integers(2, 64), st.integers(1, 18 * MS))
def test_at_an_even_pace_as_many_steps_leave_together_as_fit(gap, live, bound):
    window = wide(bound)
    begin_ns = LONG
    for _ in range(4):
        window.add_step(begin_ns := begin_ns + gap, live)  # it knows the pace now
    while not window.add_step(begin_ns := begin_ns + gap, live):
        pass
    steps = bound // gap + 1
    waited, left = waits(window, [begin_ns + (n + 1) * gap for n in range(3 * steps)], live)
    assert sorted(waited) == sorted(list(range(0, steps * gap, gap)) * 3) and not left


def test_a_step_that_is_longer_beside_a_burst_does_not_end_coalescing():
    """The next step has no burst beside it, if the tokens wait: that is tried when steps are too long for long."""
    window, now_ns, sent = wide(LONG), LONG, []
    for step in range(64):
        now_ns += (21 if sent and sent[-1] == step - 1 else 15) * MS
        if window.add_step(now_ns, 32):
            sent.append(step)
    assert len([step for step in sent if step >= 32]) == 16  # two tokens a message, in place of one


@given(st.lists(distances, min_size=1, max_size=40), st.integers(1, 64))
def test_between_steps_the_window_is_over_when_its_oldest_token_has_waited_so_long(gaps_ns, live):
    now_ns, window, oldest_ns = LONG, wide(18 * MS), None
    for gap_ns in gaps_ns:
        look_ns = now_ns + gap_ns // 2
        late = oldest_ns is not None and look_ns - oldest_ns > window.width_ns(live)
        assert window.expired(look_ns, live) == late
        oldest_ns = None if late else oldest_ns
        now_ns += gap_ns
        oldest_ns = None if window.add_step(now_ns, live) else now_ns if oldest_ns is None else oldest_ns


# ---- what a response costs -------------------------------------------------------------------------------------------


S = 10**9


class Machine:
    """Counters of a machine with as many cores as this one, moved by hand."""

    def __init__(self):
        self.cores = len(os.sched_getaffinity(0))
        self.use, self.now_ns, self.sent = CpuUse(0, 0, 0, 0), 10**12, 0
        self.cost = ServingCost(lambda: self.use)
        self.cost.update(self.now_ns, 0)

    def go_on(self, response_s, responses=1000, others=0.0, seconds=1):
        self.now_ns += seconds * S
        self.sent += responses
        all_s = seconds * self.cores
        ours = (response_s * responses, (1 - others) * all_s * 0.75, all_s, (1 - others) * all_s * 0.25)
        self.use = CpuUse(*(before + now for before, now in zip(self.use, ours, strict=True)))
        self.cost.update(self.now_ns, self.sent)


@pytest.fixture
def machine():
    return Machine()


@pytest.mark.parametrize("response_s", [0.00005, 0.003])
def test_it_learns_what_a_response_costs_within_seconds(machine, response_s):
    for _ in range(15):
        machine.go_on(response_s)
    assert machine.cost.response_s == pytest.approx(response_s, rel=0.05)
    assert machine.cost.cores == pytest.approx(machine.cores)


def test_a_neighbours_cpu_is_not_there_for_us(machine):
    for _ in range(15):
        machine.go_on(0.0001, others=0.5)
    assert machine.cost.cores == pytest.approx(machine.cores / 2, rel=0.05)


def test_few_responses_a_pause_and_counters_that_go_back_say_nothing(machine):
    before = machine.cost.response_s, machine.cost.cores
    machine.go_on(0.009, responses=5)
    machine.go_on(0.009, seconds=60)  # the requests of an hour ago are none of these responses'
    machine.use = CpuUse(0, 0, 0, 0)
    machine.go_on(0)
    assert (machine.cost.response_s, machine.cost.cores) == before


def test_it_keeps_what_it_knows_where_the_system_does_not_tell(machine):
    machine.go_on(0.0001)
    known = machine.cost.response_s
    machine.cost._read = lambda: None
    machine.now_ns += S
    machine.cost.update(machine.now_ns, machine.sent + 1000)
    assert machine.cost.response_s == known


def test_the_cpu_of_this_process_its_child_and_its_parent_is_read_from_the_system():
    with subprocess.Popen(["sleep", "60"]) as child:
        cpu = ServerCpu()
        before = cpu.read()
        assert os.getpid() in cpu._stubs and child.pid in cpu._workers
        time.sleep(0.02)
        after = cpu.read()
        child.kill()
    assert before.serving > 0 and after.machine >= after.idle > 0
    assert all(now >= then for now, then in zip(after, before, strict=True))
