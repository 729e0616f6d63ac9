"""The model of an engine: continuous batching with slots and KV blocks, in steps whose time a step model tells.

Its events are spans, not tokens: one step while prompts are read, else all steps until a sequence ends or tokens are
due to be sent. It has no clock: who runs it calls ``finish`` at ``due_s``, and tells the instant of everything else.
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
from contract.scheduling import (
    BLOCK_TOKENS,
    MAX_SLOWDOWN,
    UNDRAFTED_FROM,
    WHOLE_PROMPT_TOKENS,
    DraftResumption,
    drafts_beside,
    drafts_gain,
    slowdown,
    undrafted_from,
)
from contract.step_model import STRETCHES, StepModel, accepted_at, tokens_per_step


@dataclass(frozen=True)
class Replica:
    """A kind of replica.

    slots: sequences at once. chunk_tokens: of one step. kv_tokens: of the KV cache.
    slower: a step that reads a prompt beside streams may take so many times one that does not, and longer the more
        prompts wait (decision 0034); 0 if steps are filled up to chunk_tokens.
    short_tokens: prompts up to this length are read whole. max_seq_len: tokens of prompt and answer; 0: kv_tokens.
    """

    step: StepModel
    slots: int
    chunk_tokens: int
    kv_tokens: int
    slower: float = 0.0
    short_tokens: int = 0
    max_seq_len: int = 0

    @staticmethod
    def of_engine(folder: Path) -> Replica:
        """Return the kind of a calibrated engine. Raises NotFound, EngineFailed, InvalidArgument."""
        engine, model = manifests.load(folder), step_model.of_engine(folder)
        pieces = engine.kind == "cpu" and engine.recipe.get("chunked_context") and engine.recipe.get("prefix_reuse")
        rule = (MAX_SLOWDOWN, min(WHOLE_PROMPT_TOKENS, engine.max_num_tokens)) if pieces else (0.0, 0)
        cache = engine.kv_cache_blocks * BLOCK_TOKENS
        return Replica(model, engine.max_batch_size, engine.max_num_tokens, cache, *rule, engine.max_seq_len)

    @property
    def longest(self) -> int:
        """Tokens of prompt and answer of the longest request that the engine takes."""
        return min(self.max_seq_len or self.kv_tokens, self.kv_tokens)

    @property
    def request_s(self) -> float:
        """By which a request makes steps longer: a second of one of N cores, that others take, by 1/N s."""
        return self.step.request_cpu_s / self.step.cores if self.step.cores else 0.0

    def whole(self, decoding: int) -> int:
        """Return the prompt tokens that a step beside streams has places for."""
        return max(BLOCK_TOKENS, self.chunk_tokens - decoding)

    def room(self, decoding: int, context_tokens: float, prompts: int) -> int:
        """Return the tokens of long prompts that a step may read."""
        room = self.whole(decoding)
        if not (self.slower and decoding and prompts):
            return room
        plain_s = self.step.seconds(decoding, context_tokens, 0)
        token_s = (self.step.seconds(decoding, context_tokens, room) - plain_s) / room
        longer_s = (slowdown(decoding, prompts, self.slower) - 1) * plain_s
        return room if token_s * room <= longer_s else max(BLOCK_TOKENS, int(longer_s / token_s))


@dataclass(eq=False)
class Sequence:
    """One request in the engine.

    prompt, most, answer: tokens of the prompt, that it may make (KV blocks are reserved for them), that it makes.
    first_id: position of the first token that it makes in the whole answer. prefix: key of what it shares with others,
        and how many tokens. send: called with (tokens made since the last call, whether it is the end).
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
    # It had made so many tokens at the step ``began`` and makes ``pace`` in each of the following, with so many drafts,
    # until the end of a stretch of its text.
    began: int = 0
    made: int = 0
    pace: float = 1
    drafts: int = 0
    text: tuple[float, ...] = ()
    state: str = "waiting"

    @property
    def reserved(self) -> int:
        return self.prompt + self.most


@dataclass(eq=False)
class Engine:
    """One engine. ``submit`` and ``cancel`` sequences, call ``finish`` at ``due_s``; infinite: there is nothing to do.

    send_s: seconds between two messages of a stream; 0: one for each step. drafted_tokens: of steps with drafts.
    noise: standard deviation of the logarithm of a step's time. slow: factor of it.
    stepped: called with a span's seconds of a step, steps, sequences that decoded, the tokens that they made in a step,
        and what those that waited lacked: "slots", "kv" or "".
    """

    kind: Replica
    send_s: float = math.inf
    noise: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    stepped: Callable[[float, int, int, float, str], None] | None = None
    slow: float = 1.0
    running: dict[Sequence, None] = field(default_factory=dict)
    due_s: float = math.inf
    steps: int = 0
    drafted_tokens: float = 0.0
    reserved: int = 0
    hung: bool = False

    def __post_init__(self) -> None:
        self._waiting: list[tuple[float, int, Sequence]] = []
        self._reading: dict[Sequence, None] = {}
        self._ends: list[tuple[int, int, Sequence]] = []
        self._number, self._drafted = 0, 0  # sequences so far; running ones that are drafted for
        # Of the sequences that decode: how many they are, tokens of a step, how many are drafted for, cached tokens.
        self._decoding, self._pace, self._drafting, self._context = 0, 0.0, 0, 0.0
        self._most_drafts = self.kind.step.draft_tokens if self.kind.step.drafted_up_to else 0
        # Tokens per second with drafts over those without, by the number of sequences that are drafted for.
        numbers = range(1, UNDRAFTED_FROM + 1) if self._most_drafts else ()
        self._speedups = {n: self.kind.step.drafts_speedup(n) for n in numbers}
        self._resumption = DraftResumption()
        # Began, steps, prompt tokens that are read, seconds of a step.
        self._span: tuple[float, int, list[tuple[Sequence, int]], float] = 0.0, 0, [], 0.0
        self._lacked, self._sent_s = "", 0.0
        self._owed_s = self.kind.step.idle_s  # to requests that came or were answered during the span, and to a pause
        self._cache, self._cached = OrderedDict[str, int](), 0

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
            self._owed_s += self.kind.request_s / 2
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
            self.stepped(step_s, steps, self._decoding, self._pace, self._lacked)
        self.steps += steps
        self.drafted_tokens += steps * self._pace if self._drafting else 0.0
        self._context += steps * self._pace
        if self._speedups and self._decoding and not self._drafted:
            self._resumption.observe(self._decoding, self._speedups.get(self._decoding, 1.0), steps)
        for sequence, part in parts:
            sequence.left -= part
            if sequence.left or sequence.state != "reading":
                continue
            # The last chunk makes the first token.
            del self._reading[sequence]
            sequence.state, sequence.first_s = "running", sequence.first_s or now_s
            self._decode(sequence, sequence.made + 1)
            self._tell(sequence, now_s)
            if self._decoding > 1:
                self._owed_s += self.kind.request_s / 2
        while self._ends and (self._ends[0][0] <= self.steps or self._ends[0][2].state == "ended"):
            sequence = heapq.heappop(self._ends)[2]
            if sequence.state != "running":
                continue
            if sequence.drafts and (made := self._made(sequence)) < sequence.answer:
                self._count(sequence, -1)
                self._decode(sequence, made)
            else:
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
        plain = len(self.running) > self._drafted > 0
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
            self._owed_s = kind.step.idle_s
            return
        if plain:
            self._draft_no_longer()
        elif not self._reading and self._may_draft_again():
            self._draft_again()
        while self._ends and self._ends[0][2].state == "ended":
            heapq.heappop(self._ends)
        decoding, context, drafted, steps = self._decoding, self._context, self._drafting, 1
        parts = self._read(now_s) if self._reading else []
        prompts = sum(part for _, part in parts)
        step_s = kind.step.seconds(decoding, context, prompts, drafted) * self.slow
        if 0 < self._drafted < len(self.running):  # a step of each pipeline
            step_s += kind.step.step_s * self.slow
        if not parts and not self._owed_s:
            steps = max(1, self._ends[0][0] - self.steps)
            if self._may_draft_again():
                speedup = self._speedups.get(decoding, 1.0)
                steps = min(steps, self._resumption.steps_left(self._texts(), speedup) or steps)
            if self.send_s < math.inf:
                steps = max(1, min(steps, int(self.send_s / step_s)))
            step_s = kind.step.seconds(decoding, context + self._pace * (steps - 1) / 2, 0, drafted) * self.slow
        step_s, self._owed_s = step_s + self._owed_s, 0.0
        if noise := max(self.noise, kind.step.spread if parts else 0.0):
            step_s *= self.rng.lognormvariate(0.0, noise)
        self._span, self.due_s = (now_s, steps, parts, step_s), now_s + steps * step_s

    def _read(self, now_s: float) -> list[tuple[Sequence, int]]:
        """Return the prompt tokens of the next step, first come first served."""
        parts, read, whole = [], 0, self.kind.whole(self._decoding)
        room = self.kind.room(self._decoding, self._context, len(self._reading))
        for sequence in self._reading:
            limit = whole if sequence.drafts or sequence.prompt + sequence.made <= self.kind.short_tokens else room
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
        if self._most_drafts:
            self._draft(sequence)
        self.reserved += sequence.reserved
        self.running[sequence] = None
        self._reading[sequence] = None

    def _draft(self, sequence: Sequence) -> None:
        """Decide whether the first of those that wait is drafted for: not beside one that is not."""
        sequence.text = self.rng.choice(self.kind.step.acceptance)
        running, together = len(self.running), len(self.running) + len(self._waiting)
        gains = drafts_gain(self._speedups.get(together, 0.0), running)
        if self._drafted == running and together <= undrafted_from(sequence.prompt) and gains:
            sequence.drafts = drafts_beside(self._most_drafts, len(self.running))
            self._drafted += 1

    def _draft_no_longer(self) -> None:
        """Read sequences with drafts again in the plain pipeline, those first that may make the most tokens: in each
        step as many as it may read the tokens of, one at least."""
        if any(one.made and not one.drafts for one in self._reading):
            return
        left = self.kind.room(self._decoding, self._context, len(self._reading))
        drafted = [one for one in self.running if one.drafts and one.state == "running"]
        most = math.inf
        for sequence in sorted(drafted, key=lambda one: self._made(one) - one.most):
            text = sequence.prompt + self._made(sequence)
            if text > most:
                continue
            self._read_again(sequence)
            sequence.drafts, sequence.pace = 0, 1
            self._drafted -= 1
            self._reading = {sequence: None, **self._reading}  # its stream has begun
            most = left = left - text

    def _may_draft_again(self) -> bool:
        """Return whether all sequences decode plainly and none of them is one too many to be drafted for."""
        count = len(self.running)
        return (
            not self._drafted
            and drafts_gain(self._speedups.get(count, 0.0), drafted=0)
            and all(count <= undrafted_from(one.prompt) for one in self.running)
        )

    def _draft_again(self) -> None:
        """Draft for the sequences that decode plainly if it is worth reading each of them again."""
        left = [one.most - self._made(one) for one in self.running]
        if not self._resumption.due(self._texts(), left):
            return
        for nth, sequence in enumerate(self.running):
            self._read_again(sequence)
            sequence.drafts = drafts_beside(self._most_drafts, nth)
            self._drafted += 1

    def _texts(self) -> list[int]:
        """Return the tokens of each sequence's prompt and answer."""
        return [one.prompt + self._made(one) for one in self.running]

    def _read_again(self, sequence: Sequence) -> None:
        self._count(sequence, -1)
        sequence.made, sequence.state = self._made(sequence), "reading"
        sequence.left = sequence.prompt + sequence.made
        self._reading[sequence] = None

    def _decode(self, sequence: Sequence, made: int) -> None:
        """Let a sequence decode on until its end, or that of the stretch of its text."""
        sequence.began, sequence.made = self.steps, made
        until = sequence.answer
        if sequence.drafts:
            sequence.pace = tokens_per_step(accepted_at(sequence.text, made), sequence.drafts)
            until = min([until, *(at for at in STRETCHES if at > made)])
        self._count(sequence, 1)
        self._number += 1
        left = math.ceil((until - made) / sequence.pace - 1e-9)
        heapq.heappush(self._ends, (self.steps + left, self._number, sequence))

    def _made(self, sequence: Sequence) -> int:
        done = sequence.made + int((self.steps - sequence.began) * sequence.pace + 1e-9)
        return min(sequence.answer, done)

    def _count(self, sequence: Sequence, times: int) -> None:
        """Add a sequence that decodes to what is counted of them, or with -1 take it off."""
        self._decoding += times
        if not self._decoding:  # no part of a token stays
            self._pace, self._drafting, self._context = 0.0, 0, 0.0
            return
        self._pace += times * sequence.pace
        self._drafting += times * (sequence.drafts > 0)
        tokens = sequence.made + (self.steps - sequence.began) * sequence.pace
        self._context += times * (sequence.prompt + sequence.first_id + tokens)

    def _tell(self, sequence: Sequence, now_s: float) -> None:
        made = self._made(sequence)
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
            self._count(sequence, -1)
        else:
            self._reading.pop(sequence, None)
        del self.running[sequence]
        self._drafted -= sequence.drafts > 0
        self.reserved -= sequence.reserved
