"""Speculative decoding: which requests a pipeline that drafts takes, and with how many draft tokens.

Such a pipeline computes 1 + k positions of every sequence in every step, padding included where it found fewer drafts,
and k is at least 1. A few sequences leave the cores waiting for memory, and on processors with 8-bit or 16-bit matrix
instructions positions cost little; on others a step of one sequence takes up to three times as long, and a full batch
up to twice as long everywhere. So an engine that drafts has two pipelines: this one runs while few sequences do and
drafts gain more than their time, the plain one at all other times. Sequences go over to the plain one, and back when
few are left, with what they have generated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import openvino_genai as genai

from contract.scheduling import (
    LEAST_GAIN,
    RESUME_TOKENS,
    RESUME_UP_TO,
    RETRY_AFTER,
    SHARED_DRAFT,
    UNDRAFTED_FROM,
    drafts_beside,
    undrafted_from,
)
from python_backends.ensemble.worker_messages import AddSequence
from python_backends.limits import EngineLimits

_TIME_WEIGHT = 1 / 16  # of a step in the moving averages of times
_ENOUGH = 4  # steps, until their average counts
_OUTLIER = 2.0  # times the average: the process waited for a core

# Weights of a step in the moving average, which is over several answers: some repeat themselves and some never do, and
# after drafting has ended, it takes RETRY_AFTER requests until it is tried again. Answers begin to repeat themselves
# late: where bursts end drafting after a few tokens, time and again, these must not tell what later ones would gain.
_EARLY, _EARLY_WEIGHT, _WEIGHT = 16, 0.002, 0.005


class StepTimes:
    """Moving averages of the seconds of steps that only decode, by the number of sequences in them."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._seen: dict[int, int] = {}

    def observe(self, sequences: int, taken_s: float) -> None:
        """Take in a step."""
        seen = self._seen[sequences] = self._seen.get(sequences, 0) + 1
        average_s = self._seconds.get(sequences, taken_s)
        if seen > _ENOUGH:
            taken_s = min(taken_s, _OUTLIER * average_s)
        self._seconds[sequences] = average_s + (taken_s - average_s) * max(1 / seen, _TIME_WEIGHT)

    def knows(self, sequences: int) -> bool:
        """Return whether steps of so many sequences were seen often enough."""
        return self._seen.get(sequences, 0) >= _ENOUGH

    def of(self, sequences: int) -> float | None:
        """Return the average, between the nearest numbers that are known; None if none is."""
        known = sorted(n for n in self._seen if self.knows(n))
        return float(np.interp(sequences, known, [self._seconds[n] for n in known])) if known else None


class DraftLength:
    """The length for the next request.

    most: of the recipe. slots: sequences that the engine runs at once.
    """

    def __init__(self, most: int, slots: int = UNDRAFTED_FROM) -> None:
        self._most = most
        self._timed = 1, min(UNDRAFTED_FROM, slots)  # sequences of the plain steps that are timed when the engine idles
        # Moving averages per step of a sequence: tokens accepted, and of the first SHARED_DRAFT drafts.
        self._accepted = self._shared = 2 * LEAST_GAIN
        self._since = 0
        self._plain, self._drafted = StepTimes(), StepTimes()

    def choose(self, running: int, behind: int = 0) -> int:
        """Return the draft tokens per step of a request that is added to ``running`` others, before ``behind`` more; 0
        for none."""
        together = running + behind + 1
        if together > UNDRAFTED_FROM:
            return 0
        self._since += 1
        if not self.gains(together) and self._since < RETRY_AFTER:
            return 0
        self._since = 0
        return self.beside(running)

    def gains(self, sequences: int) -> bool:
        """Return whether drafting for so many sequences makes more tokens than its time would without."""
        return (self._accepted if sequences == 1 else self._shared) - self.cost(sequences) >= LEAST_GAIN

    @property
    def untimed(self) -> int:
        """The sequences of the plain step whose time is to be known next; 0 if all are."""
        return next((n for n in self._timed if not self._plain.knows(n)), 0)

    def beside(self, running: int) -> int:
        """Return the draft tokens per step of a request beside so many others."""
        return drafts_beside(self._most, running)

    def timed(self, sequences: int, taken_s: float, *, drafts: bool) -> None:
        """Take in how long a step that only decoded so many sequences took."""
        (self._drafted if drafts else self._plain).observe(sequences, taken_s)

    def cost(self, sequences: int) -> float:
        """Return how many plain steps longer a step with drafts takes; 0 until it is known."""
        plain_s, drafted_s = self._plain.of(sequences), self._drafted.of(sequences)
        return max(0.0, drafted_s / plain_s - 1) if plain_s and drafted_s else 0.0

    def observe(self, accepted: int, position: int) -> None:
        """Take in a step that accepted so many draft tokens of a sequence.

        position: tokens that the sequence had made before.
        """
        weight = _EARLY_WEIGHT if position < _EARLY else _WEIGHT
        self._accepted += (accepted - self._accepted) * weight
        self._shared += (min(accepted, SHARED_DRAFT) - self._shared) * weight


@dataclass
class _Sequence:
    """A sequence. length: draft tokens of a step; 0 in the plain pipeline. token_ids: that it made in its pipeline."""

    command: AddSequence
    length: int
    blocks: int
    token_ids: list[int] = field(default_factory=list)


class Drafting:
    """The pipeline that drafts, its sequences, and what they gain. It follows those of the plain one, too.

    pipeline: None for an engine that never drafts, and until it is loaded; it then has no sequences.
    limits: of the engine.
    ngram_size: tokens of the longest n-gram looked up; 0 for a draft model.
    load: sets the pipeline; None for an engine that never drafts, and once it was called.
    """

    def __init__(
        self,
        pipeline: genai.ContinuousBatchingPipeline | None,
        limits: EngineLimits,
        ngram_size: int = 0,
    ) -> None:
        self.pipeline = pipeline
        self.load: Callable[[], None] | None = None
        self._limits = limits
        self._ngram_size = ngram_size
        self._length = DraftLength(limits.max_draft_len, limits.max_batch_size)
        self._sequences: dict[int, _Sequence] = {}
        self._plain: dict[int, _Sequence] = {}
        self._steps = self._accepted = 0
        self._waits = False  # for its pipeline

    def load_with(self, load: Callable[[], genai.ContinuousBatchingPipeline]) -> None:
        """Draft from when ``self.load``, which may run in a thread of its own, has loaded the pipeline."""

        def set_pipeline() -> None:
            self.pipeline = load()
            self._waits = False

        self._waits, self.load = True, set_pipeline

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, id: int) -> bool:
        return id in self._sequences

    def __iter__(self) -> Iterator[int]:
        return iter(self._sequences)

    def admit(self, command: AddSequence, config: genai.GenerationConfig, running: int, behind: int = 0) -> bool:
        """Take a sequence and complete its configuration, or return False if the plain pipeline is to take it.

        running: sequences in both pipelines. None is taken beside one in the plain pipeline: two steps, one of each
        pipeline, take longer than one of a common batch.
        behind: sequences that come at the same time. Where they are too many to draft for, none is: their prompts
            would be read here and, when the last of them comes, in the plain pipeline again.
        """
        blocks = self._limits.draft_blocks(command.input_ids.size + command.max_tokens)
        free = self._limits.draft_pool_blocks - sum(sequence.blocks for sequence in self._sequences.values())
        most = undrafted_from(command.input_ids.size)
        if self._waits or running > len(self) or running + behind >= most or blocks > free:
            return False
        length = self._length.beside(running=1)  # of one as short as a probe, which shows no gain
        if command.max_tokens > SHARED_DRAFT:
            length = self._length.choose(running, behind)
        if length:
            self._take(command, config, length, blocks)
        return length > 0

    def _take(self, command: AddSequence, config: genai.GenerationConfig, length: int, blocks: int) -> None:
        config.num_assistant_tokens = length
        config.max_ngram_size = self._ngram_size
        self._sequences[command.id] = _Sequence(command, length, blocks)

    def follow(self, command: AddSequence) -> None:
        """Follow a sequence that the plain pipeline has taken."""
        if self.pipeline is not None or self._waits:
            self._plain[command.id] = _Sequence(command, 0, 0)

    def back(self) -> list[AddSequence]:
        """Return the commands that continue all sequences of the plain pipeline here; none if any has to stay there.

        Call ``take_back`` for each.
        """
        moved = list(self._plain.values())
        if self._waits or self._sequences or not 1 <= len(moved) <= RESUME_UP_TO or not self._length.gains(len(moved)):
            return []
        for sequence in moved:
            made = len(sequence.token_ids)
            started = made >= 2  # its prompt is read, also where it ends with a block (PartialBlocks.starts)
            if not started or sequence.command.max_tokens - made < RESUME_TOKENS or not _movable(sequence.command):
                return []
        commands = [_continued(sequence) for sequence in moved]
        blocks = sum(self._limits.draft_blocks(one.input_ids.size + one.max_tokens) for one in commands)
        return commands if blocks <= self._limits.draft_pool_blocks else []

    def take_back(self, command: AddSequence, config: genai.GenerationConfig) -> None:
        """Take a sequence of ``back`` and complete its configuration."""
        del self._plain[command.id]
        blocks = self._limits.draft_blocks(command.input_ids.size + command.max_tokens)
        self._take(command, config, self._length.beside(len(self._sequences)), blocks)

    def leave(self, starts: Callable[[int], bool]) -> AddSequence | None:
        """Forget a sequence that can go on in the plain pipeline; return the command that continues it, if any can.

        Of several it is the one that may make the most tokens.

        OpenVINO GenAI counts a presence and a frequency penalty, and follows a guide or a seed, from a request's start.
        Sequences with these stay.

        starts: whether a sequence has to stay until its prompt is read.
        """
        movable = [one for id, one in self._sequences.items() if _movable(one.command) and not starts(id)]
        if not movable:
            return None
        chosen = max(movable, key=lambda one: one.command.max_tokens - len(one.token_ids))
        return _continued(self._sequences.pop(chosen.command.id))

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

    def timed(self, sequences: int, taken_s: float, *, drafts: bool) -> None:
        """Take in how long a step of one pipeline took, before its tokens are; one that read a prompt tells nothing."""
        if self.pipeline is None:  # never drafts, or is being loaded, which takes the cores
            return
        if all(sequence.token_ids for sequence in (self._sequences if drafts else self._plain).values()):
            self._length.timed(sequences, taken_s, drafts=drafts)

    @property
    def untimed(self) -> int:
        """The sequences of the plain step whose time is to be known next; 0 if all are, or nothing is drafted."""
        return 0 if self.pipeline is None else self._length.untimed

    def end(self, id: int) -> None:
        """Forget a sequence."""
        self._sequences.pop(id, None)
        self._plain.pop(id, None)

    def take_counts(self) -> tuple[int, int]:
        """Return the steps of sequences and the accepted draft tokens since the last time."""
        counts = self._steps, self._accepted
        self._steps = self._accepted = 0
        return counts


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
