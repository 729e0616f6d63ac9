"""What must hold in any run, whatever the policy: kept apart from what the gateway and the law believe."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cluster.scaling.law import Decision
from cluster.scaling.rules import PoolRules
from contract.errors import Overloaded
from contract.generation import Usage
from gateway.admission.budget_store import MemoryStore
from gateway.admission.budgets import Reservation
from gateway.admission.concurrency import Concurrency, Slot
from gateway.admission.fair_queue import Entry
from gateway.admission.pool_slots import SHORT, Claim, PoolSlots
from gateway.admission.sharing import AHEAD
from gateway.config.calendar import period_at
from gateway.config.policy import ModelPrice
from gateway.config.tenant import Level, Limits
from gateway.routing.circuit_breaker import BreakerState
from gateway.service import Service
from gateway.usage.store import UsageRecord
from simulator.fleet import Fleet
from simulator.replica import Replica

_SLACK = 1e-6
_ROUNDING = 1e-3  # of balances of up to 10^12
_Key = tuple[int, str]  # class and tenant, which take turns


@dataclass
class _Account:
    """What is left of a limit of tokens, requests or money. held: reserved by requests that have not ended."""

    most: float
    rate_per_s: float
    money: bool
    at_s: float
    left: float = math.inf
    held: float = 0.0

    def refill(self, now_s: float) -> None:
        self.left = min(self.most - self.held, self.left + self.rate_per_s * (now_s - self.at_s))
        self.at_s = now_s


class Ledger:
    """Counts on its own what people send and get. violations: of the fleet, too. gateways: how many."""

    def __init__(self, gateways: int, fleet: Fleet) -> None:
        self._gateways, self._fleet = gateways, fleet
        self.violations, self.broken = fleet.violations, fleet.broken
        self.open = 0  # requests that began and did not end
        self._under_way = Counter[str]()  # requests that were admitted and have not ended, by level
        self._taken: defaultdict[tuple[str, str], float] = defaultdict(float)  # from a bucket, by name and reservation
        self._tokens = self._micros = 0  # of all requests
        self._records: list[int] | None = None  # tokens and money of all usage records; None without any
        self._placed = Counter[tuple[int, str]]()  # requests that hold a place under the caps, by caps and cap
        self._asking = Counter[tuple[int, str]]()  # requests by gateway and level, "" for all of the gateway
        self._accounts: dict[tuple[object, ...], _Account] = {}  # by store, level, limit and its day or month
        self._held: dict[str, list[tuple[_Account, float]]] = {}  # by reservation: its amounts, until they are settled

    def watch(self, gateways: Iterable[Service]) -> None:
        """See from now on what reservations and settlements take from the buckets, and who gets places and slots."""
        for gateway in gateways:
            gateway.replicas.on_open = partial(self._opened, gateway, gateway.replicas.on_open)
            for pool, slots in gateway.admission._slots.items():
                self._turns(gateway, pool, slots)
            gateway.admission._make_slots = partial(self._slots, gateway)
            if (write := gateway.admission.on_charged) is not None:
                gateway.admission.on_charged = partial(self._recorded, write)
            if isinstance(caps := gateway._concurrency, Concurrency):
                caps.try_acquire = partial(self._acquired, caps)  # type: ignore[method-assign]
            if isinstance(store := gateway.budgets, MemoryStore):
                store.settle = partial(self._settled, store)  # type: ignore[method-assign]
                store.try_reserve = partial(self._reserved, store)  # type: ignore[method-assign]

    def _opened(self, gateway: Service, tell: Callable[[str], None], url: str) -> None:
        tell(url)
        for replica in gateway.replicas.all():
            if replica.url == url:
                replica.channel.breaker.opened(time.monotonic())  # type: ignore[attr-defined]

    def _recorded(self, write: Callable[[UsageRecord], None], record: UsageRecord) -> None:
        write(record)
        tokens, micros = self._records or (0, 0)
        self._records = [tokens + record.prompt_tokens + record.completion_tokens, micros + record.micros]

    def _turns(self, gateway: Service, pool: str, slots: PoolSlots) -> None:
        def known() -> bool:
            return any(replica.slots for replica in gateway.replicas.ready_in(pool))

        Turns(slots, partial(self._fleet.slots, pool), known, self.broken)

    def _slots(self, gateway: Service, *given: Any, **named: Any) -> PoolSlots:
        self._turns(gateway, named["name"], slots := PoolSlots(*given, **named))
        return slots

    def _acquired(
        self, caps: Concurrency, levels: Sequence[Level], priority: int, requests: int = 1, pool: str = ""
    ) -> Slot:
        mosts = {level.name: level.limits.max_in_flight for level in levels}
        mosts |= {f"class {priority} at {pool}": caps.class_limits.get(priority)}
        try:
            slot = Concurrency.try_acquire(caps, levels, priority, requests, pool)
        except Overloaded:
            kept = mosts | {f"pool {pool}": caps.limit // max(10, 2 * len(caps.pools)) if len(caps.pools) > 1 else 0}
            if all(most is None or self._placed[id(caps), name] + requests <= most for name, most in kept.items()):
                self.broken("a request was refused in the part of the limit that is kept for its pool")
            raise
        mosts |= {"all": caps.limit, f"pool {pool}": None}
        for name, most in mosts.items():
            self._placed[id(caps), name] += requests
            if most is not None and self._placed[id(caps), name] > most:
                self.broken(f"{name} had more requests under way than max_in_flight")
        give_back = slot.give_back

        def given_back() -> None:
            give_back()
            for name in mosts:
                self._placed[id(caps), name] -= requests

        slot.give_back = given_back
        return slot

    def _reserved(
        self, store: MemoryStore, levels: Sequence[Level], tokens: int, least: int | None = None, micros: int = 0
    ) -> Reservation:
        reservation, now_s = MemoryStore.try_reserve(store, levels, tokens, least, micros), store._clock()
        asked = []  # level and unit, account, amount, and whether that is settled in the end
        for level in levels:
            limits, name = level.limits, (id(store), level.name)
            if (per_minute := limits.tokens_per_minute) is not None:
                account = self._account((*name, "tokens"), limits.burst_tokens or per_minute, per_minute, now_s)
                asked.append((level.name, account, min(tokens, account.most), True))
            if (per_minute := limits.requests_per_minute) is not None:
                account = self._account((*name, "requests"), limits.burst_requests or per_minute, per_minute, now_s)
                asked.append((level.name, account, 1, False))
            for quota in (quota for quota in limits.quotas if not quota.soft):
                period = period_at(quota.length, quota.time_zone, store._wall()).name
                account = self._account((*name, quota.name, period), quota.most, 0, now_s, quota.money)
                asked.append((level.name, account, micros if quota.money else tokens, True))
        if not reservation.granted and all(account.left > amount + _ROUNDING for _, account, amount, _ in asked):
            self.broken("a request was refused within its budgets")
        for level_name, account, amount, settled in asked if reservation.granted else ():
            if account.left < amount - _ROUNDING:
                self.broken(f"the budget of {level_name} was exceeded{'' if settled else ', in requests'}")
            account.left -= amount
            if settled:
                account.held += amount
                self._held.setdefault(reservation.id, []).append((account, amount))
        return reservation

    def _account(
        self, name: tuple[object, ...], most: float, per_minute: float, now_s: float, money: bool = False
    ) -> _Account:
        account = self._accounts.setdefault(name, _Account(most, per_minute / 60, money, now_s))
        account.refill(now_s)
        return account

    def _settled(self, store: MemoryStore, reservation: Reservation, used: int, micros: int = 0) -> None:
        before = []
        for demand in (standing.demand for standing in reservation.standings if standing.demand.held):
            if (bucket := store._buckets.get(demand.bucket)) is not None:
                bucket.refill(demand, store._clock())
                before.append((demand.bucket, bucket, bucket.balance + bucket.held))
        MemoryStore.settle(store, reservation, used, micros)
        for account, amount in self._held.pop(reservation.id, ()):
            account.refill(store._clock())
            account.held -= amount
            account.left = min(account.most - account.held, account.left + amount - (micros if account.money else used))
        for name, bucket, had in before:
            if taken := had - bucket.balance - bucket.held:
                self._taken[name, reservation.id] += taken

    @contextmanager
    def asking(self, number: int, gateway: Service, levels: Sequence[Level]) -> Iterator[None]:
        """Take note of a request to a gateway until it ends, and of a refusal under caps that have room."""
        self._asking.update(places := [(number, ""), *((number, level.name) for level in levels)])
        try:
            yield
        except Overloaded as error:
            caps, mosts = gateway._concurrency, {level.name: level.limits.max_in_flight for level in levels}
            if error.reason == "concurrency" and isinstance(caps, Concurrency) and not caps.class_limits:
                # Of a limit of the gateway less than half is kept for other pools.
                mosts[""] = caps.limit // (2 if len(caps.pools) > 1 else 1)
                if all(most is None or self._asking[number, name] <= most for name, most in mosts.items()):
                    self.broken("a request was refused under caps that had room")
            raise
        finally:
            self._asking.subtract(places)

    def admitted(self, levels: Iterable[Level]) -> None:
        """Take note of a request that the gateway serves, until ``released``."""
        for level in levels:
            self._under_way[level.name] += 1
            most = level.limits.max_in_flight
            if most is not None and self._under_way[level.name] > self._gateways * most:
                self.broken(f"{level.name} had more requests under way than max_in_flight")

    def released(self, levels: Iterable[Level]) -> None:
        for level in levels:
            self._under_way[level.name] -= 1

    def answered(self, usage: Usage, received: int, due: Usage) -> None:
        """Take note of a whole answer. received: tokens that came. due: of the prompt, and of what the engine makes."""
        if received != due.output_tokens:
            self.broken("an answer had more or fewer tokens than the engine made")
        if (usage.input_tokens, usage.output_tokens) != (due.input_tokens, received):
            self.broken("the usage told other tokens than came")

    def charged(
        self, levels: Iterable[Level], reservation: Reservation | None, used: Usage | None, price: ModelPrice | None
    ) -> None:
        """Compare what a request that ended was charged with what it got. used: None for nothing."""
        tokens = used.input_tokens + used.output_tokens if used is not None else 0
        micros = price.micros(used) if price is not None and used is not None else 0
        self._tokens += tokens
        self._micros += micros
        own = tuple(f"{level.name} " for level in levels)  # what follows a space is a scope of the level
        standings = reservation.standings if reservation is not None else ()
        asked = {standing.demand.level for standing in standings}
        if any(replace(one.limits, max_in_flight=None) != Limits() and one.name not in asked for one in levels):
            self.broken("a request took nothing from a budget of its levels")
        for standing in standings:
            if not f"{(demand := standing.demand).level} ".startswith(own):
                self.broken("a request took from the budget of another level")
            if demand.held:
                taken = self._taken.pop((demand.bucket, reservation.id), 0.0)  # type: ignore[union-attr]
                if abs(taken - demand.of(tokens, micros)) > _ROUNDING:
                    self.broken(f"{demand.level} was charged other than it was answered, in {demand.limit}")

    def check(self, gateways: Sequence[Service], calls: int) -> None:
        """Check what holds at any time. calls: of people's requests, that engines work on."""
        if calls > self.open and not any(gateway.shadow.rules for gateway in gateways):
            self.broken("engines worked on more requests than were under way")
        held = sum(gateway.admission.running for gateway in gateways)
        if held > self.open:
            self.broken("more slots were held than requests were under way")
        for replica in (replica for gateway in gateways for replica in gateway.replicas.all()):
            replica.channel.breaker.check(replica.breaker, time.monotonic())  # type: ignore[attr-defined]
        for slots in (gateway.admission.slots(pool) for gateway in gateways for pool in gateway.replicas.pools):
            of_class, of_tenant, *_ = slots.queue.state()
            most = slots.rules.max_waiting_per_class, slots.rules.max_waiting_per_tenant
            if max(of_class.values(), default=0) > most[0] or max(of_tenant.values(), default=0) > most[1]:
                self.broken("more requests waited than may")

    def check_decisions(self, rules: PoolRules, pool: str, decisions: Sequence[tuple[float, Decision, bool]]) -> None:
        """Compare the decisions for a pool, with their times, with what the rules promise. True: of a load that was
        not known."""
        up_s, changed_s = -math.inf, decisions[0][0] if decisions else 0.0  # a first decision removes nothing
        wanted = decisions[0][1].wanted if decisions else 0
        for at_s, decision, blind in decisions:
            before, wanted = wanted, decision.wanted
            if wanted < rules.min_replicas:
                self.broken(f"the law wanted fewer replicas of {pool!r} than min_replicas")
            if wanted > rules.ceiling:
                self.broken(f"the law wanted more replicas of {pool!r} than its ceiling")
            # Floor and ceiling hold at once; a pool without a replica gets its first ones at once.
            if before and max(before, rules.min_replicas) < wanted:
                if wanted - before > rules.step_up or at_s - up_s < rules.up_cooldown_s - _SLACK:
                    self.broken(f"the law added replicas of {pool!r} faster than step_up and up_cooldown_s")
            if wanted < min(before, rules.ceiling):
                if before - wanted > rules.step_down or at_s - changed_s < rules.down_cooldown_s - _SLACK:
                    self.broken(f"the law removed replicas of {pool!r} faster than step_down and down_cooldown_s")
                if blind:
                    self.broken(f"the law removed replicas of {pool!r} while the load was not known")
            if wanted != before:
                changed_s, up_s = at_s, at_s if wanted > before else up_s

    def check_end(self, gateways: Sequence[Service], replicas: Iterable[Replica]) -> None:
        """Check what holds when all requests have ended."""
        if self.open:
            self.violations["a request was lost: it never ended"] += self.open
        if any(abs(taken) > _ROUNDING for taken in self._taken.values()):
            self.broken("a request without an answer was charged, or one twice")
        if sum(gateway.metrics.engine_tokens for gateway in gateways) != self._tokens:
            self.broken("the gateways' metrics count other tokens than were answered")
        if self._records not in (None, [self._tokens, self._micros]):
            self.broken("the usage records tell other tokens or money than were answered")
        if any(replica.late for replica in replicas):
            self.broken("a request was sent to a replica that had withdrawn")
        for gateway in gateways:
            if any(one.breaker.state is BreakerState.HALF_OPEN for one in gateway.replicas.all()):
                self.broken("a breaker waits for a trial and none is under way")
            for pool in gateway.replicas.pools:
                if not gateway.admission.slots(pool).idle:
                    self.broken(f"slots or queue of the pool {pool!r} were not given back")
            if isinstance(caps := gateway._concurrency, Concurrency) and (caps.in_flight or any(caps._counts.values())):
                self.broken("places under the caps were not given back")
            if len(gateway.live):
                self.broken("generations were left in the gateway")
            store = gateway.budgets
            if isinstance(store, MemoryStore) and any(abs(bucket.held) > _SLACK for bucket in store._buckets.values()):
                self.broken("reserved budget was not settled")
            if any(replica.work.outstanding for replica in gateway.replicas.all()):
                self.broken("work stayed reserved at a replica")


class Turns:
    """Counts on its own who waits for the slots of a pool and who gets them. slots_there: of all replicas. known:
    whether a ready one has told its slots; before, a gateway admits what may come."""

    def __init__(
        self, slots: PoolSlots, slots_there: Callable[[], int], known: Callable[[], bool], broken: Callable[[str], None]
    ) -> None:
        self._slots, self._there, self._known, self._broken = slots, slots_there, known, broken
        self._came: defaultdict[int, dict[Entry, float]] = defaultdict(dict)  # by class, in the order they came
        self._held_of, self._held_at = Counter[str](), Counter[int]()  # slots by tenant and by class
        self._long = set[tuple[Entry, int]]()  # slots of requests that were not short beside those that ran
        self._longest_tokens = 0  # of those that run, added up
        # By key: tokens of a request at most, of those that run, and of these at most.
        self._largest: defaultdict[_Key, float] = defaultdict(float)
        self._running: defaultdict[_Key, float] = defaultdict(float)
        self._most_running: defaultdict[_Key, float] = defaultdict(float)
        # Tokens by weight that the first key got in turns of both beyond what the second one got.
        self._ahead: defaultdict[_Key, defaultdict[_Key, float]] = defaultdict(lambda: defaultdict(float))
        seen: Any = slots
        seen.enter, seen._give, seen._take_back = self._enter, self._give, self._take_back
        seen.queue.give_back = self._give_back

    def _enter(self, claim: Claim) -> None:
        entry, flow = claim.entry, self._slots.queue._flows.get(key := _key(claim.entry))
        if flow is None or flow.head() is None:  # who did not wait has no claim to earlier turns
            for ahead in self._ahead.values():
                ahead.pop(key, None)
        self._came[entry.priority][entry] = self._slots._clock()
        try:
            PoolSlots.enter(self._slots, claim)
        finally:
            if not entry.waiting:
                self._came[entry.priority].pop(entry, None)

    def _give(self, claim: Claim, limits: Any) -> None:
        entry, slots, now_s = claim.entry, self._slots, self._slots._clock()
        cost, key = entry.part(claim.given), _key(entry)
        if not claim.given and now_s > entry.deadline_s + _SLACK:
            self._broken("a request got a slot after its deadline")
        self._largest[key] = max(self._largest[key], cost)
        if len(slots.queue) > entry.waiting:
            self._compare(entry, cost, limits, now_s)
        if not entry.waiting:
            self._came[entry.priority].pop(entry, None)
        running = self._held_at.total()
        if not running or entry.longest_tokens > SHORT * self._longest_tokens / running:
            self._long.add((entry, claim.given))
        self._longest_tokens += entry.longest_tokens
        self._held_of[entry.tenant] += 1
        self._held_at[entry.priority] += 1
        self._running[key] += cost
        self._most_running[key] = max(self._most_running[key], self._running[key])
        self._check_held(entry)
        PoolSlots._give(slots, claim, limits)

    def _compare(self, entry: Entry, cost: float, limits: Any, now_s: float) -> None:
        """Compare who gets a slot with those who wait, and may have it."""
        key, own = _key(entry), self._level(entry.priority, now_s, entry)
        for other, flow in self._slots.queue._flows.items():
            head = flow.head() if other != key else None
            if head is None or not self._slots._may_run(head, limits):
                continue
            level = self._level(head.priority, now_s, entry)
            if level < own:
                self._broken("a slot went to a less urgent class than one that waited")
            elif level == own:
                ahead = self._ahead[key]
                ahead[other] += cost / entry.weight
                own_bound = (2 * self._largest[key] + self._most_running[key]) / entry.weight
                its_bound = (max(head.next_cost, self._largest[other]) + self._most_running[other]) / head.weight
                if ahead[other] > 2 * self._slots.rules.quantum_tokens + own_bound + its_bound:
                    self._broken("a tenant got turns beyond its share while another one waited")
                    ahead[other] = 0.0
        self._got(key, cost / entry.weight)

    def _level(self, priority: int, now_s: float, given: Entry) -> int:
        """Return the urgency of a class with what it has won by waiting."""
        came = self._came[priority]
        while came and not (first := next(iter(came))).waiting and first is not given:
            del came[first]
        waited_s = now_s - next(iter(came.values()), now_s)
        return max(0, priority - int(waited_s / self._slots.rules.aging_s))

    def _got(self, key: _Key, tokens: float) -> None:
        for ahead in self._ahead.values():
            if key in ahead:
                ahead[key] = max(0.0, ahead[key] - tokens)

    def _check_held(self, entry: Entry) -> None:
        rules, there = self._slots.rules, self._there()
        own = rules.max_running or there
        less_urgent = sum(count for priority, count in self._held_at.items() if priority >= entry.priority)
        every, slots = self._held_at.total(), rules.max_running or math.ceil(there * AHEAD)
        kept = min(max(1, math.floor(own * rules.short_reserve)), own - 1)
        for held, most, problem in (
            (
                len(self._long),
                own - kept if rules.short_reserve else math.inf,
                "a slot kept for short requests was taken",
            ),
            (every, slots, "more slots were given than are there"),
            (self._held_of[entry.tenant], _part(own, rules.tenant_share), "a tenant got more slots than tenant_share"),
            (less_urgent, _part(own, entry.share), "a class got more slots than its share"),
        ):
            if held > most and self._known():
                self._broken(problem)

    def _take_back(self, entry: Entry, number: int, reserved: bool) -> None:
        self._long.discard((entry, number))
        self._longest_tokens -= entry.longest_tokens
        self._held_of[entry.tenant] -= 1
        self._held_at[entry.priority] -= 1
        self._running[_key(entry)] -= entry.part(number)
        PoolSlots._take_back(self._slots, entry, number, reserved)

    def _give_back(self, entry: Entry, unused_tokens: float) -> None:
        key, unused = _key(entry), unused_tokens / entry.weight
        for other, tokens in self._ahead[key].items() if unused > 0 else ():
            self._ahead[key][other] = max(0.0, tokens - unused)
        if unused < 0:
            self._got(key, -unused)
        type(self._slots.queue).give_back(self._slots.queue, entry, unused_tokens)


def _key(entry: Entry) -> _Key:
    return entry.priority, entry.tenant


def _part(slots: int, share: float) -> float:
    """Return the slots of a share, which is at least one; no limit of the whole."""
    return max(1, math.ceil(slots * share)) if share < 1 else math.inf
