"""Budgets on every level from the organisation down to the key: tokens and requests per minute, tokens and money of a
day or a month; and what a request is charged by, the price of its model.

A budget is a token bucket. It is reserved before the work and settled after it, and what is reserved stays in the
bucket's account until then: ``balance + held <= capacity``, refilling included. So in any span of time no more than
``capacity + rate * span`` are spent, and what prompts that run had in tokens beyond their estimate: that is charged
when they are settled, below 0 if need be. A bucket that forgot its reservations would refill while they run and then
take their refund on top. The cost: large reservations that are hardly used slow the refilling.

A day or a month is a bucket of its own that never refills: a request is charged to the one in which it was reserved,
whenever it ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from contract.errors import InvalidArgument
from contract.generation import Usage
from gateway.config.calendar import period_at
from gateway.config.policy import ModelPrice
from gateway.config.tenant import Level, Levels
from gateway.usage.store import UsageRecord


@dataclass(frozen=True)
class Demand:
    """What one request needs of one bucket.

    bucket: ``tokens:acme/research``, ``tokens_per_day@2026-11-23:acme/research``.
    held: kept until it is settled; otherwise spent at once.
    left_s: until the end of its day or month; 0 for a bucket that refills.
    money: amounts are millionths of the currency.
    soft: more than there is may be taken. warn_at: the part of the capacity from which on callers are told.
    """

    bucket: str
    rate_per_s: float
    capacity: float
    amount: float
    held: bool
    left_s: float = 0.0
    money: bool = False
    soft: bool = False
    warn_at: float = 1.0

    @property
    def limit(self) -> str:
        """The field of its level in the file, for a day or month."""
        return self.unit.partition("@")[0]

    def of(self, tokens: int, micros: int) -> int:
        """Return which of the two it counts."""
        return micros if self.money else tokens

    @property
    def unit(self) -> str:
        return self.bucket.partition(":")[0]

    @property
    def level(self) -> str:
        return self.bucket.partition(":")[2]


def demands(
    levels: Levels, tokens: int, least: int | None = None, micros: int = 0, at_s: float = 0.0
) -> tuple[Demand, ...]:
    """Return what a request that may use ``tokens`` needs of each bucket of ``levels``; of a smaller bucket, all. The
    request itself is spent at once and stays spent, also if it is cancelled.

    micros: what it may cost, in millionths of the currency. at_s: Unix time, for days and months.
    Raises InvalidArgument if it could never fit, as it may use no less than ``least``: by default ``tokens``.
    """
    least = tokens if least is None else least
    required = []
    for level in levels:
        limits = level.limits
        if limits.tokens_per_minute is not None:
            capacity = limits.burst_tokens or limits.tokens_per_minute
            _check_fits(least, capacity, level)
            rate_per_s = limits.tokens_per_minute / 60
            required.append(Demand(f"tokens:{level.name}", rate_per_s, capacity, min(tokens, capacity), held=True))
        if limits.requests_per_minute is not None:
            capacity = limits.burst_requests or limits.requests_per_minute
            rate_per_s = limits.requests_per_minute / 60
            required.append(Demand(f"requests:{level.name}", rate_per_s, capacity, 1, held=False))
        for quota in limits.quotas:
            if not quota.soft and not quota.money:
                _check_fits(least, quota.most, level)
            period = period_at(quota.length, quota.time_zone, at_s)
            amount, left_s = micros if quota.money else tokens, period.end_s - at_s
            told = (left_s, quota.money, quota.soft, quota.warn_at)
            required.append(Demand(f"{quota.name}@{period.name}:{level.name}", 0.0, quota.most, amount, True, *told))
    return tuple(required)


def _check_fits(least: int, most: int, level: Level) -> None:
    """Raises InvalidArgument for a request that no wait would help."""
    if least > most:
        problem = f"prompt and answer may need {least} tokens, more than {level.name} may ever use at once"
        raise InvalidArgument("max_tokens", f"{problem}: must be at most {most} together")


@dataclass(frozen=True)
class Standing:
    """A bucket after a reservation was granted or refused. balance: what is free in it."""

    demand: Demand
    balance: float

    @property
    def short(self) -> float:
        """The missing amount; 0 if the balance was sufficient, or need not be."""
        return 0.0 if self.demand.soft else max(0.0, self.demand.amount - self.balance)

    @property
    def wait_s(self) -> float:
        """Seconds until the missing amount is refilled, if no other request takes it, or a new day or month begins."""
        if self.demand.left_s:
            return self.demand.left_s if self.short else 0.0
        return self.short / self.demand.rate_per_s


@dataclass(frozen=True)
class Reservation:
    """The outcome: granted on all buckets, or refused and nothing taken from any. ``id`` settles it."""

    id: str
    granted: bool
    standings: tuple[Standing, ...] = ()

    @property
    def refused_by(self) -> Standing | None:
        """The bucket that takes longest to have enough."""
        return None if self.granted else max(self.standings, key=lambda standing: standing.wait_s)

    @property
    def headers(self) -> dict[str, str]:
        """``x-ratelimit-{limit,remaining,reset}-{requests,tokens}`` of the tightest level of each unit."""
        values: dict[str, str] = {}
        for unit in ("requests", "tokens"):
            standings = [standing for standing in self.standings if standing.demand.unit == unit]
            if standings:
                tightest = min(standings, key=lambda standing: standing.balance)
                demand, balance = tightest.demand, tightest.balance
                full_s = max(0.0, demand.capacity - balance) / demand.rate_per_s
                values[f"x-ratelimit-limit-{unit}"] = f"{demand.capacity:.0f}"
                values[f"x-ratelimit-remaining-{unit}"] = str(max(0, math.floor(balance)))
                values[f"x-ratelimit-reset-{unit}"] = f"{math.ceil(full_s * 1000)}ms"
        return values


@dataclass
class Bucket:
    """One bucket in memory. leases: reserved amounts by reservation, with the time each is given up, which rises from
    one to the next: then it counts as used whole. held: their sum. ends_s: of its day or month; 0 for none."""

    capacity: float
    balance: float
    at_s: float
    held: float = 0.0
    leases: dict[str, tuple[float, float]] = field(default_factory=dict)
    rate_per_s: float = 0.0
    ends_s: float = 0.0

    def refill(self, demand: Demand, now_s: float) -> None:
        """Refill the bucket up to ``now_s``, lease by lease; a clock that went back changes nothing."""
        if demand.left_s:  # what was spent of it stays spent where the limit changes
            self.balance += demand.capacity - self.capacity
        self.capacity, self.rate_per_s = demand.capacity, demand.rate_per_s
        while self.leases:
            oldest = next(iter(self.leases))
            amount, until_s = self.leases[oldest]
            if until_s > now_s:
                break
            self._add_refill(until_s)
            del self.leases[oldest]
            self.held -= amount
        self._add_refill(now_s)

    def _add_refill(self, now_s: float) -> None:
        refilled = self.rate_per_s * max(0.0, now_s - self.at_s)
        self.balance = min(self.capacity - self.held, self.balance + refilled)
        self.at_s = max(self.at_s, now_s)

    def take(self, reservation_id: str, demand: Demand, until_s: float) -> None:
        self.balance -= demand.amount
        if demand.held:
            self.leases[reservation_id] = (demand.amount, until_s)
            self.held += demand.amount

    def settle(self, reservation_id: str, used: float) -> None:
        """Charge ``used``; if it is more than was reserved, the balance may fall below 0."""
        amount, _ = self.leases.pop(reservation_id, (None, None))
        if amount is not None:
            self.held -= amount
            self.balance = min(self.capacity - self.held, self.balance + amount - used)

    def is_idle(self, now_s: float) -> bool:
        """Return whether a new one can replace it: it is full and holds nothing, or its day or month is over."""
        full = self.balance + self.rate_per_s * (now_s - self.at_s) >= self.capacity
        over = 0 < self.ends_s < now_s and all(until_s < now_s for _, until_s in self.leases.values())
        return over or (not self.leases and full and not self.ends_s)


@dataclass(frozen=True)
class Charge:
    """request_id: as callers and logs have it. model: that serves it, with the adapter. endpoint: one of Operation.
    price: at arrival; None: it costs nothing. source: ``engine``, or where a reused answer comes from."""

    request_id: str = ""
    model: str = ""
    endpoint: str = ""
    price: ModelPrice | None = None
    source: str = "engine"

    def micros(self, usage: Usage | None) -> int:
        """Return what ``usage`` costs in millionths of the currency."""
        return self.price.micros(usage) if self.price is not None and usage is not None else 0

    def most_micros(self, prompt_tokens: int, output_tokens: int) -> int:
        """Return what so many tokens cost at most: none, or all of the prompt, may be cached."""
        uncached, cached = (Usage(prompt_tokens, output_tokens, part) for part in (0, prompt_tokens))
        return max(self.micros(uncached), self.micros(cached))

    def record(self, at_s: float, levels: Levels, usage: Usage | None) -> UsageRecord:
        """Return the ledger's record. Cached tokens are told where they have a price of their own: of others, they
        would tell a tenant about the prompts of another for nothing."""
        used = usage or Usage(0, 0)
        if self.price is None or self.price.cached is None:
            used = replace(used, cached_tokens=0)
        tokens = used.input_tokens, used.cached_tokens, used.output_tokens
        key = levels[-1].name if levels else ""
        about = self.request_id, key, self.model, self.endpoint, self.source
        return UsageRecord(at_s, *about, *tokens, self.micros(usage))


FREE = Charge()
