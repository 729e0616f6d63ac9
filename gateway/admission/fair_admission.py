"""Admission: caps, budgets and each pool's fair queue in one place; it gives permits to generate.

    tenant = keys.tenant(api_key)                        # Unauthenticated
    permit = await admission.admit(requests, tenant)     # Overloaded, DeadlineExceeded, InvalidArgument, Unavailable
    try: serve permit.requests, perhaps with fewer max_tokens than ``requests``, each when its turn has begun
    finally: permit.settle(usage)                        # once, at the end

``admit`` may wait; cancelling it releases everything. The choices of one request (``n``, several prompts) are admitted
together or not at all, but each gets its slot by itself and releases it when it ends.

The order: choose the pool → shorten under pressure → cap → room in the pool's queue → reserve the budget → wait for a
slot of the pool → Permit. Every pool has its own slots, queue and pressure; a busy pool does not delay another one.
Under pressure first ``max_tokens`` is capped, then requests overflow, then they are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol, TypeVar

from contract.errors import DeadlineExceeded, Overloaded, TridentError, Unavailable
from contract.generation import GenerationRequest, Usage, changed
from gateway.admission.budget_store import BudgetStore
from gateway.admission.budgets import FREE, Charge, Demand, Reservation, Standing
from gateway.admission.concurrency import Caps, Slot
from gateway.admission.fair_queue import Entry
from gateway.admission.pool_slots import Claim, PoolSlots, retry_after_s
from gateway.admission.prompt_tokens import PromptCount, PromptTokens
from gateway.admission.sharing import Capacity
from gateway.config.policy import AdmissionRules, DegradationRules
from gateway.config.tenant import Tenant, applying
from gateway.usage.store import UsageRecord

_Error = TypeVar("_Error", Overloaded, DeadlineExceeded)
_REASONS: dict[type[TridentError], str] = {Overloaded: "queue", DeadlineExceeded: "deadline"}
Accepts = Callable[[str, Sequence[GenerationRequest]], bool]  # whether an overflow target can serve these requests

DEGRADED_HEADER = "x-trident-degraded"
HELD = "x-trident-held"  # seconds that the request may wait for a replica of a pool that has none
_NO_PRESSURE = DegradationRules(shorter_at=10, overflow_at=10, refuse_at=10)


class Stage(str, Enum):
    """Stages in order of severity."""

    NONE = "none"
    SHORTER = "max_tokens"
    OVERFLOW = "overflow"
    REFUSE = "refuse"


def stage_at(pressure: float, rules: DegradationRules) -> Stage:
    """Return the stage of a pressure; 1 is full. Without overflow targets the stage before OVERFLOW continues."""
    if pressure >= rules.refuse_at:
        return Stage.REFUSE
    if pressure >= rules.overflow_at and rules.overflow:
        return Stage.OVERFLOW
    return Stage.SHORTER if pressure >= rules.shorter_at else Stage.NONE


def shortened(request: GenerationRequest, most: int) -> GenerationRequest:
    """Return ``request`` with ``max_tokens`` of at most ``most``, or of what it continues if that is more."""
    most = max(most, len(request.continue_ids))
    return request if request.max_tokens <= most else changed(request, max_tokens=most)


def degraded(request: GenerationRequest, rules: DegradationRules) -> GenerationRequest:
    """Return ``request`` as it is served in the stage SHORTER: a continued stream keeps the limit it began with, and
    ``min_tokens`` can be reached."""
    return request if request.continue_ids else shortened(request, max(rules.max_tokens, request.sampling.min_tokens))


class Pools(Protocol):
    """The pools of replicas, as admission needs them; see ``routing.replicas.Replicas``."""

    def draw(self, pinned: str, session: str = "", without: str | None = None) -> str: ...
    def capacity(self, pool: str) -> Capacity: ...
    def prompt_weight(self) -> float: ...


class FairAdmission:
    """Admission for one gateway process: ``await admit(requests, tenant)``.

    clock: monotonic seconds, the clock of an in-memory budget store.
    target_pool: returns the pool of an overflow target; "" for an upstream.
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
        rng: random.Random | None = None,
        make_slots: Callable[..., PoolSlots] = PoolSlots,
    ) -> None:
        self._budgets, self._concurrency, self._clock = budgets, concurrency, clock
        self.pools, self.target_pool = pools, target_pool
        self._rules, self.prompt_tokens = AdmissionRules(), PromptTokens()
        self._degradation: DegradationRules | None = None
        self._rng = rng or random.Random()
        self._slots: dict[str, PoolSlots] = {}
        self._make_slots = make_slots
        self._permits: set[Permit] = set()  # that have queued for a slot and are open
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
                self._clock,
                lambda: self.pools.capacity(pool),
                self._rules,
                name=pool,
                refused=lambda error: self._refusal(_REASONS[type(error)], error, pool),
                full=lambda: self._concurrency.fullness(pool) >= 1,
                rng=self._rng,
            )
        return found

    def change(self, rules: AdmissionRules, degradation: DegradationRules | None, pools: tuple[str, ...] = ()) -> None:
        """Apply new rules to later decisions. Requests that run or wait stay. pools: all there are, for the caps."""
        self._rules, self._degradation = rules, degradation
        self._concurrency.change(rules.max_in_flight_of_class, pools)
        for slots in self._slots.values():
            slots.change(rules)

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
        for claim in [claim for permit in self._permits for claim in permit.claims]:
            if claim.pool.capacity.hold_s:
                problem = "the gateway is stopping and the pool has no replica; retry at another"
                claim.fail(Unavailable(problem, 1.0))

    def pressure(self, tenant: Tenant, pool: str = "") -> float:
        """Return the fullness of the tenant's fullest bound at the pool: 0 is empty, 1 is full."""
        queue = self.slots(pool).queue
        return max(
            self._concurrency.fullness(pool),
            self.pools.capacity(pool).kv_usage,
            queue.by_class.get(tenant.priority, 0) / queue.rules.max_waiting_per_class,
            queue.by_tenant.get(tenant.name, 0) / queue.rules.max_waiting_per_tenant,
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
        session: conversation id; a session stays in one pool. targets: for overflow, in order; None for the rules'.
        prompt_tokens: counts the prompts; None for the gateway's own.
        Raises: Overloaded with ``reason``, ``retry_after_s`` and ``headers`` (pressure, cap, queue or budget full),
        DeadlineExceeded (in the queue), InvalidArgument (never fits a budget or cap), Unavailable (no budget store).
        """
        pool = self.pools.draw(tenant.pool, session)
        capped, headers = self._capped(tuple(requests), tenant)
        requests, target, more = self._degraded(capped, tenant, pool, accepts, down, targets)
        headers |= more
        if target:
            pool = self.target_pool(target)
        permit = Permit(self, tenant, self._clock(), charge, requests, headers, target, session)
        async with self._placed(permit, len(requests), pool):
            if pool or not target:
                self._check_room(tenant, pool)
            need = await (prompt_tokens or self.prompt_tokens).need(requests, tenant.name)
            permit.tokens, permit.counts = need.tokens, need.counts
            output_tokens = sum([request.max_tokens for request in requests])
            await self._reserve(permit, need.tokens, need.least, output_tokens, pool)
            if pool or not target:  # an upstream has its own capacity, and no slot here is used
                claim = permit.claim(pool, permit.tokens, len(requests))
                drawn = not target and pool != tenant.pool
                permit.turns = tuple([Turn(permit, pool, claim, number, drawn) for number in range(len(requests))])
                if claim.hold_s:  # the response may begin, so that its caller is told
                    headers[HELD] = f"{claim.hold_s:g}"
                else:
                    await claim.turn(0)
            else:
                permit.turns = tuple(Turn(permit) for _ in requests)
        return permit

    async def admit_input(
        self, tokens: int, least: int, tenant: Tenant, pool: str, timeout_s: float, charge: Charge = FREE
    ) -> Permit:
        """Return the permit for an input that is only read, by an encoder of ``pool``, when it has a slot. tokens,
        least: as estimated and in any case. Raises: as ``admit``; under pressure there is only refusal."""
        rules = self._degradation
        if rules is not None and self.pressure(tenant, pool) >= rules.refuse_at:
            raise self._refusal("pressure", Overloaded("there is more work than can be done"), pool)
        work = GenerationRequest(text_input="", max_tokens=max(1, tokens), timeout_s=timeout_s)
        permit = Permit(self, tenant, self._clock(), charge, (work,), tokens=tokens)
        async with self._placed(permit, 1, pool):
            self._check_room(tenant, pool)
            await self._reserve(permit, tokens, least, 0, pool)
            claim = permit.claim(pool, tokens, 1)
            permit.turns = (Turn(permit, pool, claim),)
            await claim.turn(0)
        return permit

    async def admit_reader(self, tenant: Tenant, charge: Charge = FREE) -> Permit:
        """Admit a reader of a reused response: charge one request and hold the caps, but no tokens and no slot."""
        permit = Permit(self, tenant, self._clock(), charge)
        async with self._placed(permit, 1, tenant.pool):
            await self._reserve(permit, 0, 0, 0, tenant.pool)
        return permit

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
        headers = {DEGRADED_HEADER: f"overflow={target}"} if target else _shorter_note(requests, served)
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

    @contextlib.asynccontextmanager
    async def _placed(self, permit: Permit, requests: int, pool: str) -> AsyncIterator[None]:
        """Take a place under the caps; on an error give back all that the permit holds."""
        tenant = permit.tenant
        try:
            permit.slot = await self._concurrency.acquire(tenant.levels, tenant.priority, requests, pool)
        except Overloaded as exc:
            raise self._refusal("concurrency", exc, pool) from None
        try:
            yield
        except BaseException:
            permit.close(0)
            raise

    def _check_room(self, tenant: Tenant, pool: str) -> None:
        try:
            self.slots(pool).queue.check_room(tenant.name, tenant.priority)
        except Overloaded as exc:
            raise self._refusal("queue", exc, pool) from None

    async def _reserve(self, permit: Permit, tokens: int, least: int, output_tokens: int, pool: str) -> None:
        """Reserve on every level of the permit; add the response's headers."""
        charge = permit.charge
        permit.reserved_s = time.time()
        levels = applying(permit.tenant.levels, charge.model, charge.endpoint)
        if not levels:
            return
        if not tokens:  # what nothing is generated for costs a request
            levels = tuple(
                replace(level, limits=replace(level.limits, tokens_per_minute=None, quotas=())) for level in levels
            )
        micros = charge.most_micros(tokens - output_tokens, output_tokens)
        permit.reservation = reservation = await self._budgets.reserve(levels, tokens, least, micros)
        short = reservation.refused_by
        if short is None:
            permit.headers |= reservation.headers | dict(self.on_reserved(reservation.standings))
            return
        demand, left = short.demand, max(0, math.floor(short.balance))
        if demand.left_s:
            problem = f"{demand.level} has {_amount(short.balance, demand)} left of {demand.limit}"
            error = Overloaded(f"{problem} and the request may need {_amount(demand.amount, demand)}")
            raise self._refusal("quota", error, pool, demand.left_s, reservation.headers)
        error = Overloaded(f"{demand.level} has {left} {demand.unit} left and the request may need {demand.amount:.0f}")
        # Only the bucket's refill brings its tokens back, so its rate counts and not the queue's.
        wait_s = retry_after_s(short.short, demand.rate_per_s, self._rng, most_s=3600.0)
        raise self._refusal("budget", error, pool, wait_s, reservation.headers)

    def _refusal(
        self, reason: str, error: _Error, pool: str, wait_s: float | None = None, headers: dict[str, str] | None = None
    ) -> _Error:
        """Count the refusal and return ``error`` with its reason and retry-after."""
        self.rejected[reason] += 1
        self.on_refusal(pool, reason)
        if wait_s is None:
            wait_s = self.slots(pool).retry_after_s(self._rng)
        error.reason, error.retry_after_s = reason, wait_s
        error.headers = headers or {}
        return error


def _amount(value: float, demand: Demand) -> str:
    return f"{max(0.0, value) / 1e6:.6f}" if demand.money else f"{max(0.0, value):.0f} tokens"


def _shorter_note(before: Sequence[GenerationRequest], after: Sequence[GenerationRequest]) -> dict[str, str]:
    """Return the response header that names a lower ``max_tokens``; none if there is none."""
    lower = [new.max_tokens for old, new in zip(before, after, strict=True) if new is not old]
    return {DEGRADED_HEADER: f"max_tokens={lower[0]}"} if lower else {}


def _longest(requests: Sequence[GenerationRequest]) -> int:
    """Return the largest ``max_tokens``."""
    return max([request.max_tokens for request in requests])


@dataclass(eq=False)
class Permit:
    """An admitted request and what it holds.

    charge: what it is charged by. requests: as requested, in order, perhaps with fewer ``max_tokens``.
    headers: of the response, in lower case: ``x-ratelimit-*``, and ``x-trident-degraded`` if it is degraded.
    target: the overflow target that serves it; "" for replicas.
    tokens: that it may use. turns: one for each request. counts: tokens of each request's prompt.
    """

    admission: FairAdmission = field(repr=False)
    tenant: Tenant
    began_s: float
    charge: Charge
    requests: tuple[GenerationRequest, ...] = ()
    headers: dict[str, str] = field(default_factory=dict)
    target: str = ""
    session: str = ""
    tokens: int = 0
    turns: tuple[Turn, ...] = field(default=(), repr=False)
    counts: tuple[PromptCount, ...] = ()
    slot: Slot | None = None
    reservation: Reservation | None = None
    claims: list[Claim] = field(default_factory=list)
    open: bool = True
    reserved_s: float = 0.0  # Unix time

    def claim(self, pool: str, tokens: int, count: int, remaining_s: float = math.inf) -> Claim:
        """Queue for ``count`` slots of a pool. remaining_s: of the request's time. Raises Overloaded."""
        admission, tenant, slots = self.admission, self.tenant, self.admission.slots(pool)
        ends_s = self.began_s + min([request.timeout_s or math.inf for request in self.requests], default=math.inf)
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
        admission._permits.add(self)
        return claim

    def settle(self, usage: Usage | None) -> None:
        """Charge ``usage``, of all choices, and return the rest of the reservation, without blocking and only once.
        None: nothing was generated."""
        if not self.open:
            return
        if usage is not None and self.claims and self.tokens:  # the work that the reserved tokens came to
            uncached = usage.input_tokens - usage.cached_tokens
            work = uncached * self.admission.pools.prompt_weight() + usage.output_tokens
            self.claims[-1].pool.worked(work, self.tokens)
        self.close(0 if usage is None else usage.input_tokens + usage.output_tokens, self.charge.micros(usage))
        if self.admission.on_charged is not None:
            self.admission.on_charged(self.charge.record(self.reserved_s, self.tenant.levels, usage))

    def close(self, used_tokens: int, micros: int = 0) -> None:
        """Give back all it holds, once."""
        if not self.open:
            return
        self.open = False
        self.turns = ()  # which refer to it: it is freed without the garbage collector
        self.admission._permits.discard(self)
        if self.slot is not None:
            self.slot.release()
        if self.reservation is not None:
            self.admission._budgets.settle(self.reservation, used_tokens, micros)
        for claim in self.claims:  # more than one only if its pool died: then each is charged its part
            claim.close(used_tokens * claim.entry.cost_tokens / max(1, self.tokens))


@dataclass(eq=False)
class Turn:
    """The slot of one choice, in ``pool``. claim: None at an upstream, which needs no slot. may_move: its pool was
    drawn by weight, so that another pool may serve it."""

    permit: Permit
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
        Raises: Overloaded, DeadlineExceeded."""
        permit = self.permit
        await self._wait_in(permit.admission.pools.draw(permit.tenant.pool, permit.session, self.pool))
        return self.pool

    async def go(self, target: str, remaining_s: float) -> None:
        """Release the slot and wait up to ``remaining_s`` for one at an overflow target, or at the replicas if
        ``target`` is "". Nothing is charged again. Raises: Overloaded, DeadlineExceeded."""
        permit, admission = self.permit, self.permit.admission
        self.release()
        pool = admission.target_pool(target) if target else admission.pools.draw(permit.tenant.pool, permit.session)
        self.may_move = not target and pool != permit.tenant.pool
        if pool or not target:
            await self._wait_in(pool, remaining_s)
        else:
            self.pool, self.claim = "", None

    async def _wait_in(self, pool: str, remaining_s: float = math.inf) -> None:
        """Release the slot and wait for one of ``pool``."""
        self.release()
        permit = self.permit
        self.claim = permit.claim(pool, permit.tokens // len(permit.requests), 1, remaining_s)
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
