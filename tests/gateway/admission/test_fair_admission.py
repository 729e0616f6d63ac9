"""Admission as a whole: what is taken on the way in is given back once, whichever way a request ends."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import DeadlineExceeded, InvalidArgument, Overloaded
from contract.generation import GenerationRequest, SamplingParams, Usage
from gateway.admission.budget_store import MemoryStore
from gateway.admission.concurrency import Concurrency
from gateway.admission.fair_admission import FairAdmission, Stage, degraded, shortened, stage_at
from gateway.admission.prompt_tokens import PromptTokens
from gateway.admission.sharing import Capacity
from gateway.api.error_responses import hints
from gateway.config.policy import AdmissionRules, DegradationRules
from gateway.config.tenant import Level, Limits, Tenant
from tests.gateway.admission.one_pool import OnePool

REQUEST = GenerationRequest("Hello there", max_tokens=100)
COST = PromptTokens().estimate(REQUEST).tokens + 100


def rules(**options: Any) -> AdmissionRules:
    """Rules without a reserve for short requests, which the tests of that reserve set."""
    return AdmissionRules(**{"short_reserve": 0.0, **options})


RULES = rules()


class AdmissionFixture:
    """An admission and the parts it is made of."""

    def __init__(
        self,
        clock: Any,
        *,
        limit: int = 200,
        rules: AdmissionRules = RULES,
        degradation: DegradationRules | None = None,
        **options: Any,
    ) -> None:
        self.budgets = MemoryStore(clock)
        self.concurrency = Concurrency(limit)
        options = {"rng": random.Random(1), "pools": OnePool(), **options}
        self.admission = FairAdmission(self.budgets, self.concurrency, clock, **options)
        self.admission.change(rules, degradation)

    async def left(self, tenant: Tenant) -> dict[str, float]:
        standings = (await self.budgets.reserve(tenant.levels, 0)).standings
        return {one.demand.bucket: one.balance for one in standings if one.demand.unit == "tokens"}

    def empty(self) -> bool:
        return self.concurrency.in_flight == 0 and all(slots.idle for slots in self.admission._slots.values())


def _tenant(name: str = "acme/r", tokens: int | None = 6000, requests: int | None = None, **more: Any) -> Tenant:
    return Tenant(name=name, levels=(Level(name, Limits(tokens, None, requests)),), **more)


async def test_a_permit_is_charged_for_what_was_used_and_only_once(clock: Any) -> None:
    fixture, tenant = AdmissionFixture(clock), _tenant(requests=60)
    permit = await fixture.admission.admit([REQUEST], tenant)
    assert permit.requests == (REQUEST,) and fixture.admission.running == 1
    assert permit.headers["x-ratelimit-remaining-tokens"] == str(6000 - COST)
    assert permit.headers["x-ratelimit-remaining-requests"] == "59"
    permit.settle(Usage(5, 20))
    permit.settle(None)
    assert await fixture.left(tenant) == {"tokens:acme/r": 5975} and fixture.empty()


async def test_nothing_generated_costs_nothing(clock: Any) -> None:
    fixture, tenant = AdmissionFixture(clock), _tenant()
    (await fixture.admission.admit([REQUEST], tenant)).settle(None)
    assert await fixture.left(tenant) == {"tokens:acme/r": 6000} and fixture.empty()


async def test_callers_without_a_hierarchy_are_admitted_without_a_budget(clock: Any) -> None:
    permit = await AdmissionFixture(clock).admission.admit([REQUEST], Tenant())
    assert permit.headers == {}


async def test_a_budget_that_is_short_says_when_to_come_back(clock: Any) -> None:
    fixture, tenant = AdmissionFixture(clock), _tenant(tokens=600)
    for _ in range(4):
        await fixture.admission.admit([REQUEST], tenant)
    with pytest.raises(Overloaded, match=rf"acme/r has \d+ tokens left and the request may need {COST}") as refused:
        await fixture.admission.admit([REQUEST], tenant)
    short_s = (COST - (600 - 4 * COST)) / 10
    assert short_s <= refused.value.retry_after_s <= short_s * 1.25
    headers = hints(refused.value)
    assert int(headers["retry-after"]) >= refused.value.retry_after_s and "x-ratelimit-remaining-tokens" in headers
    assert int(headers["retry-after-ms"]) == pytest.approx(refused.value.retry_after_s * 1000, abs=1)
    assert fixture.admission.rejected == {"budget": 1} and fixture.concurrency.in_flight == 4


async def test_more_than_the_burst_is_an_invalid_argument_and_leaves_nothing(clock: Any) -> None:
    fixture = AdmissionFixture(clock)
    with pytest.raises(InvalidArgument, match="max_tokens"):
        await fixture.admission.admit([REQUEST], _tenant(tokens=100))
    assert fixture.empty()


async def test_the_hard_cap_refuses_at_once_with_the_drain_rates_hint(clock: Any) -> None:
    fixture = AdmissionFixture(clock, limit=2)
    for _ in range(20):  # which says how little is asked, and nothing about the pace
        clock.advance(10)
        (await fixture.admission.admit([REQUEST], Tenant())).settle(Usage(1, 1))
    held = [await fixture.admission.admit([REQUEST], Tenant()) for _ in range(2)]
    with pytest.raises(Overloaded, match="2 requests are in flight") as refused:
        await fixture.admission.admit([REQUEST], Tenant())
    assert refused.value.retry_after_s <= 1.25
    for _ in range(100):  # a pace of COST tokens each second
        clock.advance(1)
        held.pop(0).settle(Usage(1, 1))
        held.append(await fixture.admission.admit([REQUEST], Tenant()))
    with pytest.raises(Overloaded, match="2 requests are in flight") as refused:
        await fixture.admission.admit([REQUEST], Tenant())
    assert 1.8 <= refused.value.retry_after_s <= 2.2 * 1.25
    assert fixture.admission.rejected == {"concurrency": 2}


async def test_a_full_queue_refuses_and_takes_nothing_from_the_budget(clock: Any) -> None:
    fixture = AdmissionFixture(clock, rules=rules(max_running=1, max_waiting_per_tenant=1))
    tenant = _tenant(requests=60)
    permit = await fixture.admission.admit([REQUEST], tenant)
    waiting = asyncio.ensure_future(fixture.admission.admit([REQUEST], tenant))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="1 of 1 requests of acme/r wait"):
        await fixture.admission.admit([REQUEST], tenant)
    assert (await fixture.left(tenant))["tokens:acme/r"] == 6000 - 2 * COST
    permit.settle(None)
    (await waiting).settle(None)
    assert fixture.empty()


async def test_leaving_the_queue_gives_everything_back(clock: Any) -> None:
    fixture, tenant = AdmissionFixture(clock, rules=rules(max_running=1)), _tenant()
    permit = await fixture.admission.admit([REQUEST], tenant)
    waiting = asyncio.ensure_future(fixture.admission.admit([REQUEST], tenant))
    await asyncio.sleep(0)
    waiting.cancel()
    permit.settle(None)  # in the same moment: the place must not go to the one who is leaving
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await fixture.left(tenant) == {"tokens:acme/r": 6000} and fixture.empty()


async def test_leaving_the_queue_makes_room_at_once(clock: Any) -> None:
    fixture = AdmissionFixture(clock, rules=rules(max_running=1))
    permit = await fixture.admission.admit([REQUEST], Tenant())
    waiting = asyncio.ensure_future(fixture.admission.admit([REQUEST], Tenant()))
    await asyncio.sleep(0)
    assert fixture.admission.waiting == 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert fixture.admission.waiting == 0 and fixture.concurrency.in_flight == 1
    permit.settle(None)
    assert fixture.empty()


async def test_leaving_in_the_moment_of_being_let_in_gives_everything_back(clock: Any) -> None:
    fixture, tenant = AdmissionFixture(clock, rules=rules(max_running=1)), _tenant()
    permit = await fixture.admission.admit([REQUEST], tenant)
    waiting = asyncio.ensure_future(fixture.admission.admit([REQUEST], tenant))
    await asyncio.sleep(0)
    permit.settle(None)
    assert fixture.admission.running == 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await fixture.left(tenant) == {"tokens:acme/r": 6000} and fixture.empty()


async def test_who_waited_until_the_deadline_is_told_and_never_served(clock: Any) -> None:
    fixture, tenant = AdmissionFixture(clock, rules=rules(max_running=1)), _tenant()
    permit = await fixture.admission.admit([REQUEST], tenant)
    hurried = GenerationRequest("Hello", timeout_s=2.0)
    waiting = asyncio.ensure_future(fixture.admission.admit([hurried], tenant))
    await asyncio.sleep(0)
    clock.advance(2)
    permit.settle(None)
    with pytest.raises(DeadlineExceeded, match="queue") as late:
        await waiting
    assert late.value.retry_after_s > 0
    assert await fixture.left(tenant) == {"tokens:acme/r": 6000} and fixture.empty()
    assert fixture.admission.rejected == {"deadline": 1}


async def test_a_deadline_passes_without_anybody_else_moving() -> None:
    fixture = AdmissionFixture(time.monotonic, rules=rules(max_running=1, max_wait_s=0.02))
    await fixture.admission.admit([REQUEST], Tenant())
    with pytest.raises(DeadlineExceeded):
        await fixture.admission.admit([REQUEST], Tenant())


async def test_one_tenant_never_has_all_places(clock: Any) -> None:
    fixture = AdmissionFixture(clock, rules=rules(max_running=10, tenant_share=0.8))
    flood = [asyncio.ensure_future(fixture.admission.admit([REQUEST], Tenant("flood"))) for _ in range(30)]
    await asyncio.sleep(0)
    assert fixture.admission.running == 8
    permits = [await fixture.admission.admit([REQUEST], Tenant("chat")) for _ in range(2)]
    for permit in permits:
        permit.settle(None)
    for task in flood:
        (await task).settle(None)
    assert fixture.empty()


async def test_slots_that_only_wait_at_the_replicas_are_no_room_for_others(clock: Any) -> None:
    pools = OnePool(lambda: Capacity(slots=8, limit=10))  # 8 run, and 2 are sent early
    fixture = AdmissionFixture(clock, pools=pools, rules=rules(tenant_share=0.8))
    flood = [asyncio.ensure_future(fixture.admission.admit([REQUEST], Tenant("flood"))) for _ in range(30)]
    await asyncio.sleep(0)
    assert fixture.admission.running == 6
    for permit in [await fixture.admission.admit([REQUEST], Tenant("chat")) for _ in range(2)]:
        permit.settle(None)
    for task in flood:
        (await task).settle(None)
    assert fixture.empty()


async def test_pressure_shortens_overflows_and_refuses_and_says_so(clock: Any) -> None:
    degradation = DegradationRules(shorter_at=0.2, overflow_at=0.4, refuse_at=0.6, max_tokens=30, overflow="small")
    fixture = AdmissionFixture(clock, limit=10, rules=rules(max_running=1, tenant_share=1), degradation=degradation)
    tenant = _tenant()
    first = await fixture.admission.admit([REQUEST], tenant)
    second = asyncio.ensure_future(fixture.admission.admit([REQUEST], tenant))
    await asyncio.sleep(0)
    third = asyncio.ensure_future(fixture.admission.admit([REQUEST], tenant))
    fourth = asyncio.ensure_future(fixture.admission.admit([REQUEST], tenant))
    await asyncio.sleep(0)
    fifth = await fixture.admission.admit([REQUEST], tenant)  # served elsewhere, so it need not wait
    assert (fifth.target, fifth.headers["x-trident-degraded"]) == ("small", "overflow=small")
    await fixture.admission.admit([REQUEST], tenant)
    with pytest.raises(Overloaded, match="more work than can be done"):
        await fixture.admission.admit([REQUEST], tenant)
    first.settle(None)
    (await second).settle(None)
    shortened = await third
    assert shortened.requests[0].max_tokens == 30 and shortened.headers["x-trident-degraded"] == "max_tokens=30"
    assert not fourth.done() and REQUEST.max_tokens == 100
    shortened.settle(None)
    (await fourth).settle(None)
    assert fixture.admission.degraded == {"max_tokens": 2, "overflow": 2}
    assert fixture.admission.rejected == {"pressure": 1}


async def test_a_thousand_callers_with_every_end_leave_the_books_balanced(clock: Any) -> None:
    rng = random.Random(9)
    fixture = AdmissionFixture(clock, limit=400, rules=rules(max_running=20, max_waiting_per_tenant=60))
    tenants = [_tenant(f"org/{name}", tokens=40_000, priority=name % 3) for name in range(5)]
    used = dict.fromkeys((tenant.name for tenant in tenants), 0)
    most_running = 0

    async def one(tenant: Tenant) -> str:
        nonlocal most_running
        await asyncio.sleep(rng.random() * 0.05)
        try:
            permit = await fixture.admission.admit([REQUEST], tenant)
        except Overloaded:
            return "refused"
        most_running = max(most_running, fixture.admission.running)
        spent = 0
        try:
            await asyncio.sleep(rng.random() * 0.004)
            spent = rng.randint(1, COST)
            return "served"
        finally:
            used[tenant.name] += spent
            permit.settle(Usage(0, spent) if spent else None)

    tasks = [asyncio.ensure_future(one(rng.choice(tenants))) for _ in range(1000)]
    await asyncio.sleep(0.03)
    for task in rng.sample(tasks, 200):
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert {end for end in ends if isinstance(end, str)} == {"served", "refused"}
    assert any(isinstance(end, asyncio.CancelledError) for end in ends)
    assert not [end for end in ends if isinstance(end, Exception)]
    assert 0 < most_running <= 20 and fixture.empty()
    for tenant in tenants:
        assert await fixture.left(tenant) == {f"tokens:{tenant.name}": 40_000 - used[tenant.name]}


def _choices(count: int, **more: Any) -> list[GenerationRequest]:
    return [GenerationRequest("Hello there", max_tokens=100, **more) for _ in range(count)]


async def test_choices_are_reserved_together_their_prompt_once_and_count_as_one_request(clock: Any) -> None:
    fixture, tenant = AdmissionFixture(clock), _tenant(requests=60)
    permit = await fixture.admission.admit(_choices(3), tenant)
    assert permit.headers["x-ratelimit-remaining-tokens"] == str(6000 - COST - 200)
    assert permit.headers["x-ratelimit-remaining-requests"] == "59"
    assert (fixture.admission.running, fixture.concurrency.in_flight) == (3, 3)
    permit.settle(Usage(5, 60))
    assert await fixture.left(tenant) == {"tokens:acme/r": 5935} and fixture.empty()


async def test_callers_with_many_choices_never_wait_for_each_others_slots(clock: Any) -> None:
    fixture = AdmissionFixture(clock, rules=rules(max_running=4, tenant_share=1))
    served = 0

    async def one(tenant: Tenant, count: int) -> None:
        nonlocal served
        permit = await fixture.admission.admit(_choices(count), tenant)
        assert fixture.admission.running <= 4 or count > 4
        await asyncio.sleep(0.001)
        permit.settle(Usage(1, 1))
        served += count

    sizes = [1, 3, 4, 2, 4, 3, 1, 7]  # 7 is wider than all slots: it runs by itself
    tenants = [Tenant("a"), Tenant("b"), Tenant("c")]
    everybody = asyncio.gather(*(one(tenants[number % 3], sizes[number % 8]) for number in range(48)))
    await asyncio.wait_for(everybody, 60)
    assert served == 6 * sum(sizes) and fixture.empty()


async def test_a_wide_request_is_not_kept_out_by_narrow_ones(clock: Any) -> None:
    fixture = AdmissionFixture(clock, rules=rules(max_running=4, tenant_share=1))
    running = [await fixture.admission.admit([REQUEST], Tenant("narrow")) for _ in range(4)]
    wide = asyncio.ensure_future(fixture.admission.admit(_choices(4), Tenant("wide")))
    await asyncio.sleep(0)
    narrow = [asyncio.ensure_future(fixture.admission.admit([REQUEST], Tenant("narrow"))) for _ in range(20)]
    let_in_before = 0
    for _ in range(24):
        await asyncio.sleep(0)
        if wide.done():
            break
        running += [task.result() for task in narrow if task.done() and task.result() not in running]
        let_in_before = sum(task.done() for task in narrow)
        running.pop(0).settle(Usage(COST - 100, 100))
    assert wide.done() and let_in_before <= 10  # about what four slots use, and the slots that become free
    for permit in (await wide, *running):
        permit.settle(None)
    for task in narrow:
        (await task).settle(None)
    assert fixture.empty()


async def test_more_choices_than_a_cap_allows_are_an_invalid_argument(clock: Any) -> None:
    fixture = AdmissionFixture(clock, limit=10)
    capped = Tenant("acme", levels=(Level("acme", Limits(max_in_flight=2)),))
    with pytest.raises(InvalidArgument, match="n: must be at most 2, "):
        await fixture.admission.admit(_choices(3), capped)
    with pytest.raises(InvalidArgument, match="n: must be at most 10, "):
        await fixture.admission.admit(_choices(11), Tenant())
    permit = await fixture.admission.admit(_choices(2), capped)
    with pytest.raises(Overloaded, match="acme has 2 requests under way and may have 2"):
        await fixture.admission.admit([REQUEST], capped)
    permit.settle(None)
    assert fixture.empty()


async def test_a_reader_of_anothers_answer_costs_a_request_and_no_tokens(clock: Any) -> None:
    fixture, tenant = AdmissionFixture(clock, limit=2), _tenant(tokens=10, requests=2)
    permits = [await fixture.admission.admit_reader(tenant) for _ in range(2)]
    assert permits[1].headers["x-ratelimit-remaining-requests"] == "0" and fixture.admission.running == 0
    with pytest.raises(Overloaded, match="2 requests are in flight"):
        await fixture.admission.admit_reader(tenant)
    for permit in permits:
        permit.settle(None)
    with pytest.raises(Overloaded, match="0 requests left") as refused:
        await fixture.admission.admit_reader(tenant)
    assert refused.value.reason == "budget" and fixture.empty()
    assert await fixture.left(tenant) == {"tokens:acme/r": 10}


async def test_an_overflow_target_that_cannot_take_them_leaves_the_stage_below(clock: Any) -> None:
    degradation = DegradationRules(shorter_at=0.1, overflow_at=0.1, refuse_at=1.0, max_tokens=30, overflow="small")
    fixture = AdmissionFixture(clock, limit=10, degradation=degradation)
    first = await fixture.admission.admit([REQUEST], Tenant())
    assert (
        await fixture.admission.admit([REQUEST], Tenant(), lambda target, requests: target == "small")
    ).target == "small"
    shortened = await fixture.admission.admit(_choices(2), Tenant(), lambda target, requests: len(requests) < 2)
    assert shortened.target == "" and [one.max_tokens for one in shortened.requests] == [30, 30]
    assert first.headers == {}


async def test_rules_change_while_requests_run_and_wait(clock: Any) -> None:
    slots = 1
    fixture = AdmissionFixture(clock, pools=OnePool(lambda: Capacity(slots, slots)), rules=rules(tenant_share=1))
    first = await fixture.admission.admit([REQUEST], Tenant())
    waiting = asyncio.ensure_future(fixture.admission.admit([REQUEST], Tenant()))
    await asyncio.sleep(0)
    assert not waiting.done() and fixture.admission.slots().queue.by_class == {1: 1}
    slots = 2
    fixture.admission.change(
        rules(tenant_share=1), DegradationRules(shorter_at=0.001, overflow_at=0.001, refuse_at=0.002)
    )
    (await waiting).settle(None)
    with pytest.raises(Overloaded, match="more work"):
        await fixture.admission.admit([REQUEST], Tenant())
    first.settle(None)
    assert fixture.empty()


LONG = GenerationRequest("Hello", max_tokens=1000)


@pytest.mark.parametrize(
    ("pressure", "overflow", "stage"),
    [
        (0.0, "", Stage.NONE),
        (0.69, "small", Stage.NONE),
        (0.7, "small", Stage.SHORTER),
        (0.85, "small", Stage.OVERFLOW),
        (0.85, "", Stage.SHORTER),
        (1.0, "small", Stage.REFUSE),
    ],
)
def test_stages_begin_where_they_are_set(pressure: float, overflow: str, stage: Stage) -> None:
    assert stage_at(pressure, DegradationRules(overflow=overflow)) is stage


@given(st.floats(0, 2), st.floats(0, 2))
def test_more_pressure_never_gives_up_less(one: float, other: float) -> None:
    order = list(Stage)
    degradation = DegradationRules(overflow="small")
    assert order.index(stage_at(min(one, other), degradation)) <= order.index(stage_at(max(one, other), degradation))


def test_answers_are_shortened_and_it_is_said() -> None:
    assert degraded(LONG, DegradationRules(max_tokens=64)).max_tokens == 64
    assert LONG.max_tokens == 1000


def test_what_asks_for_less_is_left_alone() -> None:
    original = GenerationRequest("Hello", max_tokens=10)
    assert degraded(original, DegradationRules()) is original


def test_a_continued_stream_keeps_the_limit_that_it_began_with() -> None:
    original = GenerationRequest("Hello", max_tokens=1000, continue_ids=(1,))
    assert degraded(original, DegradationRules()) is original


def test_a_promised_minimum_is_kept() -> None:
    original = GenerationRequest("Hello", max_tokens=1000, sampling=SamplingParams(min_tokens=300))
    assert degraded(original, DegradationRules(max_tokens=64)).max_tokens == 300


def test_a_cap_counts_what_is_continued() -> None:
    original = GenerationRequest("Hello", max_tokens=1000, continue_ids=(1, 2, 3))
    assert [shortened(original, most).max_tokens for most in (2, 5)] == [3, 5]
