"""One bucket by hand and by law; what is wanted of it; what callers are told."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from contract.errors import InvalidArgument
from contract.generation import Usage
from gateway.admission.budgets import FREE, Bucket, Charge, Demand, Reservation, Standing, demands
from gateway.config.policy import ModelPrice
from gateway.config.tenant import Level, Limits


def _demand(amount: float, capacity: float = 100, rate_per_s: float = 10) -> Demand:
    return Demand("tokens:acme", rate_per_s, capacity, amount, held=True)


def test_what_is_reserved_does_not_refill_until_it_is_settled() -> None:
    bucket = Bucket(100, 100, 0.0)
    bucket.take("a", _demand(100), 1000)
    bucket.refill(_demand(0), 60)
    assert bucket.balance == 0
    bucket.settle("a", 40)
    assert bucket.balance == 60
    bucket.refill(_demand(0), 62)
    assert bucket.balance == 80


def test_more_used_than_reserved_is_owed_and_paid_off_by_time() -> None:
    bucket = Bucket(100, 100, 0.0)
    bucket.take("a", _demand(50), 1000)
    bucket.settle("a", 170)
    assert bucket.balance == -70
    bucket.refill(_demand(0), 7)
    assert bucket.balance == 0


def test_a_reservation_past_its_lease_counts_as_used_and_cannot_be_refunded() -> None:
    bucket = Bucket(100, 100, 0.0)
    bucket.take("a", _demand(100), 50)
    bucket.refill(_demand(0), 53)
    assert (bucket.balance, bucket.held) == (30, 0)  # what flowed in since the lease ended
    bucket.settle("a", 0)
    assert bucket.balance == 30


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = Bucket(100, 0, 100.0)
    bucket.refill(_demand(0), 90)
    bucket.refill(_demand(0), 100)
    assert bucket.balance == 0


def test_every_level_with_a_limit_is_asked_and_the_burst_is_a_minute_if_not_given() -> None:
    key = Level("acme/r/k", Limits(requests_per_minute=60, burst_requests=5))
    levels = (Level("acme", Limits(tokens_per_minute=600)), Level("acme/r"), key)
    assert demands(levels, 100) == (
        Demand("tokens:acme", 10, 600, 100, held=True),
        Demand("requests:acme/r/k", 1, 5, 1, held=False),
    )


def test_a_request_that_can_never_fit_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match=r"max_tokens: .* 601 tokens, more than acme may .* at most 600"):
        demands((Level("acme", Limits(tokens_per_minute=600)),), 601)


def test_headers_are_of_the_tightest_level_of_each_unit() -> None:
    standings = (
        Standing(Demand("tokens:acme", 10, 1000, 50, True), 400.9),
        Standing(Demand("tokens:acme/r", 1, 100, 50, True), 40.5),
        Standing(Demand("requests:acme", 1, 60, 1, False), 59),
    )
    assert Reservation("id", True, standings).headers == {
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "40",
        "x-ratelimit-reset-tokens": "59500ms",
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1000ms",
    }


def test_a_refusal_is_by_the_level_that_takes_longest() -> None:
    quick = Standing(_demand(50, rate_per_s=10), 10)
    slow = Standing(_demand(50, rate_per_s=1), 20)
    refused = Reservation("id", False, (quick, slow)).refused_by
    assert refused is slow and refused.wait_s == 30


class AnyOrder(RuleBasedStateMachine):
    """Reservations, settlements and time in any order. However a token is counted, no span overruns."""

    @initialize(capacity=st.integers(1, 200), rate=st.integers(1, 50))
    def begin(self, capacity: int, rate: int) -> None:
        self.capacity, self.rate, self.now_s = capacity, rate, 0.0
        self.bucket = Bucket(capacity, capacity, 0.0)
        self.open: dict[str, float] = {}
        self.spends: list[tuple[float, float, float]] = []  # reserved at, settled at, used
        self.reserved_at: dict[str, float] = {}
        self.count = 0

    def _want(self, amount: float) -> Demand:
        return _demand(amount, self.capacity, self.rate)

    @rule(seconds=st.integers(0, 20))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(amount=st.integers(1, 200))
    def reserve(self, amount: int) -> None:
        want = self._want(amount)
        self.bucket.refill(want, self.now_s)
        if self.bucket.balance >= amount:
            self.count += 1
            self.bucket.take(str(self.count), want, float("inf"))
            self.open[str(self.count)], self.reserved_at[str(self.count)] = amount, self.now_s

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        if self.open:
            one = data.draw(st.sampled_from(sorted(self.open)))
            amount = self.open.pop(one)
            used = data.draw(st.integers(0, int(amount)))
            self.bucket.refill(self._want(0), self.now_s)
            self.bucket.settle(one, used)
            before = (self.bucket.balance, self.bucket.held)
            self.bucket.settle(one, 0)  # a second time
            assert (self.bucket.balance, self.bucket.held) == before
            self.spends.append((self.reserved_at[one], self.now_s, used))

    @invariant()
    def the_account_is_never_more_than_full(self) -> None:
        if hasattr(self, "bucket"):
            assert self.bucket.held == sum(self.open.values())
            assert self.bucket.balance >= 0
            assert self.bucket.balance + self.bucket.held <= self.capacity

    def teardown(self) -> None:
        for moment in (0, 1):
            times = sorted({spend[moment] for spend in getattr(self, "spends", [])})
            for first in times:
                for last in (time for time in times if time >= first):
                    used = sum(spend[2] for spend in self.spends if first <= spend[moment] <= last)
                    assert used <= self.capacity + self.rate * (last - first)


TestAnyOrder = pytest.mark.slow(AnyOrder.TestCase)


@given(st.floats(-1e6, 1e6), st.integers(1, 10**6))
def test_waiting_as_long_as_told_is_enough(balance: float, amount: int) -> None:
    standing = Standing(_demand(amount, 10**6, 7), balance)
    assert balance + standing.wait_s * 7 >= amount - 1e-6


PRICES = st.decimals(0, 100, places=6).map(float)
TOKENS = st.integers(0, 10**6)


@given(PRICES, PRICES, PRICES, TOKENS, TOKENS, TOKENS)
def test_money_is_exact_and_rounded_once(
    input_: float, cached: float, output: float, prompt: int, hits: int, tokens: int
) -> None:
    charge, hits = Charge(price=ModelPrice(input=input_, cached=cached, output=output)), min(hits, prompt)
    parts = (input_, prompt - hits), (cached, hits), (output, tokens)
    exact = sum(Decimal(repr(price)) * count for price, count in parts) * 1000
    micros = charge.micros(Usage(prompt, tokens, hits))
    assert micros == int(exact.quantize(Decimal(1), ROUND_HALF_UP))
    assert micros <= charge.most_micros(prompt, tokens)


def test_cached_tokens_are_told_only_where_they_have_a_price() -> None:
    usage, levels = Usage(10, 5, 4), (Level("a"), Level("a/b"), Level("a/b/c"))
    told = Charge("r", "demo", "chat", ModelPrice(input=1.0, cached=0.5)).record(1.0, levels, usage)
    assert (told.key, told.prompt_tokens, told.cached_tokens, told.micros) == ("a/b/c", 10, 4, 8000)
    assert Charge(price=ModelPrice(input=1.0)).record(1.0, levels, usage)[-3:] == (0, 5, 10_000)
    assert FREE.record(1.0, (), None)[-4:] == (0, 0, 0, 0)
