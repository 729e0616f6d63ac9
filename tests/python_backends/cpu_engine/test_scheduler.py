import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contract.errors import Overloaded
from python_backends.cpu_engine.scheduler import Scheduler

SLOTS, BLOCKS, MAX_WAITING = 3, 10, 4


def test_requests_start_in_the_order_in_which_they_came():
    admission = Scheduler(slots=2, blocks=100, max_waiting=10)
    for key in (5, 3, 9):
        admission.enqueue(key, 1)
    assert admission.schedule() == [5, 3]
    admission.release(5)
    assert admission.schedule() == [9]


def test_the_more_urgent_start_first_and_equals_in_their_order():
    admission = Scheduler(slots=0, blocks=100, max_waiting=10)
    for key, priority in ((1, 0.5), (2, 0.0), (3, 1.0), (4, 0.5), (5, 1.0)):
        admission.enqueue(key, 1, priority)
    admission.release(5)  # it has gone while it waited
    admission.slots = 10
    assert admission.schedule() == [3, 1, 4, 2]


def test_those_that_leave_while_they_wait_are_forgotten():
    admission = Scheduler(slots=0, blocks=100, max_waiting=10)
    admission.enqueue(0, 1, 1.0)
    for key in range(1, 1000):
        admission.enqueue(key, 1)
        admission.release(key)
    assert admission.waiting == 1 and len(admission._order) < 100
    admission.slots = 1
    assert admission.schedule() == [0]


def test_one_that_does_not_fit_yet_holds_those_behind_it():
    admission = Scheduler(slots=10, blocks=10, max_waiting=10)
    admission.enqueue(1, 8)
    admission.enqueue(2, 5)
    admission.enqueue(3, 1)
    assert admission.schedule() == [1]
    assert admission.schedule() == []
    admission.release(1)
    assert admission.schedule() == [2, 3]


def test_a_full_queue_refuses_at_once_with_the_numbers():
    admission = Scheduler(slots=1, blocks=10, max_waiting=2)
    admission.enqueue(1, 1)
    admission.schedule()
    admission.enqueue(2, 1)
    admission.enqueue(3, 1)
    with pytest.raises(Overloaded, match="queue full: 2 of 2 requests wait, 1 are running"):
        admission.enqueue(4, 1)
    assert Overloaded.retryable and admission.waiting == 2
    admission.release(2)
    admission.enqueue(4, 1)


def test_a_waiting_request_that_leaves_makes_room_without_having_held_blocks():
    admission = Scheduler(slots=1, blocks=10, max_waiting=5)
    admission.enqueue(1, 10)
    admission.schedule()
    admission.enqueue(2, 10)
    admission.release(2)
    assert (admission.running, admission.waiting, admission.blocks - admission._free_blocks) == (1, 0, 10)


def test_the_oldest_waiting_keys_are_told_first():
    admission = Scheduler(slots=0, blocks=0, max_waiting=10)
    for key in (7, 5, 6):
        admission.enqueue(key, 1)
    assert admission.waiting_keys(2) == [7, 5]
    assert admission.waiting_keys(10) == [7, 5, 6]


def test_a_held_request_starts_only_once_it_is_offered_behind_those_that_came_before():
    admission = Scheduler(slots=10, blocks=10, max_waiting=1)
    admission.hold(1, 3, 0.9)
    admission.hold(2, 3)
    assert admission.schedule() == [] and admission.waiting == 2 and admission.waiting_keys(9) == []
    admission.enqueue(3, 3)  # those that are held leave the queue free
    with pytest.raises(Overloaded, match="queue full: 1 of 1 requests wait"):
        admission.offer(2)
    assert admission.schedule() == [3]
    admission.offer(1)
    assert not admission.holds(1) and admission.schedule() == [1] and admission.waiting == 0


def test_a_held_request_may_leave():
    admission = Scheduler(slots=10, blocks=10, max_waiting=1)
    admission.hold(1, 3)
    admission.release(1)
    assert not admission.holds(1) and admission.waiting == 0 and admission.schedule() == []


class AnyTraffic(RuleBasedStateMachine):
    """Requests come and go in any order, some of them twice."""

    def __init__(self):
        super().__init__()
        self.admission = Scheduler(SLOTS, BLOCKS, MAX_WAITING)
        self.next_key = 0
        self.waiting, self.running = [], []
        self.blocks = {}

    @rule(blocks=st.integers(1, BLOCKS))
    def offer(self, blocks):
        self.next_key += 1
        self.blocks[self.next_key] = blocks
        try:
            self.admission.enqueue(self.next_key, blocks)
        except Overloaded:
            assert len(self.waiting) == MAX_WAITING
        else:
            self.waiting.append(self.next_key)

    @rule()
    def admit(self):
        admitted = self.admission.schedule()
        assert admitted == self.waiting[: len(admitted)]
        self.running += admitted
        del self.waiting[: len(admitted)]
        if self.waiting:  # the next one really did not fit
            full = len(self.running) == SLOTS
            assert full or self.blocks[self.waiting[0]] > BLOCKS - sum(self.blocks[key] for key in self.running)

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data(), times=st.integers(1, 2))
    def release(self, data, times):
        key = data.draw(st.sampled_from(self.waiting + self.running))
        for _ in range(times):
            self.admission.release(key)
        (self.waiting if key in self.waiting else self.running).remove(key)

    @rule(key=st.integers(-5, 0))
    def release_an_unknown_one(self, key):
        self.admission.release(key)

    @invariant()
    def nothing_is_lost_and_nothing_exceeded(self):
        assert self.admission.running_keys() == self.running
        assert self.admission.waiting_keys(100) == self.waiting
        assert (self.admission.running, self.admission.waiting) == (len(self.running), len(self.waiting))
        assert (
            self.admission.blocks - self.admission._free_blocks
            == sum(self.blocks[key] for key in self.running)
            <= BLOCKS
        )
        assert len(self.running) <= SLOTS and len(self.waiting) <= MAX_WAITING


TestAnyTraffic = AnyTraffic.TestCase
TestAnyTraffic.settings = settings(stateful_step_count=40)
