"""The model of an engine: continuous batching with slots and KV blocks, in steps whose time a step model tells.

A span is what happens between two events: one step while prompts are read, else all steps until a sequence ends or
tokens are due to be sent. Spans, not tokens, are the events of the simulation.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from simulator.scenario import Pool


@dataclass(eq=False)
class Sequence:
    """One request in the engine.

    prompt, most, answer: tokens of the prompt, that it may make (KV blocks are reserved for them), that it makes.
    first_id: position of the first token that it makes in the whole answer.
    prefix: key of what it shares with others, and how many tokens; they are in the prefix cache after the first.
    send: called with (tokens made since the last call, whether it is the end).
    Instants are the loop's seconds: arrival, first step, first token, last token.
    """

    prompt: int
    most: int
    answer: int
    send: Callable[[Sequence, int, bool], None]
    priority: float = 0.5
    first_id: int = 0
    prefix: tuple[str, int] = ("", 0)
    arrived_s: float = 0.0
    scheduled_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    cached: int = 0
    left: int = 0  # prompt tokens to be read
    sent: int = 0
    began: int = -1  # steps of the engine before its first token
    state: str = "waiting"

    @property
    def reserved(self) -> int:
        return self.prompt + self.most


@dataclass(eq=False)
class Engine:
    """One engine of a pool. ``submit`` and ``cancel`` sequences. slow: factor of its steps' time."""

    pool: Pool
    rng: random.Random
    slow: float = 1.0
    running: dict[Sequence, None] = field(default_factory=dict)
    steps: int = 0
    reserved: int = 0
    hung: bool = False

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[float, int, Sequence]] = []
        self._reading: deque[Sequence] = deque()
        self._ends: list[tuple[int, int, Sequence]] = []
        self._number = 0
        self._context = 0  # tokens of those that decode
        self._decoding = 0
        self._timer: asyncio.TimerHandle | None = None
        self._span = (0.0, 0, 0, 0.0)  # began, steps, prompt tokens, seconds of a step
        self._sent_s = 0.0
        self._cache: OrderedDict[str, int] = OrderedDict()
        self._cached = 0

    @property
    def waiting(self) -> int:
        return sum(sequence.state == "waiting" for _, _, sequence in self._waiting)

    @property
    def kv_usage(self) -> float:
        return min(1.0, self.reserved / self.pool.kv_tokens)

    def submit(self, sequence: Sequence) -> None:
        self._number += 1
        sequence.arrived_s = self._loop.time()
        heapq.heappush(self._waiting, (-sequence.priority, self._number, sequence))
        if len(self.running) < self.pool.slots:
            self._interrupt()

    def cancel(self, sequence: Sequence) -> None:
        """Take a sequence out after the step in progress; nothing for one that has ended."""
        if sequence.state in ("running", "reading"):
            self._leave(sequence)
            self._interrupt()
        sequence.state = "ended"

    def stop(self) -> None:
        """Do nothing until ``resume``, as a process that hangs."""
        self.hung = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def resume(self) -> None:
        if self.hung:
            self.hung = False
            self._plan()

    def _interrupt(self) -> None:
        """Plan again at the end of the step in progress."""
        if self._timer is None:
            self._plan()
            return
        began_s, steps, reading, step_s = self._span
        if steps > 1:
            done = max(1, math.ceil((self._loop.time() - began_s) / step_s - 1e-9))
            if done < steps:
                self._timer.cancel()
                self._span = began_s, done, reading, step_s
                self._timer = self._loop.call_at(began_s + done * step_s, self._finish)

    def _plan(self) -> None:
        """Begin the next span."""
        self._timer = None
        if self.hung:
            return
        now_s = self._loop.time()
        while self._waiting and len(self.running) < self.pool.slots:
            sequence = self._waiting[0][2]
            if sequence.state == "ended":
                heapq.heappop(self._waiting)
                continue
            if self.reserved + sequence.reserved > self.pool.kv_tokens and self.running:
                break
            heapq.heappop(self._waiting)
            self._admit(sequence)
        if not self.running:
            return
        while self._ends and self._ends[0][2].state == "ended":
            heapq.heappop(self._ends)
        reading, steps, each_s = 0, 1, 0.0
        for sequence in self._reading:
            if reading < self.pool.prefill_chunk:
                sequence.scheduled_s = sequence.scheduled_s or now_s
                reading += min(sequence.left, self.pool.prefill_chunk - reading)
        if not reading:
            steps = max(1, self._ends[0][0] - self.steps)
            each_s = self.pool.step.seconds(self._decoding, self._context, 0) * self.slow
            steps = max(1, min(steps, int(self.pool.send_s / each_s)))
        context = self._context + self._decoding * (steps - 1) // 2
        step_s = self.pool.step.seconds(self._decoding, context, reading) * self.slow
        if self.pool.noise:
            step_s *= self.rng.lognormvariate(0.0, self.pool.noise)
        self._span = now_s, steps, reading, step_s
        self._timer = self._loop.call_at(now_s + steps * step_s, self._finish)

    def _admit(self, sequence: Sequence) -> None:
        key, shared = sequence.prefix
        if key and key in self._cache:
            self._cache.move_to_end(key)
            sequence.cached = min(self._cache[key], shared, sequence.prompt - 1)
        elif key:
            self._cache[key] = shared
            self._cached += shared
            while self._cached > self.pool.kv_tokens and len(self._cache) > 1:
                self._cached -= self._cache.popitem(last=False)[1]
        sequence.left = max(1, sequence.prompt - sequence.cached)
        sequence.state = "reading"
        self.reserved += sequence.reserved
        self.running[sequence] = None
        self._reading.append(sequence)

    def _finish(self) -> None:
        """End the span: the steps were made."""
        now_s = self._loop.time()
        _, steps, reading, _ = self._span
        self.steps += steps
        self._context += steps * self._decoding
        while self._reading and reading:
            sequence = self._reading[0]
            part = min(sequence.left, reading)
            sequence.left -= part
            reading -= part
            if sequence.left:
                break
            self._reading.popleft()
            if sequence.state == "reading":  # the last chunk makes the first token
                sequence.state, sequence.first_s, sequence.began = "running", now_s, self.steps - 1
                self._decoding += 1
                self._context += sequence.prompt + sequence.first_id + 1
                self._number += 1
                heapq.heappush(self._ends, (self.steps - 1 + sequence.answer, self._number, sequence))
                self._tell(sequence, now_s)
        while self._ends and (self._ends[0][0] <= self.steps or self._ends[0][2].state == "ended"):
            sequence = heapq.heappop(self._ends)[2]
            if sequence.state == "running":
                self._tell(sequence, now_s, end=True)
        if now_s - self._sent_s >= self.pool.send_s * 0.999:
            self._sent_s = now_s
            for sequence in tuple(self.running):
                if sequence.state == "running":
                    self._tell(sequence, now_s)
        self._plan()

    def _tell(self, sequence: Sequence, now_s: float, end: bool = False) -> None:
        made = min(sequence.answer, self.steps - sequence.began)
        new, sequence.sent = made - sequence.sent, made
        if new:
            sequence.last_s = now_s
        end = end or made == sequence.answer
        if end:
            self._leave(sequence)
            sequence.state = "ended"
        if new or end:
            sequence.send(sequence, new, end)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.state == "running":
            self._decoding -= 1
            self._context -= sequence.prompt + sequence.first_id + self.steps - sequence.began
        elif sequence in self._reading:
            self._reading.remove(sequence)
        del self.running[sequence]
        self.reserved -= sequence.reserved
