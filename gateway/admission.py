"""The door: caps, budgets and the fair queue in one place, behind the protocol of permit.py.

The order: shorten under pressure → cap → room in the queue → reserve the budget → wait for the turn → Permit. What
is taken on the way is given back in one place, ``_Ticket.close``, once, whichever way the request ends.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from contract.errors import DeadlineExceeded, Overloaded
from contract.generation import GenerationRequest, Usage
from gateway import drain_rate
from gateway.budget_store import BudgetStore
from gateway.budgets import Level, Reservation
from gateway.concurrency import Concurrency, Slot
from gateway.degradation import Ladder, Stage, degrade
from gateway.fairness import Entry, FairQueue
from gateway.permit import Release, Tenant
from gateway.prompt_tokens import PromptCount, PromptTokens

# Where nobody says how much can run at once.
UNKNOWN_CAPACITY = 256
_Refusal = TypeVar("_Refusal", Overloaded, DeadlineExceeded)
Takes = Callable[[str, Sequence[GenerationRequest]], bool]  # whether an overflow target can have these requests now


@dataclass(frozen=True)
class Shares:
    """How many requests are on the replicas at once, and how many of those one tenant may have.

    max_running: 0 for as many as the replicas say they can run. tenant_share: below 1, the rest is free for others'
    requests at any time, so that long answers of one tenant do not hold all places when short ones of another come.
    max_wait_s: longest time in the queue, whatever the request's own deadline.
    """

    max_running: int = 0
    tenant_share: float = 0.8
    max_wait_s: float = 30.0


class FairAdmission:
    """Admission for one gateway process: ``await admit(requests, tenant)``.

    clock: seconds, the one the budget store counts with if that is in memory. capacity: how many requests the replicas
    can run at once, for shares that leave it to them, times ``ahead``, which is what they are sent early. ``rejected``
    and ``degraded`` count what was refused and lowered, by reason and stage.
    """

    def __init__(
        self,
        budgets: BudgetStore,
        concurrency: Concurrency,
        queue: FairQueue,
        clock: Callable[[], float],
        *,
        shares: Shares = Shares(),
        ladder: Ladder | None = None,
        capacity: Callable[[], int] = lambda: UNKNOWN_CAPACITY,
        ahead: float = 1.0,
        prompt_tokens: PromptTokens | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._budgets, self._concurrency, self._queue, self._clock = budgets, concurrency, queue, clock
        self._shares, self._ladder, self._capacity, self._ahead = shares, ladder, capacity, ahead
        self.prompt_tokens = prompt_tokens or PromptTokens()
        self._rng = rng or random.Random()
        self._drain = drain_rate.DrainRate()
        self._crowded, self._crowded_s, self._looked_s = False, 0.0, 0.0
        self.running = 0  # places on the replicas that permits have
        self._running: Counter[str] = Counter()
        self._running_tokens = 0.0
        self._wake: asyncio.TimerHandle | None = None
        self.rejected: Counter[str] = Counter()
        self.degraded: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def max_running(self) -> int:
        """Places on the replicas."""
        return self._shares.max_running or self._capacity()

    def queued(self) -> dict[int, int]:
        """How many wait, by the class they came in."""
        return self._queue.depths()

    def change(self, shares: Shares, ladder: Ladder | None, class_limits: Mapping[int, int]) -> None:
        """Other rules from now on. What runs and waits stays."""
        self._shares, self._ladder = shares, ladder
        self._concurrency.class_limits = class_limits
        self._dispatch()

    def pressure(self, tenant: Tenant) -> float:
        """How full the fullest bound is that this tenant can meet: 0 is empty, 1 is full."""
        queue = self._queue
        return max(
            self._concurrency.in_flight / self._concurrency.limit,
            queue.depth(tenant.priority) / queue.max_per_class,
            queue.waiting_of(tenant.name) / queue.max_per_tenant,
        )

    async def admit(
        self,
        requests: Sequence[GenerationRequest],
        tenant: Tenant,
        takes: Takes = lambda target, requests: True,
        down: bool = False,
    ) -> QueuedPermit:
        """The permit, as soon as it is the turn of all ``requests`` together; see permit.py. Where no overflow target
        takes them, answers are shortened instead. down: the tenant's pool has no healthy replica, so that a target
        serves them whatever the pressure.

        Raises Overloaded with ``reason``, ``retry_after_s`` and ``headers`` (pressure, a cap, the queue or a budget is
        full), DeadlineExceeded (their time was up in the queue), InvalidArgument (they can never fit a budget or a
        cap), Unavailable (the budget store does not answer).
        """
        now_s = self._clock()
        requests, target, headers = self._lowered(tuple(requests), tenant, takes, down)
        ticket = _Ticket(self, tenant, self._acquire(tenant, len(requests)))
        try:
            if not target:
                self._check_room(tenant)
            need = await self.prompt_tokens.need(requests, tenant.name)
            ticket.tokens_each = max(1, need.tokens // len(requests))
            ticket.reservation = await self._reserve(tenant.levels, need.tokens, need.least)
            headers |= ticket.reservation.headers
            if not target:  # the overflow target has its own capacity, and no place here is used
                until_s = now_s + min(self._shares.max_wait_s, requests[0].timeout_s or math.inf)
                turn = asyncio.get_running_loop().create_future()
                ticket.entry = Entry(
                    tenant.name, need.tokens, tenant.priority, tenant.weight, until_s, len(requests), work=turn
                )
                self._push(ticket.entry)
                await turn
        except BaseException:
            ticket.close(0)
            raise
        return QueuedPermit(requests, headers, target, ticket, need.counts)

    async def queue_for_replicas(self, ticket: _Ticket, left_s: float) -> Release:
        """Waits for the turn of one request that was admitted to an overflow target and comes back from there. Its
        budget stays as reserved. Returns what gives the slot back, told the tokens used; closing the ticket does so
        too. Raises Overloaded, DeadlineExceeded.
        """
        tenant = ticket.tenant
        self._check_room(tenant)
        until_s = self._clock() + min(self._shares.max_wait_s, left_s)
        turn = asyncio.get_running_loop().create_future()
        entry = Entry(tenant.name, ticket.tokens_each, tenant.priority, tenant.weight, until_s, 1, work=turn)
        ticket.returned.append(entry)
        self._push(entry)
        await turn
        return lambda used_tokens: self._release_returned(ticket, entry, used_tokens)

    def _release_returned(self, ticket: _Ticket, entry: Entry, used_tokens: int) -> None:
        if entry in ticket.returned:
            ticket.returned.remove(entry)
            self._leave(entry, used_tokens)
            self._dispatch()

    async def admit_reader(self, tenant: Tenant) -> QueuedPermit:
        """For an answer that exists already or is being made for somebody else: a request of the tenant's budget and
        a place in its caps, no tokens and no turn. Raises what ``admit`` raises."""
        ticket = _Ticket(self, tenant, self._acquire(tenant, 1))
        try:
            requests_only = [replace(one, limits=replace(one.limits, tokens_per_minute=None)) for one in tenant.levels]
            ticket.reservation = await self._reserve(tuple(requests_only), 0, 0)
        except BaseException:
            ticket.close(0)
            raise
        return QueuedPermit((), dict(ticket.reservation.headers), "", ticket)

    def _lowered(
        self, requests: tuple[GenerationRequest, ...], tenant: Tenant, takes: Takes, down: bool
    ) -> tuple[tuple[GenerationRequest, ...], str, dict[str, str]]:
        """The requests as they may be served under the pressure there is, where, and what is said about it."""
        ladder = self._ladder
        if ladder is None:
            return requests, "", {}
        stage = ladder.stage(self.pressure(tenant))
        if stage is Stage.REFUSE:
            raise self._refusal("pressure", Overloaded("there is more work than can be done"))
        target = ""
        if down or stage is Stage.OVERFLOW:
            target = next((name for name in ladder.overflow if takes(name, requests)), "")
            stage = Stage.OVERFLOW if target else Stage.SHORTER if stage is Stage.OVERFLOW else stage
        lowered = [degrade(one, stage, ladder, target) for one in requests]
        note = next((one.note for one in lowered if one.note), "")
        if not note:
            return requests, "", {}
        self.degraded[stage.value] += 1
        return tuple(one.request for one in lowered), lowered[0].target, {"x-trident-degraded": note}

    def _acquire(self, tenant: Tenant, places: int) -> Slot:
        try:
            return self._concurrency.try_acquire(tenant.levels, tenant.priority, places)
        except Overloaded as exc:
            raise self._refusal("concurrency", exc) from None

    def _check_room(self, tenant: Tenant) -> None:
        try:
            self._queue.check_room(tenant.name, tenant.priority)
        except Overloaded as exc:
            raise self._refusal("queue", exc) from None

    async def _reserve(self, levels: tuple[Level, ...], tokens: int, least: int) -> Reservation:
        reservation = await self._budgets.reserve(levels, tokens, least)
        short = reservation.refused_by
        if short is None:
            return reservation
        left = max(0, math.floor(short.balance))
        unit, level = short.demand.unit, short.demand.level
        error = Overloaded(f"{level} has {left} {unit} left and the request may need {short.demand.amount:.0f}")
        # The bucket's own pace, not the queue's: nothing else brings its tokens back.
        wait_s = drain_rate.retry_after_s(short.short, short.demand.rate_per_s, self._rng, most_s=3600.0)
        raise self._refusal("budget", error, wait_s, reservation.headers)

    def _push(self, entry: Entry) -> None:
        try:
            self._queue.push(entry, self._clock())
        except Overloaded as exc:
            raise self._refusal("queue", exc) from None
        self._dispatch()

    def _refusal(
        self, reason: str, error: _Refusal, wait_s: float | None = None, headers: Mapping[str, str] | None = None
    ) -> _Refusal:
        """``error`` with the reason that metrics name and what the caller is told about when to come back."""
        self.rejected[reason] += 1
        if wait_s is None:
            self._look()
            backlog = self._queue.backlog_tokens + self._running_tokens
            wait_s = drain_rate.retry_after_s(backlog, self._drain.tokens_per_s(self._crowded_s), self._rng)
        error.reason, error.retry_after_s = reason, wait_s
        error.headers = {**(headers or {}), **drain_rate.headers(wait_s)}
        return error

    def _may_run(self, entry: Entry) -> bool:
        """Within its tenant's share; what is wider than that runs when the tenant has nothing else."""
        share = self._share()
        return self._running[entry.tenant] + min(entry.places, share) <= share

    def _share(self) -> int:
        """Places that one tenant may have. A share is one of what runs: a place that only waits at a replica is no room
        for others."""
        of_all, running = self._shares.tenant_share, self.max_running
        if of_all < 1 and not self._shares.max_running:
            of_all /= self._ahead
        return max(1, math.floor(running * of_all))

    def _fits(self, entry: Entry) -> bool:
        most = self.max_running
        return self.running + min(entry.places, most) <= most

    def _dispatch(self) -> None:
        """Lets in whoever's turn it is, refuses whoever's time is up, and looks again at the next deadline."""
        now_s = self._clock()
        for entry in self._queue.expire(now_s):
            self._expire(entry)
        while len(self._queue) and self.running < self.max_running:
            entry = self._queue.pop(now_s, self._may_run, self._fits)
            if entry is None:
                break
            if entry.work.done():
                continue  # its caller has just left and will close its ticket in a moment
            self.running += entry.places
            self._running[entry.tenant] += entry.places
            self._running_tokens += entry.cost_tokens
            entry.work.set_result(None)
        self._look()
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        next_s = self._queue.next_deadline_s()
        if next_s < math.inf:
            self._wake = asyncio.get_running_loop().call_later(max(0.0, next_s - now_s) + 0.001, self._dispatch)

    def _look(self) -> bool:
        """Whether others were kept waiting or out until now. Only such time counts for the pace at which a backlog
        shrinks: what is settled in a quiet hour says how little was asked."""
        now_s, crowded = self._clock(), self._crowded
        if crowded:
            self._crowded_s += now_s - self._looked_s
        self._looked_s = now_s
        self._crowded = len(self._queue) > 0 or self._concurrency.in_flight >= self._concurrency.limit
        return crowded

    def _expire(self, entry: Entry) -> None:
        error = DeadlineExceeded("the request waited in the gateway's queue until its time was up")
        error = self._refusal("deadline", error)
        if not entry.work.done():
            entry.work.set_exception(error)

    def _closed(self, ticket: _Ticket, used_tokens: int) -> None:
        ticket.slot.release()
        if ticket.reservation is not None:
            self._budgets.settle(ticket.reservation, used_tokens)
        entries = ([ticket.entry] if ticket.entry is not None else []) + ticket.returned
        for entry in entries:
            self._queue.remove(entry)
            let_in = entry.work.done() and not entry.work.cancelled() and entry.work.exception() is None
            if let_in:
                self._leave(entry, used_tokens)
        if entries:
            self._dispatch()

    def _leave(self, entry: Entry, used_tokens: int) -> None:
        self.running -= entry.places
        self._running[entry.tenant] -= entry.places
        if not self._running[entry.tenant]:
            del self._running[entry.tenant]
        self._running_tokens -= entry.cost_tokens
        # The whole reservation is off the backlog, used or not; that is the pace at which the backlog shrinks.
        if self._look():
            self._drain.observe(entry.cost_tokens, self._crowded_s)
        self._queue.give_back(entry, entry.cost_tokens - used_tokens)


@dataclass(eq=False)
class _Ticket:
    """What a request has taken so far."""

    admission: FairAdmission
    tenant: Tenant
    slot: Slot
    reservation: Reservation | None = None
    entry: Entry | None = None
    tokens_each: int = 1  # reserved for each of its requests
    returned: list[Entry] = field(default_factory=list)  # of requests that came back from an overflow target
    open: bool = True

    def close(self, used_tokens: int) -> None:
        if self.open:
            self.open = False
            self.admission._closed(self, used_tokens)


@dataclass(eq=False)
class QueuedPermit:
    """See permit.Permit."""

    requests: tuple[GenerationRequest, ...]
    headers: dict[str, str]
    target: str
    ticket: _Ticket = field(repr=False)
    counts: tuple[PromptCount, ...] = ()

    async def queue_for_replicas(self, left_s: float) -> Release:
        return await self.ticket.admission.queue_for_replicas(self.ticket, left_s)

    def settle(self, usage: Usage | None) -> None:
        self.ticket.close(0 if usage is None else usage.input_tokens + usage.output_tokens)
