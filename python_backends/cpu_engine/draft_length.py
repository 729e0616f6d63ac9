"""How many draft tokens a request has in each step, by the time that they take and what is accepted."""

from __future__ import annotations

import math
import statistics
from collections import deque

import numpy as np

from contract.scheduling import (
    LEAST_SPEEDUP,
    RETRY_AFTER,
    SHARED_DRAFT,
    TIMED_TOGETHER,
    UNDRAFTED_FROM,
    drafts_beside,
    drafts_gain,
)

_LAST = 15  # steps of which the median is taken
_ENOUGH = 5  # until it counts
_FORGOTTEN = 1000  # steps after which one in service counts no longer: five slow ones would end drafts for good

# Weights of a step in the moving average, which is over several answers: some repeat themselves and some never do, and
# all are read again when drafting ends or begins. Answers begin to repeat themselves late: where bursts end drafting
# after a few tokens, time and again, these must not tell what later ones would gain.
_EARLY, _EARLY_PART, _WEIGHT = 16, 0.4, 0.005
# Accepted tokens until steps tell, and when drafts are tried again, and the steps as which this counts. SmolLM2 accepts
# 1.1 to 1.3 in passages of prose.
_EXPECTED, _EXPECTED_STEPS = 1.2, 50


class StepTimes:
    """Seconds of the last steps that only decode: by the number of sequences in them, and whether they drafted.

    lasting: steps after which one counts no longer.
    costs: how many plain steps longer one with drafts takes, by the number of sequences, where both are known. Of
        medians: a step in which the process waited for a core takes several times as long.
    """

    def __init__(self, lasting: float = math.inf) -> None:
        self._lasting, self._steps = lasting, 0
        self._seconds: dict[tuple[int, bool], deque[tuple[int, float]]] = {}
        self.costs: dict[int, float] = {}

    def observe(self, sequences: int, taken_s: float, *, drafts: bool) -> None:
        """Take in a step. One of more sequences than are ever drafted for only counts."""
        self._steps += 1
        if sequences <= UNDRAFTED_FROM:
            self._seconds.setdefault((sequences, drafts), deque(maxlen=_LAST)).append((self._steps, taken_s))
        for (number, kind), steps in self._seconds.items():
            while steps and self._steps - steps[0][0] > self._lasting:
                steps.popleft()
            if not self.knows(number, drafts=kind):
                self.costs.pop(number, None)
        if self.knows(sequences, drafts=True) and self.knows(sequences, drafts=False):
            drafted_s, plain_s = (self._median_s(sequences, drafts=kind) for kind in (True, False))
            self.costs[sequences] = max(0.0, drafted_s / plain_s - 1)

    def _median_s(self, sequences: int, *, drafts: bool) -> float:
        return statistics.median(taken_s for _, taken_s in self._seconds[sequences, drafts])

    def knows(self, sequences: int, *, drafts: bool) -> bool:
        """Return whether such steps were seen often enough."""
        return len(self._seconds.get((sequences, drafts), ())) >= _ENOUGH


class DraftLength:
    """The length for the next request. most: of the recipe. slots: sequences that the engine can time together."""

    def __init__(self, most: int, slots: int) -> None:
        self._most = most
        # One and the most first: those between are estimated from them until they are timed, too.
        numbers = sorted({min(n, slots) for n in TIMED_TOGETHER}, key=lambda n: (1 < n < min(UNDRAFTED_FROM, slots), n))
        self._idle_steps = [(n, drafts) for n in numbers for drafts in (False, True)]
        # Moving averages per step of a sequence: tokens accepted, and of the first SHARED_DRAFT drafts.
        self._accepted = self._shared = _EXPECTED
        self._refused = 0  # requests since the averages began anew
        self._seen = 0.0  # steps since then
        # Apart, since steps take longer beside other work of the server: both kinds are compared as seen together. Of
        # the idle engine's the CPU time, which other processes hardly change: as a server starts, others often do.
        self._idle, self._served = StepTimes(), StepTimes(_FORGOTTEN)

    def refused(self) -> None:
        """Take in that a request came that is not drafted for."""
        self._refused += 1

    def choose(self, running: int, behind: int = 0) -> int:
        """Return the draft tokens per step of a request that is added to ``running`` others, all drafted for, before
        ``behind`` more; 0 for none."""
        together = running + behind + 1
        return self.beside(running) if together <= UNDRAFTED_FROM and self.tries(together, running) else 0

    def tries(self, sequences: int, drafted: int = 0) -> bool:
        """Return whether to draft for so many sequences: it gains, or RETRY_AFTER of a draft model's were refused.

        drafted: of them, those that are drafted for.
        Then what was seen is forgotten, since a few steps of other texts would hardly change it. Where drafts that are
        accepted as expected would not earn their time, none are tried.
        """
        if drafts_gain(self.speedup(sequences), drafted):
            return True
        if self._refused < RETRY_AFTER or (1 + _EXPECTED) / (1 + self.cost(sequences)) < LEAST_SPEEDUP:
            return False
        self._accepted, self._shared = max(self._accepted, _EXPECTED), max(self._shared, _EXPECTED)
        self._refused, self._seen = 0, 0.0
        return True

    def speedup(self, sequences: int) -> float:
        """Return the tokens per second of so many sequences with drafts over those without."""
        return (1 + (self._accepted if sequences == 1 else self._shared)) / (1 + self.cost(sequences))

    @property
    def untimed(self) -> tuple[int, bool] | None:
        """The sequences of the step whose time is to be known next, and whether it drafts; None if all are known."""
        for sequences, drafts in self._idle_steps:
            if not self._idle.knows(sequences, drafts=drafts):
                return sequences, drafts
        return None

    def beside(self, running: int) -> int:
        """Return the draft tokens per step of a request beside so many others."""
        return drafts_beside(self._most, running)

    def timed(self, sequences: int, taken_s: float, *, drafts: bool, idle: bool = False) -> None:
        """Take in how long a step that only decoded so many sequences took; its CPU time if the idle engine made it to
        be timed."""
        (self._idle if idle else self._served).observe(sequences, taken_s, drafts=drafts)

    def cost(self, sequences: int) -> float:
        """Return how many plain steps longer a step with drafts takes, between the nearest numbers that are known.

        As in service, or else as of the idle engine. Until that was idle long enough to know, 0 for one sequence;
        several would be drafted for at a loss for as long as they keep it busy, which on processors with AVX2 alone
        halves their tokens, and are not.
        """
        if self.untimed in self._idle_steps[:4]:  # of one and of the most
            return 0.0 if sequences == 1 else math.inf
        costs = self._idle.costs | self._served.costs
        known = sorted(costs)
        return float(np.interp(sequences, known, [costs[n] for n in known]))

    def observe(self, accepted: int, position: int) -> None:
        """Take in a step that accepted so many draft tokens of a sequence that had made ``position`` tokens before."""
        part = _EARLY_PART if position < _EARLY else 1.0
        weight = part * max(_WEIGHT, 1 / (_EXPECTED_STEPS + self._seen))
        self._seen += part
        self._accepted += (accepted - self._accepted) * weight
        self._shared += (min(accepted, SHARED_DRAFT) - self._shared) * weight
