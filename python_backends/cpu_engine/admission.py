"""Who runs and who waits: slots and KV cache blocks reserved for a whole request before it starts.

OpenVINO GenAI admits by itself, but a sequence that finds no block mid-way ends as IGNORED (docs/decisions/0003);
reserving ceil((prompt + max_tokens) / block) blocks here makes that impossible. First come, first served: a request
that does not fit yet holds those behind it, so that long ones do not starve.
"""

from __future__ import annotations

from collections import OrderedDict

from contract.errors import Overloaded


class Admission:
    """Not thread-safe; its owner holds a lock. Requests are known by their key."""

    def __init__(self, slots: int, blocks: int, max_waiting: int) -> None:
        self.slots = slots
        self.blocks = blocks
        self.max_waiting = max_waiting
        self._running: dict[int, int] = {}
        self._waiting: OrderedDict[int, int] = OrderedDict()
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

    def offer(self, key: int, blocks: int) -> None:
        """Queues the request, or raises Overloaded at once when the queue is full."""
        if len(self._waiting) >= self.max_waiting:
            raise Overloaded(
                f"{self.running} requests are running and {self.waiting} are waiting; at most {self.max_waiting} may "
                "wait, try again later"
            )
        self._waiting[key] = blocks

    def admit(self) -> list[int]:
        """Keys that may start now, oldest first; their blocks are reserved until release."""
        admitted = []
        while self._waiting and len(self._running) < self.slots:
            key, blocks = next(iter(self._waiting.items()))
            if blocks > self._free_blocks:
                break
            del self._waiting[key]
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
