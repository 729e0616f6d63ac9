"""The rules by which the CPU engine fills steps and sends tokens; calibration, planner and simulator share them."""

import math
from collections.abc import Sequence

BLOCK_TOKENS = 32  # of a KV cache block: OpenVINO's CPU plugin and TensorRT-LLM (tokens_per_block)

# Prompts beside running sequences (decision 0034).
MAX_SLOWDOWN = 1.7  # a step that reads a prompt may take so many times one that does not; 2 with what steps vary by
QUEUE_LOSS = 1 / 30  # part of the throughput that steps may lose by decoding before prompts in the queue are read
WHOLE_PROMPT_TOKENS = 256  # prompts up to this length are read whole: pieces of them cost more than they save

# Speculative decoding (decision 0027).
UNDRAFTED_FROM = 8  # running sequences from which on none is drafted for
TIMED_TOGETHER = 1, 2, 4, UNDRAFTED_FROM  # sequences whose drafts are timed: their cost is not linear in between
LONG_UNDRAFTED_FROM = 4  # for a prompt that is not read whole beside streams: only the plain pipeline reads in pieces
SHARED_DRAFT = 3  # draft tokens of a sequence beside others, at most
RESUME_UP_TO = 2  # running sequences up to which those that decode plainly are soon drafted for again
RESUME_TOKENS = 32  # tokens that each of them has left: it is read again, which takes as long as some steps
READ_PER_STEP = 24  # tokens of a text that are read again in the time of a plain step, on AVX2; more on others
LEAST_SPEEDUP = 1.1  # tokens per second with drafts, over those without, below which drafting does not begin
RETRY_AFTER = 16  # requests after which those of a draft model are tried again

# Sending (coalescing_window.py): tokens of all streams wait to be sent together. Of the CPU that is there, what
# responses are to take; where tokens would wait too long for it, they take more.
SENDING_SHARE = 0.15
# Longest wait, and up to how many streams. The ticker, and the burst itself, take some milliseconds more.
FEW_STREAMS, WAIT_OF_FEW_S, WAIT_OF_MANY_S = 32, 0.018, 0.044


def window_s(streams: float, response_cpu_s: float, cores: float) -> float:
    """Return how long a token may wait. response_cpu_s: what a response takes of one of the cores."""
    wait_s = WAIT_OF_FEW_S if streams <= FEW_STREAMS else WAIT_OF_MANY_S
    return min(wait_s, streams * response_cpu_s / (SENDING_SHARE * cores))


def slowdown(running: int, waiting: int, beside_one: float = MAX_SLOWDOWN) -> float:
    """Return how many times as long as a step without prompts one that reads some may take, at most.

    running: sequences that decode in it.
    waiting: prompts that are not read yet. Those behind the first could decode in the same steps, which hardly take
        longer for more sequences: a step before they are read wastes their part of its fixed time, QUEUE_LOSS at most.
    beside_one: for a prompt that waits alone, beside many sequences.
    """
    queued = max(0, waiting - 1)
    return max(beside_one + waiting / running, queued / (running + queued) / QUEUE_LOSS)


def undrafted_from(prompt_tokens: int) -> int:
    """Return beside how many running sequences one with such a prompt is not drafted for."""
    return UNDRAFTED_FROM if prompt_tokens <= WHOLE_PROMPT_TOKENS else LONG_UNDRAFTED_FROM


def drafts_beside(most: int, others: int) -> int:
    """Return the draft tokens per step of a sequence beside so many others. most: of one alone."""
    return min(SHARED_DRAFT, most) if others else most


def drafts_gain(speedup: float, drafted: int) -> bool:
    """Return whether to draft beside ``drafted``. speedup: tokens per second of all with drafts, over those without."""
    return speedup >= (1.0 if drafted else LEAST_SPEEDUP)


class DraftResumption:
    """Tells when sequences that decode plainly are drafted for again, all of them, at the cost of reading their texts.

    At once where few run that have enough left. More of them once drafts would have saved the time in which their texts
    are read twice, since they have to be read again when a busier time comes: so what moving costs is never more than
    what staying has cost.
    """

    def __init__(self) -> None:
        self._lost = 0.0  # plain steps

    def observe(self, sequences: int, speedup: float, steps: int = 1) -> None:
        """Take in plain steps. speedup: tokens per second of so many sequences with drafts, over those without."""
        if sequences > UNDRAFTED_FROM:
            self._lost = 0.0
        elif speedup >= LEAST_SPEEDUP:
            self._lost += steps * (1 - 1 / speedup)

    def steps_left(self, texts: Sequence[int], speedup: float) -> int | None:
        """Return after how many more plain steps of these sequences it is due; None if their texts grow too fast."""
        missing = 2 * sum(texts) / READ_PER_STEP - self._lost
        if missing <= 0:
            return 1
        lost = 1 - 1 / speedup if speedup >= LEAST_SPEEDUP else 0.0
        each = lost - 2 * len(texts) / READ_PER_STEP
        return math.ceil(missing / each) if each > 1e-9 else None  # less is a rounding error

    def due(self, texts: Sequence[int], left: Sequence[int]) -> bool:
        """Return whether it is due, given the tokens of each text and how many it may still make; if so, begin anew."""
        few = len(left) <= RESUME_UP_TO and min(left) >= RESUME_TOKENS
        if few or self._lost >= 2 * sum(texts) / READ_PER_STEP:
            self._lost = 0.0
            return True
        return False
