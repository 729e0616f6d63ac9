"""The scaling law: its properties on any load and any state, and a day of traffic."""

from __future__ import annotations

import bisect
import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.scaling.law import Decision, Load, _State, decide
from cluster.scaling.rules import PoolRules

NOW_S = 1_790_000_000.0 // 86_400 * 86_400  # a midnight
amounts = st.floats(0, 1e7, allow_nan=False)
by_class = st.dictionaries(st.integers(0, 9), amounts, max_size=3)
loads = st.builds(
    Load,
    complete=st.booleans(),
    queued=by_class,
    running=by_class,
    queued_requests=st.floats(0, 1e4),
    running_requests=st.floats(0, 1e4),
    arrived_per_s=st.none() | amounts,
    cost=st.floats(0.01, 10),
    ready=st.integers(0, 30),
    tokens_per_s=st.just(0.0) | st.floats(1, 1e5),
    slots=st.just(0.0) | st.floats(1, 512),
)


@st.composite
def any_rules(draw: st.DrawFn) -> PoolRules:
    least = draw(st.integers(0, 5))
    most = draw(st.integers(max(1, least), 20))
    money = draw(st.booleans())
    return PoolRules(
        min_replicas=least,
        max_replicas=most,
        warm_replicas=draw(st.integers(0, 3)),
        step_up=draw(st.integers(1, 8)),
        step_down=draw(st.integers(1, 8)),
        tokens_per_s=draw(st.sampled_from([0.0, 100.0])),
        replica_hour=2.0 if money else 0.0,
        cost_per_hour=float(2 * draw(st.integers(max(1, least), 30))) if money else 0.0,
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
FIELDS = tuple(decide(PoolRules(), Load(), None, NOW_S).state)
states = json_values | st.dictionaries(st.sampled_from(FIELDS), json_values) | st.dictionaries(st.integers(), st.none())


def again(decision: Decision) -> object:
    """The state as it is after a file or a wire."""
    return json.loads(json.dumps(decision.state, allow_nan=False))


def test_the_state_that_was_given_stays_as_it_was():
    pool = Pool(PoolRules(max_replicas=20))
    pool.run(300.0, 20)
    before = json.dumps(pool.state)
    load = Load(arrived_per_s=900.0, ready=pool.ready + 1, tokens_per_s=50.0)
    first, second = (decide(pool.rules, load, pool.state, pool.now_s + 1000) for _ in range(2))
    assert json.dumps(pool.state) == before and first == second


def test_a_replica_that_told_when_it_is_ready_is_counted_by_that():
    state = decide(PoolRules(max_replicas=50), Load(ready=4), None, NOW_S, 4).state
    load = Load(queued={1: 30_000.0}, queued_requests=60, arrived_per_s=0.0, ready=1, tokens_per_s=100.0)
    late = decide(PoolRules(max_replicas=50), load, state, NOW_S + 1, 4)
    soon = decide(PoolRules(max_replicas=50), replace(load, starting=3, starting_s=5.0), state, NOW_S + 1, 4)
    assert soon.demand < late.demand


def test_a_first_decision_counts_the_replicas_that_start():
    assert decide(PoolRules(), Load(ready=1, starting=3), None, NOW_S).wanted == 4


@given(any_rules(), st.none() | loads, states, st.floats(0, 1e10), st.none() | st.integers(0, 50))
def test_any_load_and_any_state_stay_within_the_bounds(rules, load, state, now_s, target):
    decision = decide(rules, load, state, now_s, target)
    assert rules.min_replicas <= decision.wanted <= rules.ceiling <= rules.max_replicas
    assert not rules.cost_per_hour or decision.wanted * rules.replica_hour <= rules.cost_per_hour
    assert decision.reason and math.isfinite(decision.demand) and math.isfinite(decision.forecast)
    following = decide(rules, load, again(decision), now_s + 1)
    assert rules.min_replicas <= following.wanted <= rules.ceiling


@given(any_rules(), states, st.integers(0, 25), st.lists(st.floats(0.1, 1000), min_size=1, max_size=8))
def test_while_nothing_is_known_the_number_holds(rules, state, target, pauses):
    now_s, held = NOW_S, min(max(target, rules.min_replicas), rules.ceiling)
    for pause_s in pauses:
        decision = decide(rules, None, state, now_s, target)
        assert decision.wanted == held and decision.rule in ("unknown", "floor", "ceiling")
        state, target, now_s = again(decision), held, now_s + pause_s


@given(any_rules(), loads, states, st.integers(0, 20))
def test_a_part_of_the_load_removes_nothing(rules, load, state, target):
    decision = decide(rules, replace(load, complete=False), state, NOW_S, target)
    assert decision.wanted >= min(max(target, rules.min_replicas), rules.ceiling)


@given(any_rules(), loads, states, st.integers(0, 20), st.floats(1, 10), st.integers(0, 9), amounts)
def test_more_load_never_wants_less(rules, load, state, target, factor, priority, queued):
    more = replace(
        load,
        queued={**load.queued, priority: load.queued.get(priority, 0.0) + queued},
        running={name: tokens * factor for name, tokens in load.running.items()},
        queued_requests=load.queued_requests * factor,
        running_requests=load.running_requests * factor,
        arrived_per_s=None if load.arrived_per_s is None else load.arrived_per_s * factor,
    )
    assert decide(rules, more, state, NOW_S, target).wanted >= decide(rules, load, state, NOW_S, target).wanted


@given(loads, states)
def test_more_capacity_never_wants_more(load, state):
    load = replace(load, complete=True, tokens_per_s=max(load.tokens_per_s, 1.0))
    quick = replace(load, tokens_per_s=load.tokens_per_s * 2)
    assert decide(PoolRules(), quick, state, NOW_S, 3).wanted <= decide(PoolRules(), load, state, NOW_S, 3).wanted


class Pool:
    """A pool that is scaled: tokens come, ready replicas work them off, ordered ones take their time to start."""

    def __init__(self, rules: PoolRules, start_s: float = 60.0, tokens_per_s: float = 100.0, ready: int = 1) -> None:
        self.rules, self.start_s, self.each = rules, start_s, tokens_per_s
        self.now_s, self.ready, self.starting, self.queue = NOW_S, ready, [], 0.0
        self.state: object = None
        self.wanted: list[int] = []
        self.latest: Decision | None = None
        self.replica_s = 0.0

    def step(self, per_s: float, every_s: float = 5.0, known: bool = True) -> int:
        self.now_s += every_s
        self.ready += sum(at_s <= self.now_s for at_s in self.starting)
        self.starting = [at_s for at_s in self.starting if at_s > self.now_s]
        done = min(self.queue + per_s * every_s, self.ready * self.each * every_s)
        self.queue += per_s * every_s - done
        self.replica_s += (self.ready + len(self.starting)) * every_s
        busy = min(8.0 * self.ready, done / every_s / self.each * 8 * 0.8)
        load = Load(
            queued={1: self.queue} if self.queue else {},
            queued_requests=self.queue / 100,
            running={1: done},
            running_requests=busy,
            arrived_per_s=per_s,
            ready=self.ready,
            tokens_per_s=self.each if self.ready else 0.0,
            slots=8.0 if self.ready else 0.0,
        )
        self.latest = decide(self.rules, load if known else None, self.state, self.now_s)
        self.state = json.loads(json.dumps(self.latest.state))
        wanted = self.latest.wanted
        have = self.ready + len(self.starting)
        self.starting += [self.now_s + self.start_s] * max(0, wanted - have)
        while wanted < self.ready + len(self.starting):
            if self.starting:
                self.starting.pop()
            else:
                self.ready -= 1
        self.wanted.append(wanted)
        return wanted

    def run(self, per_s, steps: int, **more) -> list[int]:
        return [self.step(per_s() if callable(per_s) else per_s, **more) for _ in range(steps)]


def changes(numbers: list[int]) -> int:
    return sum(one != other for one, other in zip(numbers, numbers[1:], strict=False))


@pytest.mark.slow  # hours of made-up traffic, as below
@given(st.floats(0, 900), st.sampled_from([3.0, 10.0, 15.0]))
def test_a_constant_load_settles_and_then_nothing_moves(per_s, every_s):
    pool = Pool(PoolRules(max_replicas=20))
    pool.run(per_s, int(4500 / every_s), every_s=every_s)
    settled = pool.run(per_s, int(1800 / every_s), every_s=every_s)
    assert changes(settled) == 0 and pool.queue == 0
    least, most = (max(1, math.ceil(per_s * (1 + part) / 100 - 0.01)) for part in (0.2, 0.4))
    assert least <= settled[-1] <= most


@pytest.mark.slow
@given(st.floats(20, 900), st.integers(0, 2**32))
def test_a_noisy_load_does_not_move_it_to_and_fro(per_s, seed):
    rng = random.Random(seed)
    pool = Pool(PoolRules(max_replicas=30))

    def noisy() -> float:
        return per_s * rng.uniform(0.75, 1.25)

    pool.run(noisy, 720)
    assert changes(pool.run(noisy, 720)) <= 1  # an hour each; it may go up by one noise that was not met before


@pytest.mark.parametrize("every_s", [5.0, 15.0])
def test_few_long_requests_do_not_move_it_to_and_fro(every_s):
    """0.3 requests/s of 100 tokens, each 24 s on one of 4 slots: what arrives within 15 s varies by half."""
    rng, rules = random.Random(5), PoolRules(max_replicas=20)
    at_s, ready, state, wanted = 0.0, 2, None, []
    instants: list[float] = []
    while at_s < 5 * 3600:
        instants.append(at_s := at_s + rng.expovariate(0.3))
    for number in range(int(5 * 3600 / every_s)):
        now_s = (number + 1) * every_s
        come = bisect.bisect(instants, now_s) - bisect.bisect(instants, now_s - 15)
        held = bisect.bisect(instants, now_s) - bisect.bisect(instants, now_s - 24)
        running, queued = min(held, 4 * ready), max(0, held - 4 * ready)
        load = Load(
            True, {1: 100.0 * queued}, {1: 100.0 * running}, queued, running, 100 * come / 15, 1.0, ready,
            tokens_per_s=17.0, slots=4.0,
        )  # fmt: skip
        decision = decide(rules, load, state, NOW_S + now_s)
        state, ready = decision.state, decision.wanted
        wanted.append(ready)
    settled = wanted[len(wanted) // 5 :]
    assert changes(settled) <= 6 and 2 < min(settled) and max(settled) <= 6  # by single readings 26 changes


@pytest.mark.slow
@given(states, st.floats(0, 900))
def test_from_any_state_it_finds_back(state, per_s):
    lost = Pool(PoolRules(max_replicas=20))
    lost.state = state
    lost.run(per_s, 480, every_s=15.0)
    least, most = (max(1, math.ceil(per_s * (1 + part) / 100 - 0.01)) for part in (0.2, 0.4))
    assert least <= lost.wanted[-1] <= max(most, 1)


def test_a_state_of_tomorrow_or_of_another_version_is_of_no_harm():
    pool = Pool(PoolRules())
    pool.run(250.0, 100)
    state = {**pool.state, "up_s": pool.now_s + 1e9, "changed_s": 1e300, "version": 99, "recent": [[pool.now_s * 2, 3]]}
    assert decide(PoolRules(), None, state, pool.now_s).wanted == pool.wanted[-1]


@pytest.mark.parametrize("begin_s", [0.0, NOW_S])  # of a clock that starts at 0 the first minutes are as any others
def test_the_vector_of_replicas(begin_s: float):
    """Overload at 120, 240 and 360 s adds one each; after it one is removed, and not before 300 s have passed."""
    rules, state, seen = PoolRules(max_replicas=5, step_up=1), None, []
    for at_s, waiting in ((0, 10), (120, 100), (240, 150), (360, 150), (600, 5), (1000, 5)):
        overload = waiting > 50
        load = Load(
            queued={1: waiting * 500.0 * overload},
            queued_requests=waiting * overload,
            running_requests=1,
            arrived_per_s=waiting,
            ready=state["wanted"] if state else 1,
            tokens_per_s=100.0,
            slots=8,
        )
        decision = decide(rules, load, state, begin_s + at_s)
        state = again(decision)
        seen.append(decision.wanted)
    assert seen == [1, 2, 3, 4, 4, 3]


def test_the_first_action_is_not_blocked():
    load = Load(arrived_per_s=500.0, ready=1, tokens_per_s=100.0)
    for now_s in (0.0, 5.0, NOW_S):
        assert decide(PoolRules(), load, None, now_s).wanted == 7


def test_cooldowns():
    pool = Pool(PoolRules(step_up=1, max_replicas=20))
    pool.run(2000.0, 60)  # five minutes
    ups = [number for number, (one, other) in enumerate(zip(pool.wanted, pool.wanted[1:], strict=False)) if other > one]
    assert ups and all((later - first) * 5 >= 60 for first, later in zip(ups, ups[1:], strict=False))
    pool = Pool(PoolRules(max_replicas=20), ready=10)
    pool.run(0.0, 360)
    downs = [number for number, (a, b) in enumerate(zip(pool.wanted, pool.wanted[1:], strict=False)) if b < a]
    assert (downs[0] + 1) * 5 >= 300 and all((b - a) * 5 >= 300 for a, b in zip(downs, downs[1:], strict=False))
    assert all(a - b <= 1 for a, b in zip(pool.wanted, pool.wanted[1:], strict=False))


def test_an_overload_is_answered_in_proportion_and_not_once_more_while_replicas_start():
    pool = Pool(PoolRules(max_replicas=50), start_s=120.0)
    assert pool.step(650.0) == 9  # 1 + step_up
    assert max(pool.run(650.0, 24)) <= 15  # two minutes, in which nobody new is ready
    assert pool.latest.starting == pool.wanted[-1] - pool.ready


def test_waiting_of_an_urgent_class_needs_more_than_that_of_a_patient_one():
    def wanted(priority: int) -> int:
        load = Load(queued={priority: 20_000.0}, queued_requests=40, arrived_per_s=0.0, ready=1, tokens_per_s=100.0)
        return decide(PoolRules(max_replicas=500, step_up=500, start_s=5.0), load, None, NOW_S).wanted

    assert wanted(0) > wanted(1) > wanted(5) > wanted(9) == 1


def test_work_is_tokens_times_their_cost():
    load = Load(arrived_per_s=1000.0, ready=1, tokens_per_s=100.0)
    assert [
        decide(PoolRules(max_replicas=50, step_up=50), replace(load, cost=cost), None, NOW_S).wanted
        for cost in (0.1, 0.5, 1.0)
    ] == [2, 7, 14]


def test_running_requests_need_their_slots():
    load = Load(running={1: 100.0}, running_requests=30, arrived_per_s=1.0, ready=2, tokens_per_s=1000.0, slots=8)
    assert decide(PoolRules(), load, None, NOW_S).wanted == 6


def test_without_a_measured_capacity_the_declared_one_or_the_slots_decide():
    load = Load(queued={1: 9e3}, queued_requests=30, running_requests=10, arrived_per_s=500.0, ready=1)
    assert decide(PoolRules(tokens_per_s=100.0), load, None, NOW_S).wanted == 9
    assert decide(PoolRules(), replace(load, slots=10), None, NOW_S).wanted == 6
    held = decide(PoolRules(), load, None, NOW_S)
    assert held.wanted == 1 and "not known" in held.reason


def test_scale_to_zero_and_back():
    pool = Pool(PoolRules(min_replicas=0, zero_after_s=600.0))
    pool.run(0.0, 118)  # just short of ten minutes
    assert pool.wanted[-1] == 1
    pool.run(0.0, 10)
    assert pool.wanted[-1] == 0 and "no work" in pool.latest.reason
    pool.run(0.0, 10)
    pool.run(0.0, 500, known=False)
    assert pool.wanted[-1] == 0
    assert pool.step(90.0) >= 1  # at once: there is no cooldown from zero
    pool.run(90.0, 60)
    assert pool.queue == 0 and pool.ready >= 1


def test_an_outage_of_the_metrics_holds_and_its_end_removes_nothing_at_once():
    pool = Pool(PoolRules(max_replicas=20))
    pool.run(500.0, 200)
    before = pool.wanted[-1]
    assert set(pool.run(500.0, 1000, known=False)) == {before}
    assert set(pool.run(0.0, 59)) == {before}
    assert pool.run(0.0, 10)[-1] == before - 1


def test_warm_replicas_come_on_top():
    load = Load(running_requests=1, arrived_per_s=150.0, ready=1, tokens_per_s=100.0)
    assert decide(PoolRules(), load, None, NOW_S).wanted == 3
    assert decide(PoolRules(warm_replicas=2), load, None, NOW_S).wanted == 5
    assert decide(PoolRules(warm_replicas=2, min_replicas=0), Load(), None, NOW_S).wanted == 2


def test_a_late_start_is_not_counted_on():
    pool = Pool(PoolRules(max_replicas=20, start_s=30.0), start_s=1e9)
    pool.run(150.0, 2)
    first = pool.wanted[-1]
    pool.run(150.0, 60)
    assert pool.wanted[-1] > first


def test_the_start_of_a_replica_is_measured():
    pool = Pool(PoolRules(max_replicas=20, start_s=10.0), start_s=120.0)
    pool.run(500.0, 60)
    assert pool.state["start_s"] == pytest.approx(120.0, abs=6)


@pytest.mark.parametrize("target", [None, 4])
def test_the_return_of_a_replica_is_no_start(target: int | None):
    rules, load = PoolRules(max_replicas=20), Load(arrived_per_s=200.0, ready=4, tokens_per_s=100.0)
    state, at_s = None, NOW_S
    for ready in (4, 4, 3, 3, 4, 2, 3, 4, 4):
        decision = decide(rules, replace(load, ready=ready), state, at_s, target)
        state, at_s = again(decision), at_s + 5
        assert decision.wanted == 4 and decision.starting == 4 - ready and state["start_s"] == 0
    ordered = decide(rules, replace(load, arrived_per_s=5000.0), state, at_s, target)
    assert ordered.wanted > 4
    come = replace(load, arrived_per_s=5000.0, ready=ordered.wanted)
    assert decide(rules, come, again(ordered), at_s + 90, target and ordered.wanted).state["start_s"] == 90


def test_beside_a_lost_replica_no_start_is_measured():
    rules, load = PoolRules(max_replicas=20), Load(arrived_per_s=200.0, ready=3, tokens_per_s=100.0)
    state = decide(rules, replace(load, ready=4), None, NOW_S).state
    ordered = decide(rules, replace(load, arrived_per_s=5000.0), state, NOW_S + 5)
    assert ordered.wanted > 4
    for ready, at_s in ((4, 10), (ordered.wanted, 90)):  # which of them returned, and which was started?
        ordered = decide(rules, replace(load, arrived_per_s=5000.0, ready=ready), again(ordered), NOW_S + at_s)
        assert ordered.state["start_s"] == 0


def test_ceiling_and_floor_are_told():
    load = Load(arrived_per_s=5000.0, ready=3, tokens_per_s=100.0)
    rules = PoolRules(max_replicas=10, replica_hour=2.0, cost_per_hour=6.0)
    decision = decide(rules, load, None, NOW_S, 3)
    assert decision.wanted == 3 and decision.rule == "ceiling" and "cost_per_hour allows 3" in decision.reason
    decision = decide(PoolRules(min_replicas=2), Load(), None, NOW_S, 0)
    assert decision.wanted == 2 and decision.rule == "floor" and "min_replicas is 2" in decision.reason


def day(at_s: float, rng: random.Random) -> float:
    """Tokens per second: a night of 30, a steep morning at nine, a busy afternoon, noise."""
    hour = at_s % 86_400 / 3600
    base = 30 + 800 / (1 + math.exp(-(hour - 9) * 12)) - 700 / (1 + math.exp(-(hour - 19) * 4))
    return base * rng.uniform(0.85, 1.15)


@pytest.mark.slow
def test_three_days_of_traffic():
    rng, pool = random.Random(5), Pool(PoolRules(max_replicas=20), start_s=120.0)
    waited, moves, most = [], [], []
    for _ in range(3):
        begun, wanted = 0.0, []
        for _ in range(86_400 // 10):
            wanted.append(pool.step(day(pool.now_s, rng), every_s=10.0))
            begun += pool.queue * 10
        waited.append(begun)
        moves.append(changes(wanted))
        most.append(max(wanted))
    assert all(count <= 40 for count in moves) and max(most) <= 14
    ideal_s = sum(day(at_s, random.Random(1)) / 100 * 10 for at_s in range(0, 3 * 86_400, 10))
    assert pool.replica_s < 1.75 * ideal_s  # 20 to 40 % of it are headroom
    assert waited[1] < waited[0] / 2 and waited[2] < waited[0] / 2  # the second morning was expected


def test_of_a_damaged_state_the_rest_is_kept():
    state = _State.from_json({"wanted": 3, "level": "x", "days": [1.0], "unknown": 1}, 100.0)
    assert (state.wanted, state.level, state.days) == (3, 0.0, _State().days)
