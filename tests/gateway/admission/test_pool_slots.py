"""The slots of a pool: by hand, and by law over random sequences of everything that callers and replicas do."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import DeadlineExceeded, Overloaded
from contract.generation import GenerationRequest, Usage
from gateway.admission.budget_store import MemoryStore
from gateway.admission.concurrency import Concurrency
from gateway.admission.fair_admission import FairAdmission, Permit
from gateway.admission.fair_queue import Entry
from gateway.admission.pool_slots import SHORT, Claim, DrainRate, PoolSlots, retry_after_s
from gateway.admission.sharing import Capacity
from gateway.config.policy import AdmissionRules, DegradationRules
from gateway.config.tenant import Tenant


class SomePools:
    """Pools by name with what each can run; ``dead`` ones take part in no draw."""

    def __init__(self, **slots: int) -> None:
        self.slots = slots
        self.dead: set[str] = set()

    def prompt_weight(self) -> float:
        return 1.0

    def draw(self, pinned: str, session: str = "", without: str | None = None) -> str:
        return pinned or next(pool for pool in self.slots if pool not in self.dead and pool != without)

    def capacity(self, pool: str) -> Capacity:
        return Capacity(self.slots[pool], math.ceil(self.slots[pool] * 1.25))


def rules(**options: Any) -> AdmissionRules:
    """Rules without a reserve for short requests, which the tests of that reserve set."""
    return AdmissionRules(**{"short_reserve": 0.0, **options})


def made(pools: SomePools, clock: Any, **options: Any) -> FairAdmission:
    limit, own, degradation = (options.pop(name, None) for name in ("limit", "rules", "degradation"))
    admission = FairAdmission(MemoryStore(clock), Concurrency(limit or 1000), clock, pools=pools, **options)
    admission.change(own or rules(), degradation, tuple(pools.slots))
    return admission


def generation_requests(max_tokens: int = 100, count: int = 1, **more: Any) -> list[GenerationRequest]:
    return [GenerationRequest("Hello", max_tokens=max_tokens, **more) for _ in range(count)]


def start(admission: FairAdmission, tenant: Tenant, count: int = 1, **more: Any) -> list[asyncio.Future]:
    return [asyncio.ensure_future(admission.admit(generation_requests(**more), tenant)) for _ in range(count)]


async def leave(*tasks: asyncio.Future) -> None:
    for task in tasks:
        task.cancel()
    for end in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(end, Permit):
            end.settle(None)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def pinned(name: str, pool: str, **more: Any) -> Tenant:
    return Tenant(name, pool=pool, **more)


async def test_a_flood_at_one_pool_takes_no_slot_of_another(clock: Any) -> None:
    admission = made(SomePools(private=1, shared=4), clock)
    flood = start(admission, pinned("flood", "private"), 60)
    await settled()
    assert admission.slots("private").running == 1 and admission.slots("shared").running == 0
    for number in range(4):
        (permit,) = start(admission, pinned(f"chat{number}", "shared"))
        await settled()
        assert permit.done()
        flood.append(permit)
    await leave(*flood)
    assert all(admission.slots(pool).idle for pool in ("private", "shared"))


async def test_slots_of_an_idle_pool_are_no_slots_of_a_busy_one(clock: Any) -> None:
    admission = made(SomePools(main=4, side=64), clock, rules=rules(tenant_share=1.0))
    flood = start(admission, pinned("flood", "main"), 60)
    await settled()
    assert admission.slots("main").running == 5 and admission.slots("main").waiting == 55
    await leave(*flood)
    assert admission.slots("main").idle


async def test_pressure_is_of_the_pool_that_is_asked_for(clock: Any) -> None:
    degradation = DegradationRules(shorter_at=0.05, overflow_at=0.05, refuse_at=0.1, max_tokens=30)
    admission = made(SomePools(private=1, shared=4), clock, degradation=degradation)
    flood = start(admission, pinned("flood", "private"), 40)
    await settled()
    assert admission.pressure(pinned("flood", "private"), "private") >= 0.1
    permit = await admission.admit(generation_requests(), pinned("flood", "shared"))
    assert permit.requests[0].max_tokens == 100 and not permit.headers
    permit.settle(None)
    await leave(*flood)


async def test_a_flood_at_one_pool_leaves_another_its_part_of_the_hard_cap(clock: Any) -> None:
    admission = made(SomePools(private=1, shared=4), clock, limit=100, rules=rules(max_waiting_per_tenant=1000))
    flood = start(admission, pinned("flood", "private"), 150)
    await settled()
    assert sum(isinstance(one.exception(), Overloaded) for one in flood if one.done() and one.exception()) == 60
    chat = [await admission.admit(generation_requests(), pinned("chat", "shared")) for _ in range(3)]
    for permit in chat:
        permit.settle(None)
    await leave(*flood)


async def test_an_overflow_pool_is_sent_what_it_can_run_and_keeps_a_queue_no_longer_than_that(clock: Any) -> None:
    degradation = DegradationRules(shorter_at=0.01, overflow_at=0.01, refuse_at=9.0, max_tokens=30, overflow="small")
    admission = made(SomePools(main=4, draft=2), clock, degradation=degradation, target_pool=lambda target: "draft")
    tenants = [pinned(f"t{number}", "main") for number in range(8)]
    flood = [task for tenant in tenants for task in start(admission, tenant, 25)]
    await settled()
    draft = admission.slots("draft")
    assert (draft.running, draft.waiting) == (3, 2)  # one is sent ahead
    await leave(*flood)
    assert draft.idle and admission.slots("main").idle


async def test_choices_begin_and_end_one_by_one_and_block_no_other(clock: Any) -> None:
    admission = made(SomePools(main=8), clock, rules=rules(tenant_share=0.75))
    main = admission.slots("main")
    wide = await admission.admit(generation_requests(count=16), pinned("wide", "main"))
    turns = [turn.begin() for turn in wide.turns]
    assert sum(turn.done() for turn in turns) == main.running == 6
    (narrow,) = start(admission, pinned("narrow", "main"))
    await settled()
    assert narrow.done() and main.running == 7
    for number in range(10):
        wide.turns[number].release()
        wide.turns[number].release()
        assert sum(turn.done() for turn in turns) == min(16, 7 + number)
    assert main.running == 7 and not main.waiting
    narrow.result().settle(None)
    wide.settle(Usage(1, 100))
    assert main.idle


async def test_choices_that_wait_longer_than_the_queue_allows_have_the_requests_own_time(clock: Any) -> None:
    admission = made(SomePools(main=2), clock, rules=rules(tenant_share=1.0, max_wait_s=10.0))
    wide = await admission.admit(generation_requests(count=4, timeout_s=60.0), pinned("wide", "main"))
    last = wide.turns[3].begin()
    clock.advance(20)
    admission.slots("main").dispatch()
    assert not last.done()
    clock.advance(41)
    admission.slots("main").dispatch()
    with pytest.raises(DeadlineExceeded):
        await last
    wide.settle(None)
    assert admission.slots("main").idle


async def test_a_choice_moves_to_another_pool_and_takes_a_slot_there(clock: Any) -> None:
    pools = SomePools(one=2, two=1)
    admission = made(pools, clock, rules=rules(tenant_share=1.0))
    permits = [await admission.admit(generation_requests(), Tenant("a")) for _ in range(3)]
    assert [permit.turns[0].pool for permit in permits] == ["one"] * 3
    pools.dead.add("one")
    moving = [asyncio.ensure_future(permit.turns[0].move()) for permit in permits]
    await settled()
    assert [move.done() for move in moving] == [True, True, False] and admission.slots("one").running == 0
    assert admission.slots("two").running == 2
    permits[0].settle(Usage(1, 1))
    assert await moving[2] == "two"
    permits[1].settle(None)
    permits[2].settle(None)
    assert admission.slots("one").idle and admission.slots("two").idle
    assert not (await admission.admit(generation_requests(), pinned("b", "two"))).turns[0].may_move


async def test_long_answers_of_many_tenants_leave_slots_for_short_ones(clock: Any) -> None:
    admission = made(SomePools(main=8), clock, rules=rules(short_reserve=0.1))
    main = admission.slots("main")
    flood = [task for number in range(6) for task in start(admission, pinned(f"t{number}", "main"), 10)]
    await settled()
    assert main.running == 7  # of 8
    for priority in (0, 1):
        short = [
            await admission.admit(generation_requests(5), pinned("chat", "main", priority=priority)) for _ in range(3)
        ]
        for permit in short:
            permit.settle(None)
    (medium,) = start(admission, pinned("chat", "main"), max_tokens=int(100 * SHORT) + 1)
    await settled()
    assert not medium.done()
    await leave(medium, *flood)
    assert main.idle


async def test_an_endless_stream_of_short_requests_does_not_starve_a_long_one(clock: Any) -> None:
    admission = made(SomePools(main=4), clock, rules=rules(short_reserve=0.25))
    (first,) = start(admission, pinned("long", "main"), max_tokens=1000)
    await settled()
    flood = [task for number in range(3) for task in start(admission, pinned(f"t{number}", "main"), 30, max_tokens=5)]
    (second,) = start(admission, pinned("other", "main"), max_tokens=1000)
    served = 0
    while not second.done():
        await settled()
        running = [one for one in flood if one.done()]
        if running:
            flood.remove(running[0])
            running[0].result().settle(Usage(1, 5))
            flood += start(admission, pinned(f"t{served % 3}", "main"), max_tokens=5)
            served += 1
        assert served < 1000  # as many tokens of each other tenant as the long one may use
    await leave(first, second, *flood)
    assert admission.slots("main").idle


@given(
    reserved=st.integers(100, 32_000), used=st.floats(0.01, 1.0), slots=st.integers(2, 12), before=st.integers(1, 40)
)
def test_a_tenant_that_was_there_first_shares_equally_with_one_that_comes_later(
    reserved: int, used: float, slots: int, before: int
) -> None:
    """Whatever it reserved and did not use while it had the pool for itself."""

    async def play() -> None:
        shared = rules(tenant_share=1.0, quantum_tokens=1)
        pool = PoolSlots(lambda: 0.0, lambda: Capacity(slots, slots), shared)
        running: list[Claim] = []
        waiting: list[Claim] = []
        order: list[str] = []

        def step(*tenants: str) -> None:
            for tenant in tenants:
                while pool.queue.by_tenant.get(tenant, 0) < 5:
                    waiting.append(pool.claim(Entry(tenant, reserved), math.inf))
            for claim in [claim for claim in waiting if claim.given]:
                waiting.remove(claim)
                running.append(claim)
                order.append(claim.entry.tenant)
            running.pop(0).close(reserved * used)

        for _ in range(before):
            step("first")
        order.clear()
        for _ in range(200):
            step("first", "later")
        assert 80 <= order.count("later") <= 120

    asyncio.run(play())


async def test_a_pool_that_can_run_more_is_noticed(clock: Any) -> None:
    pools = SomePools(main=1)
    admission = made(pools, clock, rules=rules(tenant_share=1.0))
    flood = start(admission, pinned("a", "main"), 6)
    await settled()
    assert admission.slots("main").running == 2
    pools.slots["main"] = 4
    admission.check(clock())
    assert admission.slots("main").running == 5
    await leave(*flood)


POOLS = ("one", "two", "three")


@given(st.data())
def test_whatever_happens_no_slot_is_lost_and_none_is_idle_while_a_request_may_have_it(data: st.DataObject) -> None:
    asyncio.run(_anything(data))


async def _anything(data: st.DataObject) -> None:
    now_s, sizes = 0.0, {pool: data.draw(st.integers(1, 9), label=pool) for pool in POOLS}
    drawn = rules(
        tenant_share=data.draw(st.sampled_from([0.5, 0.8, 1.0])),
        short_reserve=data.draw(st.sampled_from([0.0, 0.1, 0.3])),
        max_waiting_per_tenant=8,
        max_waiting_per_class=20,
    )
    pools = {
        pool: PoolSlots(
            lambda: now_s,
            lambda pool=pool: Capacity(sizes[pool], math.ceil(sizes[pool] * 1.25)),
            drawn,
        )
        for pool in POOLS
    }
    claims: list[Claim] = []

    def check() -> None:
        for pool, slots in pools.items():
            here = [claim for claim in claims if claim.pool is slots]
            assert slots.running == sum(len(claim._held) for claim in here)
            assert slots._reserved == sum(sum(claim._held.values()) for claim in here)
            assert slots.queue.backlog_tokens == sum(one.entry.cost_left for one in here if one.entry.waiting)
            assert slots.waiting == sum(claim.entry.waiting for claim in here)
            limits, of_tenant = slots._limits(), Counter()
            for claim in here:
                of_tenant[claim.entry.tenant] += len(claim._held)
            # Work conservation: no request waits that may have a slot that is free.
            for claim in here:
                if claim.entry.waiting and not claim.left and slots.running < limits.limit:
                    head = min(
                        (one.entry for one in here if one.entry.waiting and one.entry.tenant == claim.entry.tenant),
                        key=lambda entry: (entry.priority, entry.sequence),
                    )
                    if head is claim.entry and len({one.entry.priority for one in here}) == 1:
                        assert not slots._may_run(claim.entry, limits), pool

    for _ in range(data.draw(st.integers(1, 60), label="steps")):
        step = data.draw(st.sampled_from(["claim", "claim", "release", "close", "time", "resize", "leave"]))
        pool = data.draw(st.sampled_from(POOLS))
        before = {name: (slots.running - slots._reserved, slots._reserved) for name, slots in pools.items()}
        if step == "claim":
            count, longest = data.draw(st.integers(1, 12)), data.draw(st.sampled_from([5, 100, 1000]))
            entry = Entry(
                data.draw(st.sampled_from("abc")),
                longest * count + 7,
                1,
                1.0,
                now_s + 30,
                count,
                longest_tokens=longest,
            )
            try:
                claim = pools[pool].claim(entry, now_s + 60)
            except Overloaded:
                continue
            claims.append(claim)
            claim.turn(0).add_done_callback(lambda turn: turn.cancelled() or turn.exception())
        elif step == "release" and claims:
            claim = data.draw(st.sampled_from(claims))
            claim.release(data.draw(st.integers(0, 11)))
        elif step == "close" and claims:
            claim = claims.pop(data.draw(st.integers(0, len(claims) - 1)))
            claim.close(3)
        elif step == "leave" and claims:
            claim = data.draw(st.sampled_from(claims))
            if not claim.given:
                claim.turn(0).cancel()
        elif step == "time":
            now_s += data.draw(st.sampled_from([1.0, 20.0]))
            for slots in pools.values():
                slots.dispatch()
        elif step == "resize":
            sizes[pool] = data.draw(st.integers(1, 9))
            pools[pool].dispatch()
        for name, slots in pools.items():  # above the limit only what ran before it fell
            # Open and reserved slots each: where the limits have shrunk, the reserve may still be free.
            limits, (open_before, reserved_before) = slots._limits(), before[name]
            assert slots.running - slots._reserved <= max(limits.open, open_before)
            assert slots._reserved <= max(limits.limit - limits.open, reserved_before)
        check()
    # Everybody who is still there gets all slots in the end, or runs out of time: nothing is stuck.
    for _ in range(500):
        for claim in list(claims):
            for number in range(claim.given):
                claim.release(number)
            if not claim.entry.waiting:
                claim.close(1)
                claims.remove(claim)
        if not claims:
            break
        if any(claim.left for claim in claims):
            for claim in [claim for claim in claims if claim.left]:
                claim.close(0)
                claims.remove(claim)
    assert not claims and all(slots.idle for slots in pools.values())


@given(st.data())
def test_less_urgent_classes_leave_their_slots_free_and_no_other_slot_is_idle(data: st.DataObject) -> None:
    asyncio.run(_classes(data))


async def _classes(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 12), label="slots")
    shares = sorted((data.draw(st.sampled_from([0.1, 0.25, 0.5, 0.9, 1.0])) for _ in range(3)), reverse=True)
    slots = PoolSlots(lambda: 0.0, lambda: Capacity(size, size), rules(tenant_share=1.0))
    claims: list[Claim] = []
    for step in range(data.draw(st.integers(1, 40), label="steps")):
        if claims and data.draw(st.booleans()):
            claim = claims.pop(data.draw(st.integers(0, len(claims) - 1)))
            claim.close(1)
        else:
            priority = data.draw(st.integers(0, 2))
            entry = Entry(f"tenant {step % 3}", 10, priority, longest_tokens=10, share=shares[priority])
            claims.append(slots.claim(entry, math.inf))
        running = Counter(claim.entry.priority for claim in claims if claim._held)
        waiting = {claim.entry.priority for claim in claims if claim.entry.waiting}
        for priority, share in enumerate(shares):
            most = max(1, math.floor(size * share))
            together = sum(running[other] for other in range(priority, 3))
            assert running[priority] <= (most if share < 1 else size)
            if priority in waiting and sum(running.values()) < size:
                assert share < 1 and together >= most
    for claim in claims:
        claim.close(0)
    assert slots.idle


def test_a_steady_pace_is_found_and_a_new_one_followed() -> None:
    drain, now_s = DrainRate(memory_s=10), 100.0
    for pace in (500, 2000):
        for _ in range(600):
            now_s += 0.1
            drain.observe(pace / 10, now_s)
        assert drain.tokens_per_s(now_s) == pytest.approx(pace, rel=0.03)


def test_the_pace_is_right_before_the_memory_is_full() -> None:
    drain = DrainRate(memory_s=60)
    for tenth in range(31):
        drain.observe(100, tenth / 10)
    assert drain.tokens_per_s(3.0) == pytest.approx(1000, rel=0.1)


def test_nothing_seen_or_nothing_done_for_long_is_no_pace() -> None:
    drain = DrainRate()
    assert drain.tokens_per_s(5) == 0
    drain.observe(1000, 5)
    assert drain.tokens_per_s(500) < 1e-9


def test_the_hint_is_backlog_by_pace_with_jitter_above_it() -> None:
    rng = random.Random(1)
    hints = [retry_after_s(5000, 1000, rng) for _ in range(1000)]
    assert min(hints) >= 5 and max(hints) <= 6.25
    assert len({round(hint, 3) for hint in hints}) > 500


@given(st.floats(0, 1e12), st.floats(0, 1e12), st.integers())
def test_a_hint_is_always_within_its_bounds(backlog: float, pace: float, seed: int) -> None:
    assert 0.1 <= retry_after_s(backlog, pace, random.Random(seed)) <= 75
