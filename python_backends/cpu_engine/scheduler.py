"""Who runs and who waits: slots and KV cache blocks reserved for a whole request before it starts.

OpenVINO GenAI admits by itself, but a sequence that finds no block mid-way ends as IGNORED (docs/decisions/0003);
reserving ceil((prompt + max_tokens) / block) blocks here makes that impossible. The more urgent before the less, and
first come, first served among equals: a request that does not fit yet holds those behind it, so that long ones do not
starve.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from contract.errors import Overloaded
from python_backends.ensemble.priority import NORMAL


class Scheduler:
    """Not thread-safe; its owner holds a lock. Requests are known by their key."""

    def __init__(self, slots: int, blocks: int, max_waiting: int) -> None:
        self.slots = slots
        self.blocks = blocks
        self.max_waiting = max_waiting
        self._running: dict[int, int] = {}
        self._waiting: OrderedDict[int, int] = OrderedDict()
        self._order: list[tuple[float, int, int]] = []  # heap of (-priority, turn, key), some of which have left
        self._turn = 0
        self._free_blocks = blocks

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def reserved_blocks(self) -> int:
        return self.blocks - self._free_blocks

    def offer(self, key: int, blocks: int, priority: float = NORMAL) -> None:
        """Queues the request, or raises Overloaded at once when the queue is full. priority: 0 to 1, 1 the first."""
        if len(self._waiting) >= self.max_waiting:
            raise Overloaded(
                f"{self.running} requests are running and {self.waiting} are waiting; at most {self.max_waiting} may "
                "wait, try again later"
            )
        self._waiting[key] = blocks
        if len(self._order) > 2 * len(self._waiting) + 64:  # most of them have left while they waited
            self._order = [entry for entry in self._order if entry[2] in self._waiting]
            heapq.heapify(self._order)
        self._turn += 1
        heapq.heappush(self._order, (-priority, self._turn, key))

    def admit(self) -> list[int]:
        """Keys that may start now, in their order; their blocks are reserved until release."""
        admitted = []
        while self._order and len(self._running) < self.slots:
            key = self._order[0][2]
            blocks = self._waiting.get(key, 0)
            if blocks > self._free_blocks:
                break
            heapq.heappop(self._order)
            if self._waiting.pop(key, None) is None:
                continue  # it left while it waited
            self._running[key] = blocks
            self._free_blocks -= blocks
            admitted.append(key)
        return admitted

    def release(self, key: int) -> None:
        """The request has left the engine (or the queue); unknown keys are fine."""
        self._free_blocks += self._running.pop(key, 0)
        self._waiting.pop(key, None)

    def running_keys(self) -> list[int]:
        return list(self._running)

    def waiting_keys(self, at_most: int) -> list[int]:
        """The oldest waiting keys."""
        return [key for key, _ in zip(self._waiting, range(at_most), strict=False)]
