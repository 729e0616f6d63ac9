"""Speculative decoding: which requests a pipeline that drafts takes.

Such a pipeline computes 1 + k positions of every sequence in every step, padding included where it found fewer drafts,
and k is at least 1. A few sequences leave the cores waiting for memory, and on processors with 8-bit or 16-bit matrix
instructions positions cost little; on others a step of one sequence takes up to three times as long, and a full batch
up to twice as long everywhere. So an engine that drafts has two pipelines: this one runs while few sequences do and
drafts gain more than their time, the plain one at all other times. Sequences go over to the plain one, and back when
few are left, with what they have generated.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import openvino_genai as genai

from contract.scheduling import (
    BLOCK_TOKENS,
    READ_PER_STEP,
    SHARED_DRAFT,
    UNDRAFTED_FROM,
    DraftResumption,
    undrafted_from,
)
from python_backends.cpu_engine.draft_length import DraftLength
from python_backends.ensemble.worker_messages import AddSequence
from python_backends.limits import EngineLimits

TIMED_STEPS = 7  # of each kind, when the engine idles


def timed_tokens(sequences: int, draft_tokens: int) -> int:
    """Return the tokens that one of so many sequences can make while their steps are timed: they start one by one."""
    return (sequences + TIMED_STEPS) * (1 + draft_tokens)


class PromptLookup:
    """What prompt lookup would gain for a sequence that decodes without. Its drafts by OpenVINO GenAI's rule: what
    followed the first place in its text of its last tokens, of as many of them as occur before.

    ids: of prompt and answer so far. ngram_size: the most of them. length: draft tokens of a step.
    """

    def __init__(self, ids: np.ndarray, ngram_size: int, length: int) -> None:
        self._ngram_size, self._length = ngram_size, length
        # The first id of a prompt under a LoRA adapter may be larger (adapters.py), and no other id is equal to it.
        self._text = "".join(map(chr, np.minimum(ids, sys.maxunicode).tolist()))
        self._accepted = 0
        self._draft = self._look_up()

    def add(self, id: int) -> int | None:
        """Take in the next token; return how many tokens the step that ends with it would have accepted, None where the
        step goes on."""
        token = chr(id)
        self._text += token
        if self._draft.startswith(token):
            self._draft = self._draft[1:]
            self._accepted += 1
            return None
        accepted, self._accepted = self._accepted, 0
        self._draft = self._look_up()
        return accepted

    def _look_up(self) -> str:
        for size in range(min(self._ngram_size, len(self._text) - 1), 0, -1):
            found = self._text.find(self._text[-size:], 0, len(self._text) - size)
            if found >= 0:
                return self._text[found + size :][: self._length]
        return ""


@dataclass
class _Sequence:
    """A sequence. length: draft tokens of a step; 0 in the plain pipeline. token_ids: that it made in its pipeline."""

    command: AddSequence
    length: int
    blocks: int
    token_ids: list[int] = field(default_factory=list)
    lookup: PromptLookup | None = None

    @property
    def text(self) -> int:
        """Tokens of prompt and answer."""
        return self.command.input_ids.size + len(self.token_ids)

    @property
    def left(self) -> int:
        """Tokens that it may still make."""
        return self.command.max_tokens - len(self.token_ids)


class Drafting:
    """The pipeline that drafts, its sequences, and what they gain. It follows those of the plain one, too.

    pipeline: None for an engine that never drafts, and until it is loaded; it then has no sequences.
    ngram_size: tokens of the longest n-gram looked up; 0 for a draft model.
    load: sets the pipeline; None for an engine that never drafts, and once it was called.
    returning: whether sequences of the plain pipeline go over to it.
    """

    def __init__(self, limits: EngineLimits, ngram_size: int = 0) -> None:
        self.pipeline: genai.ContinuousBatchingPipeline | None = None
        self.load: Callable[[], None] | None = None
        self._limits = limits
        self._ngram_size = ngram_size
        blocks = limits.draft_blocks(BLOCK_TOKENS + timed_tokens(UNDRAFTED_FROM, limits.max_draft_len))
        slots = min(limits.max_batch_size, max(1, limits.draft_pool_blocks // blocks))
        self._length = DraftLength(limits.max_draft_len, slots)
        self._sequences: dict[int, _Sequence] = {}
        self._plain: dict[int, _Sequence] = {}
        self._resumption = DraftResumption()
        self.returning = False
        self._steps = self._accepted = 0
        self._waits = False  # for its pipeline, also where that could not be loaded
        self._loads = False

    def load_with(self, load: Callable[[], genai.ContinuousBatchingPipeline]) -> None:
        """Draft from when ``self.load``, which may run in a thread of its own, has loaded the pipeline."""

        def set_pipeline() -> None:
            try:
                self.pipeline = load()
                self._waits = False
            finally:
                self._loads = False

        self._waits, self._loads, self.load = True, True, set_pipeline

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, id: int) -> bool:
        return id in self._sequences

    def __iter__(self) -> Iterator[int]:
        return iter(self._sequences)

    def admit(self, command: AddSequence, config: genai.GenerationConfig, running: int, behind: int = 0) -> bool:
        """Take a sequence and complete its configuration, or return False if the plain pipeline is to take it.

        running: sequences in both pipelines. None is taken beside one in the plain pipeline that stays there: two
        steps, one of each pipeline, take longer than one of a common batch.
        behind: sequences that come at the same time. Where they are too many to draft for, none is: their prompts
            would be read here and, when the last of them comes, in the plain pipeline again.
        """
        blocks = self._limits.draft_blocks(command.input_ids.size + command.max_tokens)
        length = self._length_of(command, running, behind, blocks)
        if length:
            self._take(command, config, length, blocks)
        elif command.max_tokens > SHARED_DRAFT and not self._ngram_size:  # of lookups it is seen what they would gain
            self._length.refused()
        return length > 0

    def _length_of(self, command: AddSequence, running: int, behind: int, blocks: int) -> int:
        free = self._limits.draft_pool_blocks - sum(sequence.blocks for sequence in self._sequences.values())
        most = undrafted_from(command.input_ids.size)
        if self._waits or (running > len(self) and not self.returning) or running + behind >= most or blocks > free:
            return 0
        if command.max_tokens <= SHARED_DRAFT:
            return self._length.beside(running=1)  # of one as short as a probe, which shows no gain
        return self._length.choose(running, behind)

    def _take(self, command: AddSequence, config: genai.GenerationConfig, length: int, blocks: int) -> None:
        self._set(config, length)
        self._sequences[command.id] = _Sequence(command, length, blocks)

    def _set(self, config: genai.GenerationConfig, length: int) -> None:
        config.num_assistant_tokens = length
        config.max_ngram_size = self._ngram_size

    def follow(self, command: AddSequence) -> None:
        """Follow a sequence that the plain pipeline has taken."""
        if self.pipeline is not None or self._waits:
            self._plain[command.id] = _Sequence(command, 0, 0)

    def back(self) -> AddSequence | None:
        """Return the command that continues a sequence of the plain pipeline here, if all are to go over and one can
        now. Call ``take_back`` for it. One in each step: together they would stop all streams while they are read."""
        plain, drafted = list(self._plain.values()), list(self._sequences.values())
        self.returning = self.returning and bool(plain) and self._takes(plain, drafted)
        if not self.returning and plain and not drafted and not self._waits and self._takes(plain, drafted):
            started = all(map(_started, plain)) and self._length.tries(len(plain))
            self.returning = started and self._resumption.due([one.text for one in plain], [one.left for one in plain])
        ready = filter(_started, plain if self.returning else ())
        chosen = max(ready, key=lambda one: one.left, default=None)
        return _continued(chosen) if chosen else None

    def _takes(self, plain: list[_Sequence], drafted: list[_Sequence]) -> bool:
        """Return whether the pipeline that drafts could take all sequences of the plain one to those that it has."""
        most = min(undrafted_from(one.command.input_ids.size) for one in plain)  # with the others it shares steps
        blocks = [self._limits.draft_blocks(one.text + one.left) for one in plain] + [one.blocks for one in drafted]
        fits = len(blocks) <= most and sum(blocks) <= self._limits.draft_pool_blocks
        return fits and all(_movable(one.command) for one in plain)

    def take_back(self, command: AddSequence, config: genai.GenerationConfig) -> None:
        """Take the sequence of ``back`` and complete its configuration."""
        del self._plain[command.id]
        blocks = self._limits.draft_blocks(command.input_ids.size + command.max_tokens)
        self._take(command, config, self._length.beside(len(self._sequences)), blocks)

    def loses(self) -> bool:
        """Return whether the sequences that are drafted for would end sooner without, after they are read again. Not
        where one of them has to stay: each step would be one of both pipelines."""
        sequences = list(self._sequences.values())
        speedup = self._length.speedup(len(sequences)) if sequences else 1.0
        if not 0 < speedup < 1 or not all(_movable(one.command) for one in sequences):
            return False
        left = sum(one.left for one in sequences) / len(sequences)
        return left * (1 / speedup - 1) > sum(one.text for one in sequences) / READ_PER_STEP

    def leave(self, starts: Callable[[int], bool], most: int = sys.maxsize) -> AddSequence | None:
        """Forget a sequence that can go on in the plain pipeline; return the command that continues it, if any can.

        Of several it is the one that may make the most tokens. OpenVINO GenAI counts a presence and a frequency
        penalty, and follows a guide or a seed, from a request's start: sequences with these stay.

        starts: whether a sequence has to stay until its prompt is read. most: tokens that its text may have.
        """
        ready = [one for id, one in self._sequences.items() if one.text <= most and not starts(id)]
        movable = [one for one in ready if _movable(one.command)]
        chosen = max(movable, key=lambda one: one.left, default=None)
        return _continued(self._sequences.pop(chosen.command.id)) if chosen else None

    def observe(self, id: int, token_ids: list[int]) -> None:
        """Take in what a step gave to any sequence. For its first tokens in a pipeline nothing was drafted."""
        sequence = self._sequences.get(id) or self._plain.get(id)
        if sequence is None or not token_ids:
            return
        position = len(sequence.token_ids)
        sequence.token_ids += token_ids
        if sequence.length and position:
            self._steps += 1
            self._accepted += len(token_ids) - 1
            self._length.observe(len(token_ids) - 1, position)
        elif not sequence.length and self._ngram_size:
            self._look_up(sequence, token_ids, position)

    def _look_up(self, sequence: _Sequence, token_ids: list[int], position: int) -> None:
        """Take in what drafts of a plain sequence would have given, of as many as could have some."""
        if not position and sum(one.lookup is not None for one in self._plain.values()) < UNDRAFTED_FROM:
            ids = np.concatenate([sequence.command.input_ids, token_ids])
            sequence.lookup = PromptLookup(ids, self._ngram_size, self._limits.max_draft_len)
        elif sequence.lookup is not None:
            for nth, id in enumerate(token_ids, position):
                accepted = sequence.lookup.add(id)
                if accepted is not None:
                    self._length.observe(accepted, nth)

    def timed(self, sequences: int, taken_s: float, *, drafts: bool, idle: bool = False) -> None:
        """Take in how long a step of one pipeline took, before its tokens are; one that read a prompt tells nothing.
        idle: the idle engine made it to be timed; its CPU time then."""
        if self.pipeline is None:  # never drafts, or is being loaded, which takes the cores
            return
        if not drafts and not idle:
            self._resumption.observe(sequences, self._length.speedup(sequences) if sequences else 1.0)
        if all(sequence.token_ids for sequence in (self._sequences if drafts else self._plain).values()):
            self._length.timed(sequences, taken_s, drafts=drafts, idle=idle)

    @property
    def learns(self) -> bool:
        """Whether steps are to be timed when the engine idles, now or once the pipeline is loaded."""
        return self._loads or self.untimed is not None

    @property
    def untimed(self) -> tuple[int, bool] | None:
        """The sequences of the step that is to be timed next, and whether it drafts; None if all are known, or nothing
        is drafted."""
        return None if self.pipeline is None else self._length.untimed

    def set_timed(self, config: genai.GenerationConfig, sequences: int, beside: int) -> None:
        """Complete the configuration of one of so many sequences by which a step with drafts is timed."""
        length = self._length.beside(beside)
        config.max_new_tokens = timed_tokens(sequences, length)
        self._set(config, length)

    def end(self, id: int) -> None:
        """Forget a sequence."""
        self._sequences.pop(id, None)
        self._plain.pop(id, None)

    def take_counts(self) -> tuple[int, int]:
        """Return the steps of sequences and the accepted draft tokens since the last time."""
        counts = self._steps, self._accepted
        self._steps = self._accepted = 0
        return counts


def _started(sequence: _Sequence) -> bool:
    """Return whether its prompt is read, also one that ends with a block (PartialBlocks.starts), and it goes on."""
    return len(sequence.token_ids) >= 2 and sequence.left > 0


def _movable(command: AddSequence) -> bool:
    sampling = command.sampling
    counted = sampling.presence_penalty or sampling.frequency_penalty
    return command.guide is None and not counted and (sampling.greedy or sampling.seed is None)


def _continued(sequence: _Sequence) -> AddSequence:
    """Return the command whose sequence generates what follows."""
    command, token_ids, done = sequence.command, sequence.token_ids, len(sequence.token_ids)
    return dataclasses.replace(
        command,
        input_ids=np.concatenate([command.input_ids, np.array(token_ids, command.input_ids.dtype)]),
        max_tokens=command.max_tokens - done,
        sampling=dataclasses.replace(command.sampling, min_tokens=max(0, command.sampling.min_tokens - done)),
    )
