"""What must hold in any run, whatever the policy: kept apart from what the gateway and the law believe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from cluster.scaling.law import Decision
from cluster.scaling.rules import PoolRules
from contract.errors import Overloaded
from contract.generation import Usage
from gateway.admission.budget_store import MemoryStore
from gateway.admission.budgets import Reservation
from gateway.admission.concurrency import Concurrency
from gateway.config.policy import ModelPrice
from gateway.config.tenant import Level
from gateway.routing.circuit_breaker import BreakerState
from gateway.service import Service
from simulator.replica import Replica

_SLACK = 1e-6
_ROUNDING = 1e-3  # of balances of up to 10^12


class Ledger:
    """Counts on its own what people send and get. violations: what did not hold, and how often.

    gateways: each has budgets of its own, unless they share a store.
    """

    def __init__(self, began_s: float, gateways: int) -> None:
        self._began_s, self._gateways = began_s, gateways
        self.violations: Counter[str] = Counter()
        self.open = 0  # requests that began and did not end
        self._levels: dict[str, Level] = {}
        # By level: tokens of whole answers, requests that were admitted, and those of them that have not ended.
        self._used, self._admitted, self._under_way = Counter[str](), Counter[str](), Counter[str]()
        self._beyond = Counter[str]()  # by level: tokens of prompts beyond what the gateway took them for and reserved
        self._taken: dict[tuple[str, str], float] = {}  # from a bucket, by its name and the reservation
        self._tokens = 0  # of all requests
        self._asking = Counter[tuple[int, str]]()  # requests by gateway and level, "" for all of the gateway
        # By store and level: what is left of the requests a minute, and since when.
        self._left: dict[tuple[int, str], tuple[float, float]] = {}

    def watch(self, gateways: Iterable[Service]) -> None:
        """See from now on what reservations and settlements take from the buckets."""
        for gateway in gateways:
            if isinstance(store := gateway.budgets, MemoryStore):
                store.settle = partial(self._settled, store)  # type: ignore[method-assign]
                store.try_reserve = partial(self._reserved, store)  # type: ignore[method-assign]

    def _reserved(
        self, store: MemoryStore, levels: Sequence[Level], tokens: int, least: int | None = None, micros: int = 0
    ) -> Reservation:
        reservation, now_s = MemoryStore.try_reserve(store, levels, tokens, least, micros), store._clock()
        lacks = any(level.limits.tokens_per_minute or level.limits.quotas for level in levels)
        for level in levels:
            if (per_minute := level.limits.requests_per_minute) is not None:
                most = level.limits.burst_requests or per_minute
                had, at_s = self._left.get((id(store), level.name), (most, now_s))
                left = min(most, had + per_minute / 60 * (now_s - at_s))
                lacks |= left < 1 + _SLACK
                self._left[id(store), level.name] = left - reservation.granted, now_s
        if not (reservation.granted or lacks):
            self.broken("a request was refused within its budgets")
        return reservation

    def _settled(self, store: MemoryStore, reservation: Reservation, used: int, micros: int = 0) -> None:
        before = []
        for demand in (standing.demand for standing in reservation.standings if standing.demand.held):
            if (bucket := store._buckets.get(demand.bucket)) is not None:
                bucket.refill(demand, store._clock())
                before.append((demand.bucket, bucket, bucket.balance + bucket.held))
        MemoryStore.settle(store, reservation, used, micros)
        for name, bucket, had in before:
            if taken := had - bucket.balance - bucket.held:
                place = name, reservation.id
                self._taken[place] = self._taken.get(place, 0.0) + taken

    def broken(self, text: str) -> None:
        self.violations[text] += 1

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
            self._levels[level.name] = level
            self._admitted[level.name] += 1
            self._under_way[level.name] += 1
            most = level.limits.max_in_flight
            if most is not None and self._under_way[level.name] > self._gateways * most:
                self.broken(f"{level.name} had more requests under way than max_in_flight")

    def released(self, levels: Iterable[Level]) -> None:
        for level in levels:
            self._under_way[level.name] -= 1

    def answered(self, levels: Iterable[Level], usage: Usage, received: int, due: Usage) -> None:
        """Take note of a whole answer. received: tokens that came. due: of the prompt, and of what the engine makes."""
        if received != due.output_tokens:
            self.broken("an answer had more or fewer tokens than the engine made")
        if (usage.input_tokens, usage.output_tokens) != (due.input_tokens, received):
            self.broken("the usage told other tokens than came")
        for level in levels:
            self._used[level.name] += usage.input_tokens + usage.output_tokens

    def charged(
        self, levels: Iterable[Level], reservation: Reservation | None, used: Usage | None, price: ModelPrice | None
    ) -> None:
        """Compare what a request that ended was charged with what it got. used: None for nothing."""
        tokens = used.input_tokens + used.output_tokens if used is not None else 0
        micros = price.micros(used) if price is not None and used is not None else 0
        self._tokens += tokens
        own = tuple(f"{level.name} " for level in levels)  # what follows a space is a scope of the level
        for standing in reservation.standings if reservation is not None else ():
            if not f"{(demand := standing.demand).level} ".startswith(own):
                self.broken("a request took from the budget of another level")
            if demand.held:
                taken = self._taken.pop((demand.bucket, reservation.id), 0.0)  # type: ignore[union-attr]
                if demand.limit == "tokens":
                    self._beyond[demand.level] += max(0, tokens - int(demand.amount))
                if abs(taken - demand.of(tokens, micros)) > _ROUNDING:
                    self.broken(f"{demand.level} was charged other than it was answered, in {demand.limit}")

    def check(self, gateways: Iterable[Service], now_s: float, calls: int) -> None:
        """Check what holds at any time. calls: of people's requests, that engines work on."""
        if calls > self.open and not any(gateway.shadow.rules for gateway in gateways):
            self.broken("engines worked on more requests than were under way")
        held = sum(gateway.admission.running for gateway in gateways)
        if held > self.open:
            self.broken("more slots were held than requests were under way")
        for name, level in self._levels.items():
            limits = level.limits
            tokens = self._used[name] - self._beyond[name], limits.tokens_per_minute, limits.burst_tokens, ""
            requests = self._admitted[name], limits.requests_per_minute, limits.burst_requests, ", in requests"
            for used, per_minute, burst, unit in (tokens, requests):
                if per_minute is None:
                    continue
                allowed = self._gateways * ((burst or per_minute) + per_minute / 60 * (now_s - self._began_s))
                if used > allowed * (1 + _SLACK):
                    self.broken(f"the budget of {name} was exceeded{unit}")

    def check_decision(self, rules: PoolRules, pool: str, decision: Decision) -> None:
        if decision.wanted < rules.min_replicas:
            self.broken(f"the law wanted fewer replicas of {pool!r} than min_replicas")
        if decision.wanted > rules.ceiling:
            self.broken(f"the law wanted more replicas of {pool!r} than its ceiling")

    def check_end(self, gateways: Sequence[Service], replicas: Iterable[Replica]) -> None:
        """Check what holds when all requests have ended."""
        if self.open:
            self.violations["a request was lost: it never ended"] += self.open
        if any(abs(taken) > _ROUNDING for taken in self._taken.values()):
            self.broken("a request without an answer was charged, or one twice")
        if sum(gateway.metrics.engine_tokens for gateway in gateways) != self._tokens:
            self.broken("the gateways' metrics count other tokens than were answered")
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
