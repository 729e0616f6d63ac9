"""What the slots of one pool of one gateway must keep: their number, shares, classes, deadlines, fairness."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from gateway.admission.fair_queue import Entry
from gateway.admission.pool_slots import Claim, PoolSlots
from gateway.admission.sharing import AHEAD

_Key = tuple[int, str]  # class and tenant, which take turns
_SLACK = 1e-6


class Turns:
    """Counts on its own who waits for the slots of a pool and who gets them.

    slots_there: those of all replicas that were not given back. known: whether a ready one has told its slots; before
    that, a gateway admits what may come.
    """

    def __init__(
        self, slots: PoolSlots, slots_there: Callable[[], int], known: Callable[[], bool], broken: Callable[[str], None]
    ) -> None:
        self._slots, self._there, self._known, self._broken = slots, slots_there, known, broken
        self._came: defaultdict[int, dict[Entry, float]] = defaultdict(dict)  # by class, in the order they came
        self._held_of, self._held_at = Counter[str](), Counter[int]()  # slots by tenant and by class
        # By key: tokens of a request at most, of those that run, and of these at most.
        self._largest: defaultdict[_Key, float] = defaultdict(float)
        self._running: defaultdict[_Key, float] = defaultdict(float)
        self._most_running: defaultdict[_Key, float] = defaultdict(float)
        # Tokens by weight that the first key got in turns of both beyond what the second one got.
        self._ahead: defaultdict[_Key, dict[_Key, float]] = defaultdict(dict)
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
                ahead[other] = ahead.get(other, 0.0) + cost / entry.weight
                bound: float = 2 * self._slots.rules.quantum_tokens
                bound += (2 * self._largest[key] + self._most_running[key]) / entry.weight
                bound += (max(head.next_cost, self._largest[other]) + self._most_running[other]) / head.weight
                if ahead[other] > bound:
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
        for held, most, problem in (
            (
                self._held_at.total(),
                rules.max_running or math.ceil(there * AHEAD),
                "more slots were given than are there",
            ),
            (self._held_of[entry.tenant], _part(own, rules.tenant_share), "a tenant got more slots than tenant_share"),
            (less_urgent, _part(own, entry.share), "a class got more slots than its share"),
        ):
            if held > most and self._known():
                self._broken(problem)

    def _take_back(self, entry: Entry, number: int, reserved: bool) -> None:
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
