"""The slots of one pool and the queue for them. Everything runs on one event loop.

A request needs one slot for each of its choices and gets them one by one, as they come free: each choice begins and
ends by itself, so that a request with many choices neither waits for many slots at once nor keeps them idle. Who is
refused is told when to return: the tokens in slots and queue, divided by the pace at which they are settled.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from contract.errors import DeadlineExceeded, Overloaded, TridentError
from gateway.admission import sharing
from gateway.admission.fair_queue import Entry, FairQueue
from gateway.admission.sharing import Capacity
from gateway.config.policy import AdmissionRules

# A request is short if it may generate at most this part of what the running ones may on average: then no answer that
# holds a reserved slot takes longer than this part of the others.
SHORT = 0.25
MEMORY = 0.995  # of the work that requests came to: weight of all those before the latest
UNKNOWN_S, LEAST_S, JITTER = 1.0, 0.1, 0.25
_STATE = ("running", "capacity", "drain_tokens_per_s", "arrived_tokens", "_reserved", "_longest_tokens")
_COUNTS = ("running_tokens", "_running_of", "_running_at")


@dataclass(eq=False)
class DrainRate:
    """The tokens settled per second, over the last ``memory_s`` or so: an exponential average."""

    memory_s: float = 10.0
    _sum: float = 0.0
    _began_s: float | None = None
    _at_s: float = 0.0

    def observe(self, tokens: float, now_s: float) -> None:
        """Count ``tokens`` as processed at ``now_s``."""
        if self._began_s is None:
            self._began_s = self._at_s = now_s
        self._decay(now_s)
        self._sum += tokens

    def tokens_per_s(self, now_s: float) -> float:
        """Return the rate; 0 if nothing was observed yet."""
        if self._began_s is None:
            return 0.0
        self._decay(now_s)
        watched = 1.0 - math.exp(-max(now_s - self._began_s, 1.0) / self.memory_s)
        return self._sum / (self.memory_s * watched)

    def _decay(self, now_s: float) -> None:
        if now_s > self._at_s:
            self._sum *= math.exp((self._at_s - now_s) / self.memory_s)
            self._at_s = now_s


def retry_after_s(backlog_tokens: float, tokens_per_s: float, rng: random.Random, most_s: float = 60.0) -> float:
    """Return the seconds until the backlog is processed, from LEAST_S to ``most_s``, and up to JITTER of it more, so
    that callers that were refused together do not retry together. UNKNOWN_S while nothing was measured."""
    wait_s = backlog_tokens / tokens_per_s if tokens_per_s > 0 else UNKNOWN_S
    return min(max(wait_s, LEAST_S), most_s) * (1.0 + JITTER * rng.random())


class _Limits(NamedTuple):
    """limit: requests at the replicas now. open: of which so many of any length. share: of one tenant. slots: of which
    classes have their shares."""

    limit: int
    open: int
    share: int
    slots: float


class PoolSlots:
    """One pool's slots. refused: completes the error of a request that gets no slot. full: whether callers are refused
    because too many are under way."""

    def __init__(
        self,
        clock: Callable[[], float],
        capacity: Callable[[], Capacity],
        rules: AdmissionRules,
        *,
        name: str = "",
        refused: Callable[[Overloaded | DeadlineExceeded], TridentError] = lambda error: error,
        full: Callable[[], bool] = lambda: False,
        rng: random.Random | None = None,
    ) -> None:
        self.queue, self.rules, self.name = FairQueue(rules), rules, name
        self._clock, self._capacity, self._refused, self._full = clock, capacity, refused, full
        self.running = 0  # slots that were given and not released
        self._reserved = 0  # of which so many are kept for short requests, or only wait at a replica
        self._running_of: defaultdict[str, int] = defaultdict(int)
        self._running_at: defaultdict[int, int] = defaultdict(int)  # by priority
        self.running_tokens: defaultdict[int, float] = defaultdict(float)  # by class
        self.arrived_tokens = 0.0  # of all requests that ever queued
        self._worked = self._worked_tokens = 0.0  # of late: work in tokens of decoding, and the tokens reserved for it
        self._longest_tokens = 0  # of the running ones, added up
        self._drain = DrainRate()
        self._saturated, self._saturated_s, self._checked_s = False, 0.0, 0.0
        self._wake: asyncio.TimerHandle | None = None
        self._rng = rng or random.Random()
        # A part of 3.4 slots is 4 slots with a chance of 0.4, drawn when a slot is released. Rounded down, few slots
        # would stay divided unequally; drawn more often, slots held for long would make the larger number the rule.
        self._rounding = self._rng.random()

    def change(self, rules: AdmissionRules) -> None:
        self.rules = self.queue.rules = rules
        self.dispatch()

    @property
    def capacity(self) -> Capacity:
        """What this gateway may have running in the pool, and what it may have sent there."""
        found, most = self._capacity(), self.rules.max_running
        return Capacity(most, most) if most and not found.hold_s else found

    @property
    def waiting(self) -> int:
        return len(self.queue)

    @property
    def idle(self) -> bool:
        """Nothing runs, nothing waits, and nothing is left over from what did."""
        left = (self.running, self._reserved, self._longest_tokens, self.queue.backlog_tokens)
        return not (any((*left, *self.running_tokens.values())) or self._running_of or self._running_at or self.waiting)

    def retry_after_s(self, rng: random.Random) -> float:
        """Return when a refused request may be sent again, from the pace at which this pool's backlog shrinks."""
        backlog = self.queue.backlog_tokens + sum(self.running_tokens.values())
        return retry_after_s(backlog, self.drain_tokens_per_s, rng)

    @property
    def drain_tokens_per_s(self) -> float:
        """The pace at which reserved tokens are settled while requests wait; 0 before any waited."""
        self._update_saturated_time()
        return self._drain.tokens_per_s(self._saturated_s)

    @property
    def token_cost(self) -> float:
        """Work of a reserved token, in tokens of decoding, over the latest requests; 0 before the first."""
        return self._worked / self._worked_tokens if self._worked_tokens else 0.0

    def worked(self, work: float, tokens: float) -> None:
        """Learn from a request that ended what work the ``tokens`` reserved for it came to."""
        self._worked = MEMORY * self._worked + work
        self._worked_tokens = MEMORY * self._worked_tokens + tokens

    def is_short_wait(self, tenant: str, longest_tokens: int) -> bool:
        """Whether a request would get a slot at once, or would be the tenant's only one that waits, with fewer others
        than can run at once."""
        limits = self._limits()
        if self._running_of.get(tenant, 0) < limits.share and longest_tokens <= self._length_allowed(limits):
            return True
        return self.waiting < self.capacity.slots and not self.queue.by_tenant.get(tenant)

    def claim(self, entry: Entry, lasts_until_s: float) -> Claim:
        """Queue a request for its slots: until ``entry.deadline_s`` for the first, until ``lasts_until_s`` for the
        others. Raises Overloaded if the queue is full."""
        claim = Claim(self, entry, lasts_until_s)
        self.enter(claim)
        return claim

    def enter(self, claim: Claim) -> None:
        """Queue a claim. Raises Overloaded if the queue is full."""
        entry, queue, now_s, limits = claim.entry, self.queue, self._clock(), self._limits()
        at_once = not len(queue) and entry.slots == 1 and now_s < entry.deadline_s and self._may_run(entry, limits)
        if at_once:  # as the queue would give it, without its heaps
            queue.check_room(entry.tenant, entry.priority)
        else:
            entry.work = claim
            queue.push(entry, now_s)
        self.arrived_tokens += entry.cost_tokens
        if at_once:
            self._give(claim, limits)
            self._update_saturated_time()
        else:
            self.dispatch()

    def dispatch(self) -> None:
        """Give free slots to waiting entries, fail the expired ones, and schedule the next deadline."""
        now_s, queue = self._clock(), self.queue
        for entry in queue.expire(now_s):
            error = DeadlineExceeded("the request waited in the gateway's queue until its time was up")
            entry.work.fail(self._refused(error))
        if len(queue):
            limits = self._limits()
            while self._length_allowed(limits) >= queue.shortest_tokens():
                next_entry = queue.pop(now_s, lambda entry: self._may_run(entry, limits))
                if next_entry is None:
                    break
                if next_entry.work.left:  # its claim is about to be closed
                    queue.remove(next_entry)
                else:
                    self._give(next_entry.work, limits)
        self._update_saturated_time()
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        next_s = queue.next_deadline_s()
        if next_s < math.inf:
            self._wake = asyncio.get_running_loop().call_later(max(0.0, next_s - now_s) + 0.001, self.dispatch)

    def state(self) -> dict[str, Any]:
        """Return what another process needs to know of the load, for ``hub_link.SharedSlots``."""
        counts = {name: getattr(self, name).copy() for name in _COUNTS}
        return {name: getattr(self, name) for name in _STATE} | counts | {"queue": self.queue.state()}

    def _limits(self) -> _Limits:
        capacity = self.capacity
        if capacity.others:
            return self._shared_limits(capacity)
        # A share is one of what runs: a request that only waits at a replica makes no room for others.
        share = self._share(capacity.slots, self.rules.tenant_share) if self.rules.tenant_share < 1 else capacity.limit
        reserved = self._reserve(capacity.slots)
        unreserved = capacity.slots - reserved if reserved else capacity.limit
        return _Limits(capacity.limit, unreserved, share, capacity.slots)

    def _shared_limits(self, capacity: Capacity) -> _Limits:
        """Return the limits while other gateways have requests at the same replicas. The reserve is one of the pool:
        the gateways divide the other slots. Of the reserve each may use its part, and at least one slot."""
        slots, others = capacity.pool_slots, capacity.others
        reserved, own = self._reserve(slots), sharing.part(slots, others)
        part = sharing.part(slots - reserved, others)
        limit = math.floor(part + self._rounding)
        share = self._share(own, self.rules.tenant_share) if self.rules.tenant_share < 1 else limit
        own_reserved = max(1, round(reserved * part / slots)) if reserved else 0
        return _Limits(limit + own_reserved, limit, share, own)

    def _share(self, slots: float, share: float) -> int:
        """Return how many of the slots a tenant or class with this share may hold, at least 1."""
        rounding = 0.0 if isinstance(slots, int) else self._rounding
        return max(1, math.floor(slots * share + rounding))

    def _reserve(self, slots: int) -> int:
        """Return the slots, of ``slots``, that are kept for short requests."""
        if not self.rules.short_reserve or slots < 2:
            return 0
        return min(max(1, math.floor(slots * self.rules.short_reserve)), slots - 1)

    def _length_allowed(self, limits: _Limits) -> float:
        """Return the most tokens that a request may generate to get a slot now."""
        if self.running < limits.limit and self.running - self._reserved < limits.open:
            return math.inf
        # Not by the sum of what runs: where the limits have just shrunk, the reserve may still be free.
        return SHORT * self._longest_tokens / self.running if self._reserved < limits.limit - limits.open else -1.0

    def _may_run(self, entry: Entry, limits: _Limits) -> bool:
        if entry.share < 1:
            running = sum(count for priority, count in self._running_at.items() if priority >= entry.priority)
            if running >= self._share(limits.slots, entry.share):
                return False
        of_tenant = self._running_of.get(entry.tenant, 0)
        return of_tenant < limits.share and entry.longest_tokens <= self._length_allowed(limits)

    def _give(self, claim: Claim, limits: _Limits) -> None:
        entry, reserved = claim.entry, self.running - self._reserved >= limits.open
        self.running += 1
        self._reserved += reserved
        self._running_of[entry.tenant] += 1
        self._running_at[entry.priority] += 1
        self.running_tokens[entry.priority] += entry.part(claim.given)
        self._longest_tokens += entry.longest_tokens
        claim._given(reserved)

    def _take_back(self, entry: Entry, number: int, reserved: bool) -> None:
        """Free the slot of a choice."""
        tokens = entry.part(number)
        self._rounding = self._rng.random()
        self.running -= 1
        self._reserved -= reserved
        self._running_of[entry.tenant] -= 1
        if not self._running_of[entry.tenant]:
            del self._running_of[entry.tenant]
        self._running_at[entry.priority] -= 1
        if not self._running_at[entry.priority]:
            del self._running_at[entry.priority]
        self.running_tokens[entry.priority] -= tokens
        self._longest_tokens -= entry.longest_tokens
        # The whole reservation is off the backlog, used or not; that is the pace at which the backlog shrinks.
        if self._saturated:
            self._update_saturated_time()
            self._drain.observe(tokens, self._saturated_s)

    def _update_saturated_time(self) -> None:
        """Add up saturated time. Drain rate is measured only while requests wait or are refused: idle time would
        understate it."""
        now_s = self._clock()
        if self._saturated:
            self._saturated_s += now_s - self._checked_s
        self._checked_s = now_s
        self._saturated = len(self.queue) > 0 or self._full()


@dataclass(eq=False)
class Claim:
    """What one request waits for and holds in a pool: a slot for each of its choices, numbered from 0."""

    pool: PoolSlots
    entry: Entry
    lasts_until_s: float
    given: int = 0
    hold_s: float = 0.0  # that it may wait for a replica of a pool that has none
    _turns: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    _held: dict[int, bool] = field(default_factory=dict)  # by number, whether it is a reserved one
    _error: TridentError | None = None
    _closed: bool = False

    @property
    def left(self) -> bool:
        """Whether a waiter was cancelled, so that the claim is about to be closed."""
        return any(turn.cancelled() for turn in self._turns.values())

    def turn(self, number: int) -> asyncio.Future[None]:
        """Return a future that is done when the choice has its slot; it fails when the request times out."""
        turn = self._turns.get(number)
        if turn is None:
            turn = self._turns[number] = asyncio.get_running_loop().create_future()
            if number < self.given:
                turn.set_result(None)
            elif self._error is not None:
                turn.set_exception(self._error)
        return turn

    def fail(self, error: TridentError) -> None:
        """End the wait of every choice that waits, with ``error``."""
        self._error = error
        for turn in self._turns.values():
            if not turn.done():
                turn.set_exception(error)

    def release(self, number: int) -> None:
        """Release the slot of a choice. Safe to call twice."""
        if number in self._held:
            self.pool._take_back(self.entry, number, self._held.pop(number))
            self.pool.dispatch()

    def close(self, used_tokens: float) -> None:
        """Release all slots of the request and return the unused part of its charge."""
        if self._closed:
            return
        self._closed = True
        makes_room = self.pool.queue.remove(self.entry) or bool(self._held)
        self.entry.work = None
        for number, reserved in self._held.items():
            self.pool._take_back(self.entry, number, reserved)
        self._held.clear()
        if self.given:
            charged = sum([self.entry.part(number) for number in range(self.given)])
            self.pool.queue.give_back(self.entry, charged - used_tokens)
        if makes_room:
            self.pool.dispatch()

    def _given(self, reserved: bool) -> None:
        number = self.given
        self.given += 1
        self._held[number] = reserved
        turn = self._turns.get(number)
        if turn is not None and not turn.done():
            turn.set_result(None)
        if number == 0 and self.entry.waiting:
            self.pool.queue.extend(self.entry, self.lasts_until_s)
