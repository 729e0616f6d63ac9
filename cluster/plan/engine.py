"""The model of an engine: continuous batching with slots and KV blocks, in steps whose time a step model tells.

A span is what happens between two events: one step while prompts are read, else all steps until a sequence ends or
tokens are due to be sent. Spans, not tokens, are the events. The planner and the simulator run this model; it has no
clock: who runs it calls ``finish`` at ``due_s``, and tells the instant of everything else.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from contract import manifest as manifests
from contract import step_model
from contract.step_model import StepModel

BLOCK_TOKENS = 32  # of a prompt, read at least by a step that reads any
SLOWER, SHORT_TOKENS = 1.7, 256  # of the CPU engine (python_backends/cpu_engine/step_budget.py)
WINDOW_S, STREAM_S = (0.004, 0.018), 0.0011
_PACE_STEPS = 8  # over which the mean of steps is taken
_PART = 0.35  # steps in a window beyond the quotient, in the mean; measured, from 1 stream to 16


@dataclass(frozen=True)
class Replica:
    """A kind of replica.

    slots: sequences at once. chunk_tokens: of one step. kv_tokens: of the KV cache.
    slower: a step that reads prompts beside streams may take so many times one that does not, and longer by the number
        of prompts for each stream (decision 0034); 0 if steps are filled up to chunk_tokens.
    short_tokens: prompts up to this length are read whole all the same.
    shared: whether a gateway, too, uses the cores of the replica's machine, where the step model tells what others take
        of them.
    """

    step: StepModel
    slots: int
    chunk_tokens: int
    kv_tokens: int
    slower: float = 0.0
    short_tokens: int = 0
    shared: bool = False

    @staticmethod
    def of_engine(folder: Path) -> Replica:
        """Return the kind of a calibrated engine. Raises NotFound, EngineFailed, InvalidArgument."""
        engine, model = manifests.load(folder), step_model.of_engine(folder)
        cache = engine.kv_cache_tokens or engine.max_batch_size * engine.max_seq_len
        pieces = engine.kind == "cpu" and engine.recipe.get("chunked_context") and engine.recipe.get("prefix_reuse")
        rule = (SLOWER, min(SHORT_TOKENS, engine.max_num_tokens)) if pieces else ()
        return Replica(model, engine.max_batch_size, engine.max_num_tokens, cache, *rule)

    @property
    def request_s(self) -> float:
        """By which a request that comes makes a step longer: a second of one of N cores, that others take, by 1/N s."""
        step = self.step
        cpu_s = step.request_cpu_s + self.shared * step.gateway_request_cpu_s
        return cpu_s / step.cores if step.cores else 0.0

    def seconds(self, decoding: int, context_tokens: float, prefill_tokens: int, pace_s: float = 0.0) -> float:
        """Return the seconds of a step, with what sending its tokens takes of the cores. pace_s: of the latest steps.

        The tokens of all streams are sent together, once in a window (python_backends/cpu_engine/coalescing_window.py).
        So where steps are longer than those that were calibrated, more messages of fewer tokens are sent.
        """
        step = self.step
        whole_s = step.seconds(decoding, context_tokens, prefill_tokens)
        if not (step.cores and decoding):
            return whole_s
        window_s = max(WINDOW_S[0], min(WINDOW_S[1], decoding * STREAM_S), decoding * STREAM_S / 2)
        sent_s = (step.burst_cpu_s + decoding * step.message_cpu_s) / step.cores
        own_s = max(whole_s / 4, whole_s - sent_s / max(1.0, window_s / whole_s + _PART))
        if self.shared:
            sent_s += (step.gateway_burst_cpu_s + decoding * step.gateway_message_cpu_s) / step.cores
        return own_s + sent_s / max(1.0, window_s / (pace_s or whole_s) + _PART)

    def whole(self, decoding: int) -> int:
        """Return the prompt tokens that a step beside streams has places for."""
        return max(BLOCK_TOKENS, self.chunk_tokens - decoding)

    def room(self, decoding: int, context_tokens: int, prompts: int) -> int:
        """Return the tokens of long prompts that a step may read."""
        room = self.whole(decoding)
        if not (self.slower and decoding and prompts):
            return room
        plain_s = self.step.seconds(decoding, context_tokens, 0)
        token_s = (self.step.seconds(decoding, context_tokens, room) - plain_s) / room
        longer_s = (self.slower - 1 + prompts / decoding) * plain_s
        return room if token_s * room <= longer_s else max(BLOCK_TOKENS, int(longer_s / token_s))


@dataclass(eq=False)
class Sequence:
    """One request in the engine.

    prompt, most, answer: tokens of the prompt, that it may make (KV blocks are reserved for them), that it makes.
    first_id: position of the first token that it makes in the whole answer.
    prefix: key of what it shares with others, and how many tokens; they are in the prefix cache after the first.
    send: called with (tokens made since the last call, whether it is the end).
    Instants are the clock's seconds: arrival, first step, first token, last token.
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
    """One engine. ``submit`` and ``cancel`` sequences, call ``finish`` at ``due_s``; infinite: there is nothing to do.

    send_s: seconds between two messages of a stream; 0: one for each step.
    noise: standard deviation of the logarithm of a step's time. slow: factor of it.
    stepped: called with a span's seconds of a step, steps, sequences that decoded, and what those that waited lacked:
        "slots", "kv" or "".
    """

    kind: Replica
    send_s: float = math.inf
    noise: float = 0.0
    rng: random.Random = field(default_factory=random.Random)
    stepped: Callable[[float, int, int, str], None] | None = None
    slow: float = 1.0
    running: dict[Sequence, None] = field(default_factory=dict)
    due_s: float = math.inf
    steps: int = 0
    reserved: int = 0
    hung: bool = False

    def __post_init__(self) -> None:
        self._waiting: list[tuple[float, int, Sequence]] = []
        self._reading: dict[Sequence, None] = {}
        self._ends: list[tuple[int, int, Sequence]] = []
        self._number = 0
        self._context = 0  # tokens of those that decode
        self._decoding = 0
        # Began, steps, prompt tokens that are read, seconds of a step.
        self._span: tuple[float, int, list[tuple[Sequence, int]], float] = 0.0, 0, [], 0.0
        self._lacked = ""
        self._owed_s = 0.0  # to those that came during the span
        self._pace_s = 0.0
        self._sent_s = 0.0
        self._cache: OrderedDict[str, int] = OrderedDict()
        self._cached = 0

    @property
    def waiting(self) -> int:
        return sum(sequence.state == "waiting" for _, _, sequence in self._waiting)

    @property
    def kv_usage(self) -> float:
        return min(1.0, self.reserved / self.kind.kv_tokens)

    def submit(self, sequence: Sequence, now_s: float) -> None:
        self._number += 1
        sequence.arrived_s = now_s
        if self.running:  # else it has taken nothing from anybody
            self._owed_s += self.kind.request_s
        heapq.heappush(self._waiting, (-sequence.priority, self._number, sequence))
        if len(self.running) < self.kind.slots:
            self._interrupt(now_s)

    def cancel(self, sequence: Sequence, now_s: float) -> None:
        """Take a sequence out after the step in progress; nothing for one that has ended."""
        if sequence.state in ("running", "reading"):
            self._leave(sequence)
            self._interrupt(now_s)
        sequence.state = "ended"

    def stop(self) -> None:
        """Do nothing until ``resume``, as a process that hangs."""
        self.hung, self.due_s = True, math.inf

    def resume(self, now_s: float) -> None:
        if self.hung:
            self.hung = False
            self._plan(now_s)

    def finish(self) -> None:
        """End the span: the steps were made."""
        now_s = self.due_s
        _, steps, parts, step_s = self._span
        if self.stepped is not None:
            self.stepped(step_s, steps, self._decoding, self._lacked)
        self.steps += steps
        self._context += steps * self._decoding
        for sequence, part in parts:
            sequence.left -= part
            if sequence.left or sequence.state != "reading":
                continue
            # The last chunk makes the first token.
            del self._reading[sequence]
            sequence.state, sequence.first_s, sequence.began = "running", now_s, self.steps - 1
            self._decoding += 1
            self._context += sequence.prompt + sequence.first_id + 1
            self._number += 1
            heapq.heappush(self._ends, (self.steps - 1 + sequence.answer, self._number, sequence))
            self._tell(sequence, now_s)
        while self._ends and (self._ends[0][0] <= self.steps or self._ends[0][2].state == "ended"):
            sequence = heapq.heappop(self._ends)[2]
            if sequence.state == "running":
                self._tell(sequence, now_s)
        if now_s - self._sent_s >= self.send_s * 0.999:
            self._sent_s = now_s
            for sequence in tuple(self.running):
                if sequence.state == "running":
                    self._tell(sequence, now_s)
        self._plan(now_s)

    def _interrupt(self, now_s: float) -> None:
        """Plan again at the end of the step in progress."""
        if self.due_s == math.inf:
            self._plan(now_s)
            return
        began_s, steps, parts, step_s = self._span
        if steps > 1:
            done = max(1, math.ceil((now_s - began_s) / step_s - 1e-9))
            if done < steps:
                self._span = began_s, done, parts, step_s
                self.due_s = began_s + done * step_s

    def _plan(self, now_s: float) -> None:
        """Begin the next span."""
        self.due_s = math.inf
        if self.hung:
            return
        kind, self._lacked = self.kind, ""
        while self._waiting:
            sequence = self._waiting[0][2]
            if sequence.state != "ended":
                if len(self.running) >= kind.slots:
                    self._lacked = "slots"
                elif self.reserved + sequence.reserved > kind.kv_tokens and self.running:
                    self._lacked = "kv"
                if self._lacked:
                    break
                self._admit(sequence)
            heapq.heappop(self._waiting)
        if not self.running:
            self._pace_s = 0.0
            return
        while self._ends and self._ends[0][2].state == "ended":
            heapq.heappop(self._ends)
        decoding, context, steps = self._decoding, float(self._context), 1
        parts = self._read(now_s) if self._reading else []
        step_s = kind.seconds(decoding, context, sum(part for _, part in parts), self._pace_s) * self.slow
        if not parts:
            steps = max(1, self._ends[0][0] - self.steps)
            if self.send_s < math.inf:
                steps = max(1, min(steps, int(self.send_s / step_s)))
            if kind.step.cores:
                steps = min(steps, _PACE_STEPS)
            step_s = kind.seconds(decoding, context + decoding * (steps - 1) / 2, 0, self._pace_s) * self.slow
        step_s, self._owed_s = step_s + self._owed_s / steps, 0.0
        if self.noise:
            step_s *= self.rng.lognormvariate(0.0, self.noise)
        before_s = self._pace_s or step_s
        self._pace_s = before_s + (step_s - before_s) * min(1.0, 2 * steps / _PACE_STEPS)
        self._span, self.due_s = (now_s, steps, parts, step_s), now_s + steps * step_s

    def _read(self, now_s: float) -> list[tuple[Sequence, int]]:
        """Return the prompt tokens of the next step, first come first served."""
        parts, read, whole = [], 0, self.kind.whole(self._decoding)
        room = self.kind.room(self._decoding, self._context, len(self._reading))
        for sequence in self._reading:
            limit = whole if sequence.prompt <= self.kind.short_tokens else room
            if read >= limit:
                break
            sequence.scheduled_s = sequence.scheduled_s or now_s
            parts.append((sequence, min(sequence.left, limit - read)))
            read += parts[-1][1]
        return parts

    def _admit(self, sequence: Sequence) -> None:
        key, shared = sequence.prefix
        if key and key in self._cache:
            self._cache.move_to_end(key)
            sequence.cached = min(self._cache[key], shared, sequence.prompt - 1)
        elif key:
            self._cache[key] = shared
            self._cached += shared
            while self._cached > self.kind.kv_tokens and len(self._cache) > 1:
                self._cached -= self._cache.popitem(last=False)[1]
        sequence.left = max(1, sequence.prompt - sequence.cached)
        sequence.state = "reading"
        self.reserved += sequence.reserved
        self.running[sequence] = None
        self._reading[sequence] = None

    def _tell(self, sequence: Sequence, now_s: float) -> None:
        made = min(sequence.answer, self.steps - sequence.began)
        new, sequence.sent = made - sequence.sent, made
        if new:
            sequence.last_s = now_s
        end = made == sequence.answer
        if end:
            self._leave(sequence)
            sequence.state = "ended"
        if new or end:
            sequence.send(sequence, new, end)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.state == "running":
            self._decoding -= 1
            self._context -= sequence.prompt + sequence.first_id + self.steps - sequence.began
        else:
            self._reading.pop(sequence, None)
        del self.running[sequence]
        self.reserved -= sequence.reserved
