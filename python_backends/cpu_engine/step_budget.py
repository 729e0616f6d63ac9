"""How many prompt tokens the next step reads beside the running sequences, by the steps measured so far.

OpenVINO GenAI fills every step with prompt tokens up to a number that is fixed when it loads: small, and a prompt takes
long to read; large, and each step of it is a pause in all other streams. So the worker hands it prompts in pieces.
"""

from __future__ import annotations

import math
from operator import mul, truediv

from contract.scheduling import BLOCK_TOKENS, WHOLE_PROMPT_TOKENS, slowdown

_UNKNOWN = 4 * BLOCK_TOKENS  # tokens, before enough steps were seen
_ENOUGH = 8  # steps
_ALONE_S = 1.0  # of a step beside which nothing runs: what comes meanwhile waits for its end
_DRIFT = 0.002  # what each coefficient may change from step to step, as a variance in that of a step's time
_UNCERTAIN = 100.0  # the variance of a coefficient before the first step, and at most
_OUTLIER = 1.5  # times what was expected: the process waited for a core
_LEAST_PART = 30  # of what a step took is expected at least, so that a fit that is far off recovers
_SCALES = (1.0, 32.0, 128.0, 128.0 * 1024)  # so that all coefficients are of one size


class StepBudget:
    """A linear model of a step's time, in seconds, fitted to the latest steps by a Kalman filter.

    Without numpy, whose calls take longer than the arithmetic of four numbers: this runs after every step.

    most: tokens of a step.
    short: prompts up to this length are read whole: pieces of them cost more throughput than such a step harms.
    """

    def __init__(self, most: int) -> None:
        self.most, self.short = most, min(WHOLE_PROMPT_TOKENS, most)
        # Of a step, of 32 running sequences, of 128 prompt tokens, and of 1,024 tokens before each of those.
        self._seconds = [0.0] * len(_SCALES)
        self._covariance = [[_UNCERTAIN * (i == j) for j in range(len(_SCALES))] for i in range(len(_SCALES))]
        self._seen = 0

    def observe(self, running: int, tokens: int, attended: float, taken_s: float) -> None:
        """Take in a step. running: sequences that got their next token. tokens: of prompts. attended: see
        ``attended``, of all prompts."""
        inputs = tuple(map(truediv, (1.0, running, tokens, attended), _SCALES))
        expected_s = sum(map(mul, inputs, self._seconds))
        if self._seen >= _ENOUGH:
            taken_s = min(taken_s, _OUTLIER * max(expected_s, taken_s / _LEAST_PART))
        spread = [sum(map(mul, inputs, row)) for row in self._covariance]
        variance = 1 + sum(map(mul, inputs, spread))
        for i, (row, own) in enumerate(zip(self._covariance, spread, strict=True)):
            self._seconds[i] += own / variance * (taken_s - expected_s)
            for j, other in enumerate(spread):
                row[j] -= own * other / variance
            row[i] += _DRIFT if row[i] < _UNCERTAIN else 0.0
        self._seen += 1
        self._keep_positive()

    def _keep_positive(self) -> None:
        """Replace coefficients below 0 by 0, and the others by what fits best then.

        The numbers of running sequences and of prompt tokens go together, and some sizes of a step are much slower than
        their neighbours: without it a step of many sequences seemed to take no time.
        """
        for i, row in enumerate(self._covariance):
            if (below := self._seconds[i]) < 0:
                for j, common in enumerate(row):
                    self._seconds[j] -= common / row[i] * below
        self._seconds = [max(0.0, seconds) for seconds in self._seconds]  # one may have pushed another below

    def tokens(self, running: int, waiting: int, begin: int) -> int:
        """Return the prompt tokens of the next step, a block at least.

        running: sequences whose next token the step makes; without any it takes _ALONE_S.
        waiting: prompts that are not read. The more of them wait, the longer is the step.
        begin: tokens of the first of these prompts that were read: the more, the longer take those that follow.
        """
        room = max(BLOCK_TOKENS, self.most - running)
        if self._seen < _ENOUGH:
            return min(room, _UNKNOWN)
        step_s, of_running_s, of_token_s, of_attended_s = map(truediv, self._seconds, _SCALES)
        without_s = max(step_s + of_running_s * running, 1e-6)
        longer_s = max(_ALONE_S - without_s, 1e-6)
        if running:
            longer_s = (slowdown(running, waiting) - 1) * without_s
        first_s = max(of_token_s + begin * of_attended_s, 1e-9)
        # first_s × tokens + of_attended_s × tokens² / 2 = longer_s
        root = math.sqrt(first_s * first_s + 2 * of_attended_s * longer_s)
        tokens = 2 * longer_s / (first_s + root)
        return int(min(max(tokens, BLOCK_TOKENS), room))


def attended(begin: int, tokens: int) -> float:
    """Return how many earlier tokens each of ``tokens`` prompt tokens from position ``begin`` on attends to, summed."""
    return tokens * (begin + tokens / 2)
