"""Days and months in both stores: never over a hard limit, charged to the period of the reservation, kept for good."""

from __future__ import annotations

import asyncio
import datetime
import os
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import InvalidArgument, Overloaded, Unavailable
from contract.generation import GenerationRequest, Usage
from gateway.admission.budget_store import BudgetStore, MemoryStore, RedisStore, connect
from gateway.admission.budgets import Charge
from gateway.admission.concurrency import Concurrency
from gateway.admission.fair_admission import FairAdmission
from gateway.config.policy import ModelPrice
from gateway.config.settings import Settings
from gateway.config.tenant import Level, Limits, Quota, Scope, Tenant, applying
from gateway.usage.store import UsageRecord, UsageStore
from tests.gateway.admission.one_pool import OnePool
from tests.gateway.conftest import SteppedClock

BERLIN = "Europe/Berlin"
Make = Callable[..., BudgetStore]


def at(text: str, zone: str = BERLIN) -> float:
    return datetime.datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


@pytest_asyncio.fixture(params=["memory", "redis"])
async def make(request: pytest.FixtureRequest, clock: SteppedClock) -> AsyncIterator[Make]:
    """``make(lease_s=…)``: a store whose clocks are both the stepped one; in memory with a database."""
    stores: list[BudgetStore] = []
    if request.param == "memory":
        path = request.getfixturevalue("tmp_path") / "usage"

        def new(**options: Any) -> BudgetStore:
            database = UsageStore(Settings(usage_db=path), clock)
            stores.append(MemoryStore(clock, database=database, wall=clock, **options))
            return stores[-1]

        yield new
        for store in stores:
            await store.aclose()
        return
    redis = connect(f"unix://{request.getfixturevalue('redis_socket')}")
    await redis.flushall()

    def shared(**options: Any) -> BudgetStore:
        stores.append(RedisStore(redis, clock, wall=clock, **options))
        return stores[-1]

    yield shared
    for store in stores:
        await store.aclose()
    await redis.aclose()


def day(most: int, level: str = "acme", **more: Any) -> Level:
    return Level(level, Limits(quotas=(Quota("day", False, most, time_zone=BERLIN, **more),)))


async def left(store: BudgetStore, *levels: Level) -> list[float]:
    return [standing.balance for standing in (await store.reserve(levels, 0)).standings]


async def settled(store: BudgetStore, *levels: Level, tokens: int, used: int, micros: int = 0) -> bool:
    reservation = await store.reserve(levels, tokens, micros=micros)
    store.settle(reservation, used, micros)
    if isinstance(store, RedisStore):
        await store._writing.done()
    return reservation.granted


async def test_a_limit_holds_until_its_day_ends_and_the_next_begins_anew(make: Make, clock: SteppedClock) -> None:
    clock.now_s = at("2026-10-25T01:00")  # a day of 25 hours
    store = make()
    assert await settled(store, day(100), tokens=80, used=70)
    refused = await store.reserve((day(100),), 31)
    assert not refused.granted and refused.refused_by.wait_s == 24 * 3600
    assert (refused.refused_by.demand.limit, refused.refused_by.demand.level) == ("tokens_per_day", "acme")
    clock.now_s = at("2026-10-25T23:59:59")
    assert await left(store, day(100)) == [30]
    clock.now_s = at("2026-10-26T00:00")
    assert await left(store, day(100)) == [100]


async def test_a_request_over_midnight_is_charged_to_the_day_of_its_reservation(
    make: Make, clock: SteppedClock
) -> None:
    clock.now_s = at("2026-11-30T23:59:50")
    store, levels = make(), (day(100), Level("acme/a", Limits(quotas=(Quota("month", False, 500, time_zone=BERLIN),))))
    reservation = await store.reserve(levels, 60)
    clock.now_s = at("2026-12-01T00:00:10")
    assert await left(store, *levels) == [100, 500]
    store.settle(reservation, 60)
    assert await left(store, *levels) == [100, 500]
    clock.now_s = at("2026-11-30T23:59:59")  # a clock that is put back finds what was charged
    await asyncio.sleep(0.05)
    assert await left(store, *levels) == [40, 440]


async def test_money_and_tokens_are_counted_apart(make: Make, clock: SteppedClock) -> None:
    clock.now_s = at("2028-02-29T12:00")
    quotas = (Quota("month", True, 1_000_000, time_zone=BERLIN), Quota("day", False, 1000, time_zone=BERLIN))
    store, level = make(), Level("acme", Limits(quotas=quotas))
    assert await settled(store, level, tokens=100, used=90, micros=700_000)
    assert await left(store, level) == [300_000, 910]
    refused = await store.reserve((level,), 1, micros=300_001)
    assert refused.refused_by.demand.limit == "money_per_month" and refused.refused_by.wait_s == 12 * 3600


async def test_a_request_that_no_day_has_room_for_is_told_so_and_not_to_come_back(make: Make) -> None:
    store = make()
    with pytest.raises(InvalidArgument, match="max_tokens: .* 101 tokens, more than acme may .* at most 100 together"):
        await store.reserve((day(100),), 101)
    assert not (await store.reserve((day(100),), 101, 100)).granted  # an estimate may be too high
    assert await left(store, day(100)) == [100]


async def test_a_soft_limit_refuses_nothing_and_counts_on(make: Make, clock: SteppedClock) -> None:
    clock.now_s = at("2026-11-23T12:00")
    store = make()
    assert await settled(store, day(50, soft=True), tokens=80, used=80)
    assert await settled(store, day(50, soft=True), tokens=80, used=20)
    assert await left(store, day(50, soft=True)) == [-50]


async def test_a_changed_limit_keeps_what_was_spent(make: Make, clock: SteppedClock) -> None:
    clock.now_s = at("2026-11-23T12:00")
    store = make()
    held = await store.reserve((day(100),), 60)
    assert await left(store, day(200)) == [140] and await left(store, day(50)) == [-10]
    store.settle(held, 30)
    await asyncio.sleep(0.05)
    assert await left(store, day(100)) == [70]


async def test_what_a_dead_gateway_had_reserved_counts_as_used_after_its_lease(make: Make, clock: SteppedClock) -> None:
    clock.now_s = at("2026-11-23T12:00")
    store = make(lease_s=100)
    lost = await store.reserve((day(100),), 60)
    clock.advance(101)
    assert await left(store, day(100)) == [40]
    store.settle(lost, 0)
    await asyncio.sleep(0.05)
    assert await left(store, day(100)) == [40]


async def test_a_scope_has_a_budget_of_its_own(make: Make, clock: SteppedClock) -> None:
    clock.now_s = at("2026-11-23T12:00")
    scopes = tuple(
        Scope(model, endpoint, Limits(quotas=(Quota("day", False, most, time_zone=BERLIN),)))
        for model, endpoint, most in (("large", "", 100), ("", "chat", 200), ("large:sql", "chat", 50))
    )
    store, levels = make(), (Level("acme", scopes=scopes),)
    for model, endpoint, tokens in (
        ("large", "chat", 10),
        ("large:sql", "chat", 5),
        ("small", "chat", 1),
        ("x", "batch", 9),
    ):
        assert await settled(store, *applying(levels, model, endpoint), tokens=tokens, used=tokens)
    every = applying(levels, "large:sql", "chat")
    assert [level.name for level in every[1:]] == [
        "acme model=large",
        "acme endpoint=chat",
        "acme model=large:sql endpoint=chat",
    ]
    assert await left(store, *every) == [85, 184, 45]


async def test_many_at_once_never_spend_more(make: Make, clock: SteppedClock) -> None:
    clock.now_s = at("2026-11-23T12:00")
    stores = [make()] if make.__name__ == "new" else [make(), make()]
    levels, rng = (day(1000), day(700, "acme/a")), random.Random(1)

    async def one(number: int) -> int:
        store = stores[number % len(stores)]
        reservation = await store.reserve(levels, 20)
        await asyncio.sleep(0)
        used = rng.randint(0, 20) if reservation.granted else 0
        store.settle(reservation, used)
        return used

    used = sum(await asyncio.gather(*(one(number) for number in range(200))))
    await asyncio.sleep(0.1)
    assert 0 < used <= 700
    assert await left(stores[0], *levels) == [1000 - used, 700 - used]


# What is drawn: minutes that pass, tokens reserved, tokens used, and whether the gateway dies and starts again.
STEPS = st.lists(st.tuples(st.integers(0, 900), st.integers(1, 60), st.integers(0, 60), st.integers(0, 5)), max_size=25)


@settings(max_examples=5)
@given(STEPS, st.sampled_from(["UTC", BERLIN, "America/St_Johns"]))
def test_what_is_charged_is_what_was_used_whenever_it_ends_and_whoever_dies(
    tmp_path_factory: pytest.TempPathFactory, steps: list, zone: str
) -> None:
    """Against a model of two lines: each period has its sum, and a reservation that nobody settles is used whole."""

    async def run() -> None:
        clock, path = SteppedClock(at("2026-10-24T12:00", zone)), tmp_path_factory.mktemp("db") / "usage"
        level = Level(
            "a", Limits(quotas=tuple(Quota(length, False, 100, time_zone=zone) for length in ("day", "month")))
        )
        charged: dict[str, int] = {}
        store = MemoryStore(clock, 60.0, UsageStore(Settings(usage_db=path), clock), clock)
        for minutes, tokens, used, dies in steps:
            clock.advance(60 * minutes)
            reservation = await store.reserve((level,), tokens)
            if not reservation.granted:
                assert max(charged.get(one.demand.bucket, 0) for one in reservation.standings) + tokens > 100
                continue
            if dies:
                store.settle(reservation, min(used, tokens))
            else:
                used = tokens
            for standing in reservation.standings:
                charged[standing.demand.bucket] = charged.get(standing.demand.bucket, 0) + min(used, tokens)
            assert max(charged.values()) <= 100
            if dies <= 1:
                await store.aclose() if dies else os.close(store._lock)  # as kill -9 does
                store = MemoryStore(clock, 60.0, UsageStore(Settings(usage_db=path), clock), clock)
        clock.advance(61)
        for standing in (await store.reserve((level,), 0)).standings:
            assert 100 - standing.balance == charged.get(standing.demand.bucket, 0)
        await store.aclose()

    asyncio.run(run())


async def test_a_reservation_that_cannot_be_written_is_refused(tmp_path: Path, clock: SteppedClock) -> None:
    clock.now_s = at("2026-11-23T12:00")
    database = UsageStore(Settings(usage_db=tmp_path / "usage"), clock)
    store = MemoryStore(clock, database=database, wall=clock)
    database.close()
    with pytest.raises(Unavailable, match="the usage database failed"):
        await store.reserve((day(100),), 10)
    assert (await store.reserve((Level("free", Limits(tokens_per_minute=10)),), 10)).granted
    assert store._buckets["tokens_per_day@2026-11-23:acme"].balance == 100
    await store.aclose()


async def test_a_second_gateway_may_not_count_in_the_same_file(tmp_path: Path, clock: SteppedClock) -> None:
    store = MemoryStore(clock, database=UsageStore(Settings(usage_db=tmp_path / "usage")))
    with pytest.raises(InvalidArgument, match="give each its own, and share budgets with"):
        MemoryStore(clock, database=UsageStore(Settings(usage_db=tmp_path / "usage")))
    await store.aclose()


# What is drawn: prompt, cached part of it, completion, max_tokens, and choices.
WORK = st.lists(
    st.tuples(st.integers(1, 40), st.floats(0, 1), st.integers(0, 50), st.integers(1, 50), st.integers(1, 3))
)


@given(WORK, st.floats(0.001, 5), st.floats(0.001, 5))
def test_the_ledger_is_what_was_charged_and_what_answers_said(work: list, price: float, output: float) -> None:
    async def run() -> None:
        clock = SteppedClock(at("2026-11-23T12:00"))
        quotas = (Quota("day", False, 3000), Quota("month", True, 5_000_000), Quota("day", True, 1, soft=True))
        tenant = Tenant("acme/a", levels=(Level("acme", Limits(quotas=quotas)),))
        budgets = MemoryStore(clock, wall=clock)
        admission = FairAdmission(budgets, Concurrency(100), clock, pools=OnePool())
        charged: list[UsageRecord] = []
        admission.on_charged = charged.append
        charge, said = Charge("r", "m", "chat", ModelPrice(input=price, cached=price / 2, output=output)), []
        for prompt, cached, tokens, most, choices in work:
            request = GenerationRequest(text_input="x" * 4 * prompt, max_tokens=most)
            try:
                permit = await admission.admit([request] * choices, tenant, charge=charge)
            except Overloaded as refused:
                assert refused.reason == "quota"
                continue
            said.append(Usage(prompt, min(tokens, most) * choices, int(cached * prompt)))
            permit.settle(said[-1])
            permit.settle(None)
        assert [(one.prompt_tokens, one.completion_tokens) for one in charged] == [
            (usage.input_tokens, usage.output_tokens) for usage in said
        ]
        tokens, money, soft = (await budgets.reserve(tenant.levels, 0)).standings
        used = sum(one.prompt_tokens + one.completion_tokens for one in charged)
        assert 3000 - tokens.balance == used <= 3000
        assert 5_000_000 - money.balance == sum(one.micros for one in charged) == 1 - soft.balance
        assert money.balance >= 0

    asyncio.run(run())


async def test_memory_forgets_days_that_are_over_and_nothing_is_reserved_of(clock: SteppedClock) -> None:
    store = MemoryStore(clock, 100.0, wall=clock)
    levels = (day(10),)
    for _ in range(1023):
        store.settle(await store.reserve(levels, 1), 0)
    assert len(store._buckets) == 1
    clock.advance(86_400)
    for _ in range(1024):
        store.settle(await store.reserve(levels, 1), 0)
    assert list(store._buckets) == [(await store.reserve(levels, 0)).standings[0].demand.bucket]
