"""Admission for all workers of one gateway, in their parent: one set of caps, budgets and fair queues.

A worker's requests wait and hold slots here as those of one process would; what it holds ends with its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from contract.background import Background
from contract.errors import TridentError
from gateway.admission.budget_store import MemoryStore
from gateway.admission.budgets import Reservation
from gateway.admission.concurrency import Concurrency, Slot
from gateway.admission.fair_queue import Entry
from gateway.admission.hub_link import Frames
from gateway.admission.pool_slots import Claim, PoolSlots
from gateway.admission.sharing import UNKNOWN, Capacity, OthersLoad, capacity
from gateway.config.policy import AdmissionRules
from gateway.config.tenant import Levels
from gateway.usage.store import UsageStore

TOLD_EVERY_S = 0.05  # workers learn how full pools are, which only degradation and metrics need


class _Pool:
    """reports: by worker, what the replicas that it sees could run for this gateway alone. The load of other gateways
    is told from those of the first worker. most: requests that had a slot between its last reports."""

    def __init__(self, hub: Hub, name: str) -> None:
        self.slots = PoolSlots(hub.clock, self.capacity, hub.rules, full=lambda: hub.caps.fullness(name) >= 1)
        self.reports: dict[int, Capacity] = {}
        self.most: deque[int] = deque([0, 0, 0], maxlen=3)  # a report tells what was scraped up to a second ago
        self._others = OthersLoad()

    def capacity(self) -> Capacity:
        known = [report for report in self.reports.values() if report != UNKNOWN]
        best = max(known, key=lambda report: report.slots, default=UNKNOWN)
        return capacity(best.slots, self._others.requests, best.kv_usage) if known and not best.hold_s else best

    def report(self, worker: int, alone: Capacity, requests: float) -> None:
        self.reports[worker] = alone
        if worker == min(self.reports) and alone.slots and alone != UNKNOWN:
            self._others.observe(int(requests), self.slots.running, max(self.most))
            self.most.append(self.slots.running)
        self.slots.dispatch()


class _HubClaim(Claim):
    """Tells the worker of every slot, and of the error that ends the wait."""

    tell: Callable[..., None]
    most: deque[int]

    def fail(self, error: TridentError) -> None:
        super().fail(error)
        self.tell("failed", error)

    def _given(self, reserved: bool) -> None:
        super()._given(reserved)
        self.most[-1] = max(self.most[-1], self.pool.running)
        self.tell("given")


class _Worker:
    """What one worker holds, by the worker's own numbers. heard_s: when it last sent anything."""

    def __init__(self, hub: Hub, number: int) -> None:
        self.hub, self.number = hub, number
        self.frames = Frames(self._received, self._lost)
        self.slots: dict[int, Slot] = {}
        self.claims: dict[int, _HubClaim] = {}
        self.reservations: dict[str, tuple[Reservation, int, int]] = {}  # with their tokens and what they may cost
        self.heard_s = hub.clock()

    def _received(self, kind: str, *parts: Any) -> None:
        self.heard_s = self.hub.clock()
        getattr(self, f"on_{kind}")(*parts)

    def _lost(self) -> None:
        for slot in self.slots.values():
            slot.release()
        for claim in list(self.claims.values()):
            claim.close(claim.entry.cost_tokens)
        for held in self.reservations.values():  # nothing is known of what was used
            self.hub.budgets.settle(*held)
        self.hub.forget(self)

    def on_acquire(self, call: int, levels: Levels, priority: int, requests: int, pool: str) -> None:
        refused = None
        try:
            self.slots[call] = self.hub.caps.try_acquire(levels, priority, requests, pool)
        except TridentError as error:
            refused = error
        self.frames.send("reply", call, refused)

    def on_release(self, call: int) -> None:
        if (slot := self.slots.pop(call, None)) is not None:
            slot.release()

    def on_reserve(self, call: int, levels: Levels, tokens: int, least: int | None, micros: int) -> None:
        async def reserve() -> None:
            try:
                answer: Any = await self.hub.budgets.reserve(levels, tokens, least, micros)
            except TridentError as error:
                answer = error
            else:
                if not self.frames.open:
                    self.hub.budgets.settle(answer, 0)
                elif answer.granted:
                    self.reservations[answer.id] = answer, tokens, micros
            self.frames.send("reply", call, answer)

        self.hub.reserving.start(reserve())

    def on_settle(self, reservation: Reservation, used: int, micros: int) -> None:
        self.reservations.pop(reservation.id, None)
        self.hub.budgets.settle(reservation, used, micros)

    def on_claim(self, call: int, pool: str, entry: Entry, lasts_until_s: float) -> None:
        found = self.hub.pool(pool)
        claim = _HubClaim(found.slots, entry, lasts_until_s)
        claim.tell, claim.most = lambda kind, *parts: self.frames.send(kind, call, *parts), found.most
        self.claims[call] = claim
        try:
            found.slots.enter(claim)
        except TridentError as error:
            del self.claims[call]
            self.frames.send("failed", call, error)

    def on_free(self, call: int, number: int) -> None:
        if call in self.claims:
            self.claims[call].release(number)

    def on_close(self, call: int, used_tokens: float) -> None:
        if (claim := self.claims.pop(call, None)) is not None:
            claim.close(used_tokens)

    def on_report(self, pool: str, alone: Capacity, requests: float) -> None:
        self.hub.pool(pool).report(self.number, alone, requests)

    def on_rules(self, rules: AdmissionRules, pools: tuple[str, ...]) -> None:
        self.hub.change(rules, pools)

    def on_publish(self, topic: str, *message: Any) -> None:
        for worker in self.hub.workers.values():
            if worker is not self:
                worker.frames.send("published", topic, *message)

    def on_ready(self) -> None:
        self.hub.ready(self.number)


class Hub:
    """The state that all workers share. ready: called with the number of a worker that serves now."""

    def __init__(
        self,
        limit: int,
        lease_s: float,
        ready: Callable[[int], None] = lambda number: None,
        database: UsageStore | None = None,
    ) -> None:
        self.clock = time.monotonic  # the same in all processes of a machine
        self.rules = AdmissionRules()
        self.caps, self.ready = Concurrency(limit), ready
        self.budgets = MemoryStore(self.clock, lease_s, database)
        self.reserving = Background()
        self.workers: dict[int, _Worker] = {}
        self._pools: dict[str, _Pool] = {}
        self._told: dict[str, dict[str, Any]] = {}

    async def attach(self, number: int, end: socket.socket) -> None:
        """Serve one worker over its end of a socket pair."""
        worker = self.workers[number] = _Worker(self, number)
        await worker.frames.connect(end)
        worker.frames.send("state", self._told)

    def pool(self, name: str) -> _Pool:
        if name not in self._pools:
            self._pools[name] = _Pool(self, name)
        return self._pools[name]

    def change(self, rules: AdmissionRules, pools: tuple[str, ...]) -> None:
        self.rules = rules
        self.caps.change(rules.max_in_flight_of_class, pools)
        for pool in self._pools.values():
            pool.slots.change(rules)

    def forget(self, worker: _Worker) -> None:
        self.workers.pop(worker.number, None)
        for pool in self._pools.values():
            pool.reports.pop(worker.number, None)

    async def run(self) -> None:
        """Tell the workers how full the pools are, until it is cancelled."""
        while True:
            await asyncio.sleep(TOLD_EVERY_S)
            state = {}
            for name, pool in self._pools.items():
                if pool.slots.waiting:
                    pool.slots.dispatch()
                state[name] = pool.slots.state() | {"fullness": self.caps.fullness(name)}
            if state != self._told:
                self._told = state
                for worker in self.workers.values():
                    worker.frames.send("state", state)

    async def close(self) -> None:
        for worker in list(self.workers.values()):
            worker.frames.close()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        await self.reserving.done()
        await self.budgets.aclose()
