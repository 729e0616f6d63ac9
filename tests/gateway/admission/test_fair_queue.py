"""Whose turn it is: order, shares, bounds, deadlines and aging, by hand, in simulations and by law."""

from __future__ import annotations

import heapq
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from contract.errors import Overloaded
from gateway.admission.fair_queue import Entry, FairQueue
from gateway.config.policy import AdmissionRules


def _jain(shares: list[float]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def _pop_all(queue: FairQueue, now_s: float = 0.0) -> list[Entry]:
    return list(iter(lambda: queue.pop(now_s), None))


def test_equals_go_first_come_first_served() -> None:
    queue = FairQueue()
    entries = [Entry("a", 100) for _ in range(20)]
    for entry in entries:
        queue.push(entry, 0.0)
    assert _pop_all(queue) == entries


def test_the_earliest_deadline_of_a_tenant_goes_first() -> None:
    queue = FairQueue()
    late, none, early = Entry("a", 1, deadline_s=90), Entry("a", 1), Entry("a", 1, deadline_s=30)
    for entry in (late, none, early):
        queue.push(entry, 0.0)
    assert _pop_all(queue) == [early, late, none]


def test_the_more_urgent_class_goes_first() -> None:
    queue = FairQueue()
    batch, chat = Entry("a", 1, priority=2), Entry("b", 1, priority=0)
    queue.push(batch, 0.0)
    queue.push(chat, 0.0)
    assert _pop_all(queue) == [chat, batch]


def test_a_caller_that_waited_long_enough_moves_up_a_class_at_a_time() -> None:
    queue = FairQueue(AdmissionRules(aging_s=10))
    old = Entry("a", 1, priority=2)
    queue.push(old, 0.0)
    queue.push(Entry("b", 1, priority=0), 19.0)
    assert queue.pop(19.0).tenant == "b"
    queue.push(Entry("b", 1, priority=0, deadline_s=30), 20.0)
    assert [entry.tenant for entry in _pop_all(queue, 20.0)] == ["a", "b"]  # the same class now, in turns


def test_nothing_starves_under_an_endless_stream_of_urgent_work() -> None:
    queue = FairQueue(AdmissionRules(aging_s=10))
    old = Entry("patient", 500, priority=3)
    queue.push(old, 0.0)
    for second in range(60):
        for _ in range(3):
            queue.push(Entry("urgent", 500, priority=0), float(second))
        if queue.pop(float(second)) is old:
            assert 30 <= second <= 33
            return
    raise AssertionError("it starved")


def test_what_expired_never_leaves_as_work() -> None:
    queue = FairQueue()
    expired, good = Entry("a", 1, deadline_s=5), Entry("a", 1, deadline_s=50)
    queue.push(expired, 0.0)
    queue.push(good, 0.0)
    assert queue.next_deadline_s() == 5
    assert queue.pop(5.0) is good
    assert queue.expire(5.0) == [expired] and queue.expire(5.0) == []
    assert len(queue) == 0 and queue.backlog_tokens == 0


def test_bounds_are_named() -> None:
    queue = FairQueue(AdmissionRules(max_waiting_per_class=3, max_waiting_per_tenant=2))
    for tenant in ("a", "a", "b"):
        queue.push(Entry(tenant, 10), 0.0)
    with pytest.raises(Overloaded, match="3 of 3 requests wait in priority class 1"):
        queue.push(Entry("c", 10), 0.0)
    with pytest.raises(Overloaded, match="2 of 2 requests of a wait"):
        queue.push(Entry("a", 10, priority=0), 0.0)
    assert len(queue) == 3 and queue.backlog_tokens == 30


def test_tenants_that_may_not_run_are_passed_over_and_keep_their_place() -> None:
    queue = FairQueue()
    first, second = Entry("a", 10), Entry("b", 10)
    queue.push(first, 0.0)
    queue.push(second, 0.0)
    assert queue.pop(0.0, lambda entry: entry.tenant != "a") is second
    assert queue.pop(0.0, lambda entry: entry.tenant != "a") is None
    assert queue.pop(0.0) is first


def test_tokens_not_used_buy_the_tenant_an_earlier_turn() -> None:
    def order(refund: float) -> list[str]:
        queue = FairQueue(AdmissionRules(quantum_tokens=100))
        for _ in range(3):
            for tenant in "ab":
                queue.push(Entry(tenant, 100), 0.0)
        first = queue.pop(0.0)
        queue.give_back(first, refund)
        return [first.tenant, *(entry.tenant for entry in _pop_all(queue))]

    assert order(0) == ["a", "b", "a", "b", "a", "b"]
    assert order(100) == ["a", "a", "b", "a", "b", "b"]


@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (1, 2, 4, 0.5)])
def test_served_tokens_follow_the_weights_whatever_the_sizes(weights: tuple[float, ...]) -> None:
    rng = random.Random(3)
    queue = FairQueue(AdmissionRules(max_waiting_per_class=10**6, max_waiting_per_tenant=10**6))
    sizes = [(50, 100), (2000, 4000), (10, 5000), (700, 800)]
    for tenant, (low, high) in enumerate(sizes):
        for _ in range(20_000_00 // (low + high)):
            queue.push(Entry(str(tenant), rng.randint(low, high), weight=weights[tenant]), 0.0)
    served: Counter[str] = Counter()
    while sum(served.values()) < 1_000_000:
        entry = queue.pop(0.0)
        served[entry.tenant] += entry.cost_tokens
    assert _jain([served[str(tenant)] / weight for tenant, weight in enumerate(weights)]) >= 0.99


def _simulate(tenants: dict[str, tuple[float, int, int]], seconds: float, slots: int, pace: float, most: int) -> dict:
    """A replica of ``slots`` slots that makes ``pace`` tokens a second in each. tenants: arrivals per second, and
    tokens reserved and used by each request. At most ``most`` slots for one tenant. Returns tokens used within
    the time and the waits, by tenant."""
    rng, queue = random.Random(11), FairQueue(AdmissionRules(max_waiting_per_class=10**6, max_waiting_per_tenant=200))
    events: list[tuple[float, int, str, Entry | None]] = []
    for number, (tenant, (rate, _, _)) in enumerate(tenants.items()):
        heapq.heappush(events, (rng.expovariate(rate), number, tenant, None))
    running: Counter[str] = Counter()
    served: Counter[str] = Counter()
    waits: dict[str, list[float]] = {tenant: [] for tenant in tenants}
    sequence = len(tenants)
    while events and events[0][0] < seconds:
        now_s, _, tenant, done = heapq.heappop(events)
        rate, reserved, used = tenants[tenant]
        sequence += 1
        if done is None:
            heapq.heappush(events, (now_s + rng.expovariate(rate), sequence, tenant, None))
            try:
                queue.push(Entry(tenant, reserved, work=now_s), now_s)
            except Overloaded:
                pass
        else:
            running[tenant] -= 1
            served[tenant] += used
            queue.give_back(done, reserved - used)
        while sum(running.values()) < slots:
            entry = queue.pop(now_s, lambda entry: running[entry.tenant] < most)
            if entry is None:
                break
            sequence += 1
            running[entry.tenant] += 1
            waits[entry.tenant].append(now_s - entry.work)
            heapq.heappush(events, (now_s + tenants[entry.tenant][2] / pace, sequence, entry.tenant, entry))
    return {"served": served, "waits": waits}


def test_equal_weights_get_equal_tokens_while_one_tenant_floods() -> None:
    # All want more than their share; the flood wants fifty times more, in long answers that it hardly uses.
    tenants = {"flood": (100.0, 4000, 800), "b": (8.0, 500, 400), "c": (4.0, 1000, 900), "d": (20.0, 200, 150)}
    result = _simulate(tenants, 300.0, slots=32, pace=100.0, most=32)
    assert _jain([result["served"][tenant] for tenant in tenants]) >= 0.95


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 2, 4)])
@pytest.mark.parametrize(
    "sizes",
    [[(120, 100)] * 3, [(420, 400), (60, 40), (60, 40)], [(2000, 20), (60, 40), (450, 400)]],
    ids=["alike", "long and short", "hardly used"],
)
def test_served_tokens_follow_the_weights_however_long_the_queues_are(weights: tuple, sizes: list) -> None:
    """Callers that come back at once, of whom some tenants' wait longer than it takes to age and others' do not."""
    queue, running, served = FairQueue(), Counter(), Counter()
    events: list[tuple[float, int, int, Entry]] = []

    def ask(tenant: int, now_s: float) -> None:
        queue.push(Entry(str(tenant), sizes[tenant][0], weight=weights[tenant]), now_s)

    for tenant in range(3):
        for _ in range(20):
            ask(tenant, 0.0)
    now_s, number = 0.0, 0
    while now_s < 300:
        while sum(running.values()) < 10:
            entry = queue.pop(now_s, lambda entry: running[entry.tenant] < 6)
            running[entry.tenant] += 1
            number += 1
            heapq.heappush(events, (now_s + sizes[int(entry.tenant)][1] / 50, number, int(entry.tenant), entry))
        now_s, _, tenant, entry = heapq.heappop(events)
        reserved, used = sizes[tenant]
        running[entry.tenant] -= 1
        served[tenant] += used
        queue.give_back(entry, reserved - used)
        ask(tenant, now_s)
    assert _jain([served[tenant] / weight for tenant, weight in enumerate(weights)]) >= 0.95


@pytest.mark.slow
def test_short_requests_do_not_wait_while_a_tenant_floods_with_long_ones() -> None:
    short = {"chat": (2.0, 120, 100)}
    alone = _simulate(short, 600.0, slots=32, pace=100.0, most=26)
    flooded = _simulate(short | {"flood": (50.0, 4000, 4000)}, 600.0, slots=32, pace=100.0, most=26)
    assert flooded["served"]["flood"] > 0.9 * 26 * 100 * 560  # the flood does have its own slots
    for waits in (alone["waits"]["chat"], flooded["waits"]["chat"]):
        assert len(waits) > 1000
        assert sorted(waits)[int(0.95 * len(waits))] == pytest.approx(0.0, abs=0.1)


class AnyOrder(RuleBasedStateMachine):
    """Nothing is lost, nothing comes twice, nothing expired comes, whatever happens in which order."""

    @initialize(aging_s=st.sampled_from([1.0, 10.0]), quantum=st.sampled_from([1, 100, 5000]))
    def begin(self, aging_s: float, quantum: int) -> None:
        self.queue = FairQueue(
            AdmissionRules(max_waiting_per_class=30, max_waiting_per_tenant=12, aging_s=aging_s, quantum_tokens=quantum)
        )
        self.now_s, self.inside = 0.0, []

    @rule(
        tenant=st.sampled_from("abc"),
        cost=st.integers(1, 10_000),
        priority=st.integers(0, 3),
        weight=st.sampled_from([0.001, 1.0, 50.0]),
        allowed_s=st.one_of(st.none(), st.integers(0, 20)),
    )
    def push(self, tenant: str, cost: int, priority: int, weight: float, allowed_s: int | None) -> None:
        deadline_s = float("inf") if allowed_s is None else self.now_s + allowed_s
        entry = Entry(tenant, cost, priority, weight, deadline_s)
        full = (
            sum(one.priority == priority for one in self.inside) >= 30
            or sum(one.tenant == tenant for one in self.inside) >= 12
        )
        try:
            self.queue.push(entry, self.now_s)
            assert not full
            self.inside.append(entry)
        except Overloaded:
            assert full

    @rule(seconds=st.integers(0, 30))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(barred=st.sampled_from(["", "a", "abc"]))
    def pop(self, barred: str) -> None:
        entry = self.queue.pop(self.now_s, lambda entry: entry.tenant not in barred)
        self._settle_expired()
        if entry is None:
            assert all(one.tenant in barred for one in self.inside)
        else:
            assert entry.deadline_s > self.now_s and entry.tenant not in barred
            equals = [one for one in self.inside if one.tenant == entry.tenant and one.priority == entry.priority]
            assert (entry.deadline_s, entry.sequence) == min((one.deadline_s, one.sequence) for one in equals)
            self.inside.remove(entry)
        self._balances()

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.inside:
            entry = self.inside.pop(data.draw(st.integers(0, len(self.inside) - 1)))
            assert self.queue.remove(entry) and not self.queue.remove(entry)
        self._balances()

    def _settle_expired(self) -> None:
        for entry in self.queue.expire(self.now_s):
            assert entry.deadline_s <= self.now_s
            self.inside.remove(entry)

    def _balances(self) -> None:
        assert len(self.queue) == len(self.inside)
        assert self.queue.backlog_tokens == sum(one.cost_tokens for one in self.inside)

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            self._settle_expired()
            left = _pop_all(self.queue, self.now_s)
            self._settle_expired()
            assert sorted(map(id, left)) == sorted(map(id, self.inside))


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(stateful_step_count=40)


@given(st.integers(1, 50))
def test_callers_that_come_and_leave_behind_one_that_stays_take_no_room(seed: int) -> None:
    queue = FairQueue()
    queue.push(Entry("a", 1, priority=1, deadline_s=1.0), 0.0)
    for number in range(500):
        entry = Entry("a", 1, priority=1, deadline_s=100.0 + (number * seed) % 97)
        queue.push(entry, 0.0)
        queue.remove(entry)
    kept = [len(flow.heap) for flow in queue._flows.values()]
    assert max(sum(kept), len(queue._deadlines), sum(map(len, queue._came.values()))) <= 70
