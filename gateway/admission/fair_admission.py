"""Admission: caps, budgets and each pool's fair queue in one place; it gives permits to generate.

    tenant = keys.tenant(api_key)                        # Unauthenticated
    permit = await admission.admit(requests, tenant)     # Overloaded, DeadlineExceeded, InvalidArgument, Unavailable
    try: serve permit.requests, perhaps with fewer max_tokens than ``requests``, each when its turn has begun
    finally: permit.settle(usage)                        # once, at the end

``admit`` may wait; cancelling it releases everything. The choices of one request (``n``, several prompts) are admitted
together or not at all, but each gets its slot by itself and releases it when it ends.

The order: choose the pool → shorten under pressure → cap → room in the pool's queue → reserve the budget → wait for a
slot of the pool → Permit. Every pool has its own slots, queue and pressure; a busy pool does not delay another one.
``_Ticket.close`` releases everything that a request took, once.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from contract.errors import DeadlineExceeded, Overloaded, TridentError, Unavailable
from contract.generation import GenerationRequest, Usage
from gateway.admission import retry_after
from gateway.admission.budget_store import BudgetStore
from gateway.admission.budgets import Demand, Reservation, Standing
from gateway.admission.charge import FREE, Charge
from gateway.admission.concurrency import Caps, Held
from gateway.admission.degradation import Stage, degraded, overflow_note, shortened, stage_at
from gateway.admission.fair_queue import Entry, FairQueue
from gateway.admission.pool_slots import Claim, PoolSlots
from gateway.admission.prompt_tokens import PromptCount, PromptTokens
from gateway.admission.sharing import Capacity
from gateway.config.policy import AdmissionRules, DegradationRules
from gateway.config.tenant import Tenant, applying
from gateway.usage.store import UsageRecord

_Refusal = TypeVar("_Refusal", Overloaded, DeadlineExceeded)
_REASONS: dict[type[TridentError], str] = {Overloaded: "queue", DeadlineExceeded: "deadline"}
Accepts = Callable[[str, Sequence[GenerationRequest]], bool]  # whether an overflow target can serve these requests


NOTE = "x-trident-degraded"
HELD = "x-trident-held"  # seconds that the request may wait for a replica of a pool that has none
_NO_PRESSURE = DegradationRules(shorter_at=10, overflow_at=10, refuse_at=10)


class Pools(Protocol):
    """The pools of replicas, as admission needs them."""

    def draw(self, pinned: str, session: str = "", without: str | None = None) -> str:
        """Return the pool of a request: ``pinned``, or one drawn by weight among those that can serve; not ``without``,
        if there is another."""

    def capacity(self, pool: str) -> Capacity:
        """Return what its replicas can run now."""


class FairAdmission:
    """Admission for one gateway process: ``await admit(requests, tenant)``.

    clock: monotonic seconds, the clock of an in-memory budget store.
    pools: draws pools and reports their capacity.
    target_pool: returns the pool of an overflow target; "" for an upstream.
    prompt_weight: work of a prompt token in tokens of decoding.
    make_slots: makes the slots of a pool, which the workers of one gateway share.
    rejected, degraded: requests refused by reason, degraded by stage. on_refusal: called with the pool and the reason.
    """

    def __init__(
        self,
        budgets: BudgetStore,
        concurrency: Caps,
        clock: Callable[[], float],
        *,
        pools: Pools,
        target_pool: Callable[[str], str] = lambda target: "",
        rules: AdmissionRules | None = None,
        degradation: DegradationRules | None = None,
        prompt_tokens: PromptTokens | None = None,
        rng: random.Random | None = None,
        prompt_weight: Callable[[], float] = lambda: 1.0,
        make_slots: Callable[..., PoolSlots] = PoolSlots,
    ) -> None:
        self._budgets, self._concurrency, self._clock = budgets, concurrency, clock
        self.pools = pools
        self.target_pool = target_pool
        self._rules, self._degradation = rules or AdmissionRules(), degradation
        self.prompt_tokens = prompt_tokens or PromptTokens()
        self._rng, self.prompt_weight = rng or random.Random(), prompt_weight
        self._slots: dict[str, PoolSlots] = {}
        self._make_slots = make_slots
        self._tickets: set[_Ticket] = set()  # that have queued for a slot and are open
        self.stopping = False
        self.rejected: Counter[str] = Counter()
        self.on_refusal: Callable[[str, str], None] = lambda pool, reason: None
        # Called with what ended; and with where budgets stand, it returns response headers.
        self.on_charged: Callable[[UsageRecord], None] | None = None
        self.on_reserved: Callable[[Sequence[Standing]], Mapping[str, str]] = lambda standings: {}
        self.degraded: Counter[str] = Counter()

    @property
    def running(self) -> int:
        """Slots that permits hold, in all pools."""
        return sum(slots.running for slots in self._slots.values())

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot, in all pools."""
        return sum(slots.waiting for slots in self._slots.values())

    def slots(self, pool: str = "") -> PoolSlots:
        """Return the slots of a pool and the queue for them."""
        found = self._slots.get(pool)
        if found is None:
            found = self._slots[pool] = self._make_slots(
                FairQueue(self._rules),
                self._clock,
                lambda: self.pools.capacity(pool),
                self._rules,
                name=pool,
                refused=lambda error: self._refusal(_REASONS[type(error)], error, pool),
                full=lambda: self._concurrency.fullness(pool) >= 1,
                rng=self._rng,
            )
        return found

    def change(self, rules: AdmissionRules, degradation: DegradationRules | None) -> None:
        """Apply new rules to later decisions. Requests that run or wait stay."""
        self._rules, self._degradation = rules, degradation
        self._concurrency.class_limits = rules.max_in_flight_of_class
        for slots in self._slots.values():
            slots.rules = rules
            slots.queue.rules = rules
            slots.dispatch()

    def check(self, now_s: float) -> None:
        """Dispatch waiting requests: no event reports that a replica was added or that another gateway left one."""
        for slots in self._slots.values():
            if slots.waiting:
                slots.dispatch()
        if self.stopping:
            self.end_held()

    def end_held(self) -> None:
        """End what waits for a replica of a pool that has none, now and from now on: the gateway stops sooner."""
        self.stopping = True
        for ticket in tuple(self._tickets):
            for claim in ticket.claims:
                if claim.pool.capacity.hold_s:
                    claim.fail(
                        Unavailable("the gateway is stopping and the pool has no replica; retry at another", 1.0)
                    )

    def pressure(self, tenant: Tenant, pool: str = "") -> float:
        """Return the fullness of the tenant's fullest bound at the pool: 0 is empty, 1 is full."""
        queue = self.slots(pool).queue
        return max(
            self._concurrency.fullness(pool),
            self.pools.capacity(pool).kv_usage,
            queue.depth(tenant.priority) / queue.rules.max_waiting_per_class,
            queue.waiting_of(tenant.name) / queue.rules.max_waiting_per_tenant,
        )

    async def admit(
        self,
        requests: Sequence[GenerationRequest],
        tenant: Tenant,
        accepts: Accepts = lambda target, requests: True,
        down: bool = False,
        session: str = "",
        targets: Sequence[str] | None = None,
        prompt_tokens: PromptTokens | None = None,
        charge: Charge = FREE,
    ) -> Permit:
        """Return the permit when the first of ``requests`` has a slot.

        accepts: whether an overflow target accepts requests; if none does, ``max_tokens`` is capped instead.
        down: the tenant's pool has no ready replica; an overflow target serves the requests at any pressure.
        session: conversation id; a session stays in one pool.
        targets: the overflow targets, in order; None for those of the rules.
        prompt_tokens: counts the prompts; None for the gateway's own.
        charge: what they are charged by.

        Raises: Overloaded with ``reason``, ``retry_after_s`` and ``headers`` (pressure, cap, queue or budget full),
        DeadlineExceeded (timed out in the queue), InvalidArgument (never fits a budget or cap), Unavailable (the
        budget store does not answer).
        """
        pool = self.pools.draw(tenant.pool, session)
        capped, headers = self._capped(tuple(requests), tenant)
        requests, target, more = self._degraded(capped, tenant, pool, accepts, down, targets)
        headers |= more
        if target:
            pool = self.target_pool(target)
        ticket = _Ticket(self, tenant, session, self._clock(), requests, charge=charge)
        ticket.slot = await self._acquire(tenant, len(requests), pool)
        try:
            if pool or not target:
                self._check_room(tenant, pool)
            need = await (prompt_tokens or self.prompt_tokens).need(requests, tenant.name)
            ticket.tokens = need.tokens
            output_tokens = sum([request.max_tokens for request in requests])
            headers |= await self._reserve(ticket, need.tokens, need.least, output_tokens, pool)
            if pool or not target:  # an upstream has its own capacity, and no slot here is used
                claim = ticket.claim(pool, ticket.tokens, len(requests))
                drawn = not target and pool != tenant.pool
                turns = tuple([Turn(ticket, pool, claim, number, drawn) for number in range(len(requests))])
                if claim.hold_s:  # the response may begin, so that its caller is told
                    headers[HELD] = f"{claim.hold_s:g}"
                else:
                    await claim.turn(0)
            else:
                turns = tuple(Turn(ticket) for _ in requests)
        except BaseException:
            ticket.close(0)
            raise
        return Permit(ticket.requests, headers, target, turns, ticket, need.counts)

    async def admit_input(
        self, tokens: int, least: int, tenant: Tenant, pool: str, timeout_s: float, charge: Charge = FREE
    ) -> Permit:
        """Return the permit for an input that is only read, by an encoder of ``pool``, when it has a slot.

        tokens, least: of the input, as estimated and in any case.
        Raises: as ``admit``. An encoder has no overflow target and no shorter answer: under pressure it refuses.
        """
        rules = self._degradation
        if rules is not None and self.pressure(tenant, pool) >= rules.refuse_at:
            raise self._refusal("pressure", Overloaded("there is more work than can be done"), pool)
        work = GenerationRequest(text_input="", max_tokens=max(1, tokens), timeout_s=timeout_s)
        ticket = _Ticket(self, tenant, "", self._clock(), (work,), tokens, charge=charge)
        ticket.slot = await self._acquire(tenant, 1, pool)
        try:
            self._check_room(tenant, pool)
            headers = await self._reserve(ticket, tokens, least, 0, pool)
            claim = ticket.claim(pool, tokens, 1)
            await claim.turn(0)
        except BaseException:
            ticket.close(0)
            raise
        return Permit(ticket.requests, headers, "", (Turn(ticket, pool, claim),), ticket)

    async def admit_reader(self, tenant: Tenant, charge: Charge = FREE) -> Permit:
        """Admit a reader of a reused response: charge one request and hold the caps, but no tokens and no slot.

        Raises: as ``admit``.
        """
        ticket = _Ticket(self, tenant, "", self._clock(), charge=charge)
        ticket.slot = await self._acquire(tenant, 1, tenant.pool)
        try:
            headers = await self._reserve(ticket, 0, 0, 0, tenant.pool)
        except BaseException:
            ticket.close(0)
            raise
        return Permit((), headers, "", (), ticket)

    def _degraded(
        self,
        requests: tuple[GenerationRequest, ...],
        tenant: Tenant,
        pool: str,
        accepts: Accepts,
        down: bool,
        targets: Sequence[str] | None,
    ) -> tuple[tuple[GenerationRequest, ...], str, dict[str, str]]:
        """Return the requests as degraded under the current pressure, their overflow target and response headers."""
        rules = self._degradation
        if targets is not None:
            rules = (rules or _NO_PRESSURE).model_copy(update={"overflow": tuple(targets)})
        if rules is None:
            return requests, "", {}
        stage = stage_at(self.pressure(tenant, pool), rules)
        if stage is Stage.REFUSE:
            raise self._refusal("pressure", Overloaded("there is more work than can be done"), pool)
        target = ""
        if down or stage is Stage.OVERFLOW:
            names = (name for name in rules.overflow if accepts(name, requests))
            target = next((name for name in names if down or self._has_room(name, requests, tenant)), "")
            stage = Stage.OVERFLOW if target else Stage.SHORTER if stage is Stage.OVERFLOW else stage
        served = tuple([degraded(each, rules) for each in requests]) if stage is Stage.SHORTER else requests
        headers = {NOTE: overflow_note(target)} if target else _shorter_note(requests, served)
        if headers:
            self.degraded[stage.value] += 1
        return served, target, headers

    def _capped(
        self, requests: tuple[GenerationRequest, ...], tenant: Tenant
    ) -> tuple[tuple[GenerationRequest, ...], dict[str, str]]:
        """Return the requests with the ``max_tokens`` of their class at most, and response headers."""
        most = tenant.class_rules.max_tokens if tenant.class_rules is not None else None
        if most is None:
            return requests, {}
        capped = tuple([shortened(request, most) for request in requests])
        return capped, _shorter_note(requests, capped)

    def _has_room(self, target: str, requests: tuple[GenerationRequest, ...], tenant: Tenant) -> bool:
        """Return whether the target would serve the requests soon."""
        pool = self.target_pool(target)
        return not pool or self.slots(pool).is_short_wait(tenant.name, _longest(requests))

    async def _acquire(self, tenant: Tenant, slots: int, pool: str) -> Held:
        try:
            return await self._concurrency.acquire(tenant.levels, tenant.priority, slots, pool)
        except Overloaded as exc:
            raise self._refusal("concurrency", exc, pool) from None

    def _check_room(self, tenant: Tenant, pool: str) -> None:
        try:
            self.slots(pool).queue.check_room(tenant.name, tenant.priority)
        except Overloaded as exc:
            raise self._refusal("queue", exc, pool) from None

    async def _reserve(self, ticket: _Ticket, tokens: int, least: int, output_tokens: int, pool: str) -> dict[str, str]:
        """Reserve on every level of the ticket; return the response's headers."""
        charge = ticket.charge
        ticket.reserved_s = time.time()
        levels = applying(ticket.tenant.levels, charge.model, charge.endpoint)
        if not levels:
            return {}
        if not tokens:  # what nothing is generated for costs a request
            levels = tuple(
                replace(level, limits=replace(level.limits, tokens_per_minute=None, quotas=())) for level in levels
            )
        micros = charge.most_micros(tokens - output_tokens, output_tokens)
        ticket.reservation = reservation = await self._budgets.reserve(levels, tokens, least, micros)
        short = reservation.refused_by
        if short is None:
            return reservation.headers | dict(self.on_reserved(reservation.standings))
        if short.demand.left_s:
            left_of_it, amount = (_amount(value, short.demand) for value in (short.balance, short.demand.amount))
            problem = f"{short.demand.level} has {left_of_it} left of {short.demand.limit}"
            error = Overloaded(f"{problem} and the request may need {amount}")
            raise self._refusal("quota", error, pool, short.demand.left_s, reservation.headers)
        left = max(0, math.floor(short.balance))
        unit, level = short.demand.unit, short.demand.level
        error = Overloaded(f"{level} has {left} {unit} left and the request may need {short.demand.amount:.0f}")
        # Only the bucket's refill brings its tokens back, so its rate counts and not the queue's.
        wait_s = retry_after.retry_after_s(short.short, short.demand.rate_per_s, self._rng, most_s=3600.0)
        raise self._refusal("budget", error, pool, wait_s, reservation.headers)

    def _refusal(
        self,
        reason: str,
        error: _Refusal,
        pool: str,
        wait_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> _Refusal:
        """Count the refusal and return ``error`` with its reason and retry-after."""
        self.rejected[reason] += 1
        self.on_refusal(pool, reason)
        if wait_s is None:
            wait_s = self.slots(pool).retry_after_s(self._rng)
        error.reason, error.retry_after_s = reason, wait_s
        error.headers = {**(headers or {}), **retry_after.headers(wait_s)}
        return error


def _amount(value: float, demand: Demand) -> str:
    return f"{max(0.0, value) / 1e6:.6f}" if demand.money else f"{max(0.0, value):.0f} tokens"


def _shorter_note(before: Sequence[GenerationRequest], after: Sequence[GenerationRequest]) -> dict[str, str]:
    """Return the response header that names a lower ``max_tokens``; none if there is none."""
    lower = [new.max_tokens for old, new in zip(before, after, strict=True) if new is not old]
    return {NOTE: f"max_tokens={lower[0]}"} if lower else {}


def _longest(requests: Sequence[GenerationRequest]) -> int:
    """Return the largest ``max_tokens``."""
    return max([request.max_tokens for request in requests])


@dataclass(eq=False)
class _Ticket:
    """What a request holds."""

    admission: FairAdmission
    tenant: Tenant
    session: str
    began_s: float
    requests: tuple[GenerationRequest, ...] = ()
    tokens: int = 0
    slot: Held | None = None
    reservation: Reservation | None = None
    claims: list[Claim] = field(default_factory=list)
    open: bool = True
    charge: Charge = FREE
    reserved_s: float = 0.0  # Unix time

    @property
    def ends_s(self) -> float:
        """The request's own deadline."""
        return self.began_s + min([request.timeout_s or math.inf for request in self.requests], default=math.inf)

    def claim(self, pool: str, tokens: int, count: int, remaining_s: float = math.inf) -> Claim:
        """Queue for ``count`` slots of a pool. remaining_s: of the request's time. Raises Overloaded."""
        admission, tenant, slots, ends_s = self.admission, self.tenant, self.admission.slots(pool), self.ends_s
        rules, max_wait_s = tenant.class_rules, admission._rules.max_wait_s
        if rules is not None and rules.max_wait_s is not None:
            max_wait_s = rules.max_wait_s
        hold_s = slots.capacity.hold_s
        until_s = min(admission._clock() + min(hold_s or max_wait_s, remaining_s), ends_s)
        share = rules.share if rules is not None else 1.0
        order = (tenant.priority, tenant.weight, until_s)
        entry = Entry(tenant.name, max(1, tokens), *order, count, _longest(self.requests), share)
        try:
            claim = slots.claim(entry, ends_s)
        except Overloaded as exc:
            raise admission._refusal("queue", exc, pool) from None
        claim.hold_s = hold_s
        self.claims.append(claim)
        admission._tickets.add(self)
        return claim

    def learn(self, usage: Usage) -> None:
        """Take note of the work that the reserved tokens came to."""
        if self.open and self.claims and self.tokens:
            uncached = usage.input_tokens - usage.cached_tokens
            work = uncached * self.admission.prompt_weight() + usage.output_tokens
            self.claims[-1].pool.worked(work, self.tokens)

    def close(self, used_tokens: int, micros: int = 0) -> None:
        if not self.open:
            return
        self.open = False
        self.admission._tickets.discard(self)
        if self.slot is not None:
            self.slot.release()
        if self.reservation is not None:
            self.admission._budgets.settle(self.reservation, used_tokens, micros)
        for claim in self.claims:  # more than one only if its pool died: then each is charged its part
            claim.close(used_tokens * claim.entry.cost_tokens / max(1, self.tokens))


@dataclass(eq=False)
class Turn:
    """The slot of one choice.

    pool: where the slot is. claim: None at an upstream, which needs no slot.
    may_move: its pool was drawn by weight, so that another pool may serve it.
    """

    ticket: _Ticket
    pool: str = ""
    claim: Claim | None = None
    number: int = 0
    may_move: bool = False

    def begin(self) -> asyncio.Future[None]:
        """Return a future that is done when the choice has its slot; it fails with DeadlineExceeded. The first choice
        of a permit has its slot already."""
        if self.claim is not None:
            return self.claim.turn(self.number)
        begun = asyncio.get_running_loop().create_future()
        begun.set_result(None)
        return begun

    async def move(self) -> str:
        """Wait for a slot in another public pool, because the replicas of its own are down, and return that pool.

        Raises: Overloaded, DeadlineExceeded.
        """
        ticket = self.ticket
        await self._wait_in(ticket.admission.pools.draw(ticket.tenant.pool, ticket.session, self.pool))
        return self.pool

    async def go(self, target: str, remaining_s: float) -> None:
        """Release the slot and wait for one at an overflow target, or at the replicas if ``target`` is "".

        remaining_s: longest wait. Nothing is charged again.
        Raises: Overloaded, DeadlineExceeded.
        """
        ticket, admission = self.ticket, self.ticket.admission
        self.release()
        pool = admission.target_pool(target) if target else admission.pools.draw(ticket.tenant.pool, ticket.session)
        self.may_move = not target and pool != ticket.tenant.pool
        if pool or not target:
            await self._wait_in(pool, remaining_s)
        else:
            self.pool, self.claim = "", None

    async def _wait_in(self, pool: str, remaining_s: float = math.inf) -> None:
        """Release the slot and wait for one of ``pool``."""
        self.release()
        ticket = self.ticket
        self.claim = ticket.claim(pool, ticket.tokens // len(ticket.requests), 1, remaining_s)
        self.pool, self.number = pool, 0
        await self.claim.turn(0)

    def fail(self, error: TridentError) -> None:
        """End its wait for a slot with ``error``; nothing if it does not wait."""
        if self.claim is not None:
            turn = self.claim.turn(self.number)
            if not turn.done():
                turn.set_exception(error)

    def release(self) -> None:
        """Release the slot. Safe to call twice."""
        if self.claim is not None:
            self.claim.release(self.number)


@dataclass(eq=False)
class Permit:
    """An admitted request.

    requests: as requested, in order, perhaps with fewer ``max_tokens``.
    headers: of the response, in lower case: ``x-ratelimit-*``, and ``x-trident-degraded`` if it is degraded.
    target: the overflow target that serves it; "" for replicas.
    turns: one for each request. counts: tokens of each request's prompt.
    """

    requests: tuple[GenerationRequest, ...]
    headers: dict[str, str]
    target: str
    turns: tuple[Turn, ...]
    ticket: _Ticket = field(repr=False)
    counts: tuple[PromptCount, ...] = ()

    def settle(self, usage: Usage | None) -> None:
        """Charge ``usage`` and return the rest of the reservation, without blocking. A second call does nothing.

        usage: of all choices, also of a stream that was cut; None if nothing was generated.
        """
        ticket, charge = self.ticket, self.ticket.charge
        if not ticket.open:
            return
        if usage is not None:
            ticket.learn(usage)
        ticket.close(0 if usage is None else usage.input_tokens + usage.output_tokens, charge.micros(usage))
        if ticket.admission.on_charged is not None:
            ticket.admission.on_charged(charge.record(ticket.reserved_s, ticket.tenant.levels, usage))
