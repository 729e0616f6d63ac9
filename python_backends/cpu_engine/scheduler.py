"""Which requests run and which wait: a slot and KV cache blocks are reserved for a whole request before it starts.

OpenVINO GenAI schedules by itself, but a sequence that finds no free block ends as IGNORED (docs/decisions/0003);
reserving ceil((prompt + max_tokens) / block) blocks here prevents that. Higher priority first, then first come, first
served. A request that does not fit yet blocks those behind it (head-of-line blocking), so that long ones do not starve.
One whose guide is not checked yet is held: it has no place in the order until it is offered.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from contract import failpoint
from contract.errors import Overloaded
from contract.priority import NORMAL


class Scheduler:
    """Not thread-safe: the engine holds its lock. Requests are identified by their key."""

    def __init__(self, slots: int, blocks: int, max_waiting: int) -> None:
        self.slots = slots
        self.blocks = blocks
        self.max_waiting = max_waiting
        self._running: dict[int, int] = {}
        self._waiting: OrderedDict[int, int] = OrderedDict()
        self._held: dict[int, tuple[int, float]] = {}  # blocks and priority
        self._order: list[tuple[float, int, int]] = []  # heap of (-priority, arrival, key), released ones included
        self._arrivals = 0
        self._free_blocks = blocks

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot or are held."""
        return len(self._waiting) + len(self._held)

    def hold(self, key: int, blocks: int, priority: float = NORMAL) -> None:
        """Take a request that is not to start before it is offered; see ``enqueue``."""
        self._held[key] = blocks, priority

    def holds(self, key: int) -> bool:
        return key in self._held

    def offer(self, key: int) -> None:
        """Queue a request that is held. Raises Overloaded: the queue is full."""
        self.enqueue(key, *self._held.pop(key))

    def enqueue(self, key: int, blocks: int, priority: float = NORMAL) -> None:
        """Queue a request.

        blocks: KV cache blocks it needs.
        priority: 0 (last) to 1 (first).
        Raises Overloaded: the queue is full.
        """
        if len(self._waiting) >= self.max_waiting:
            waiting = f"{len(self._waiting)} of {self.max_waiting} requests wait"
            raise Overloaded(f"queue full: {waiting}, {self.running} are running; try later")
        self._waiting[key] = blocks
        if len(self._order) > 2 * len(self._waiting) + 64:  # most of them were released while they waited
            self._order = [entry for entry in self._order if entry[2] in self._waiting]
            heapq.heapify(self._order)
        self._arrivals += 1
        heapq.heappush(self._order, (-priority, self._arrivals, key))

    def schedule(self) -> list[int]:
        """Return the keys that start now, in order; their slots and blocks are reserved until release."""
        scheduled = []
        while self._order and len(self._running) < self.slots:
            key = self._order[0][2]
            blocks = self._waiting.get(key, 0)
            if blocks > self._free_blocks or failpoint.value("engine.kv") is not None:
                break
            heapq.heappop(self._order)
            if self._waiting.pop(key, None) is None:
                continue  # released while it waited
            self._running[key] = blocks
            self._free_blocks -= blocks
            scheduled.append(key)
        return scheduled

    def release(self, key: int) -> None:
        """Free a request's slot and blocks, or its queue entry; does nothing for an unknown key."""
        self._free_blocks += self._running.pop(key, 0)
        self._waiting.pop(key, None)
        self._held.pop(key, None)

    def running_keys(self) -> list[int]:
        """Return the keys that hold a slot."""
        return list(self._running)

    def waiting_keys(self, at_most: int) -> list[int]:
        """Return the oldest keys that wait for a slot."""
        return [key for key, _ in zip(self._waiting, range(at_most), strict=False)]
