"""How many prompt tokens the next step reads beside the running sequences, by the steps measured so far.

OpenVINO GenAI fills every step with prompt tokens up to a number that is fixed when it loads: small, and a prompt takes
long to read; large, and each step of it is a pause in all other streams. So the worker hands it prompts in pieces.
"""

from __future__ import annotations

from operator import mul, truediv

from contract.scheduling import BLOCK_TOKENS, MAX_SLOWDOWN, WHOLE_PROMPT_TOKENS

_UNKNOWN = 4 * BLOCK_TOKENS  # tokens, before enough steps were seen
_ENOUGH = 8  # steps
_DRIFT = 0.002  # what each coefficient may change from step to step, as a variance in that of a step's time
_UNCERTAIN = 100.0  # the variance of a coefficient before the first step, and at most
_OUTLIER = 1.5  # times what was expected: the process waited for a core
_SCALES = (1.0, 32.0, 128.0)  # so that all three coefficients are of one size


class StepBudget:
    """A linear model of a step's time, in seconds, fitted to the latest steps by a Kalman filter.

    Without numpy, whose calls take longer than the arithmetic of three numbers: this runs after every step.

    most: tokens of a step.
    short: prompts up to this length are read whole: pieces of them cost more throughput than such a step harms.
    """

    def __init__(self, most: int) -> None:
        self._most, self.short = most, min(WHOLE_PROMPT_TOKENS, most)
        self._seconds = [0.0, 0.0, 0.0]  # of a step, of 32 running sequences, of 128 prompt tokens
        self._covariance = [[_UNCERTAIN if i == j else 0.0 for j in range(3)] for i in range(3)]
        self._seen = 0

    def observe(self, running: int, tokens: int, taken_s: float) -> None:
        """Take in a step. running: sequences that got their next token. tokens: of prompts."""
        a, b, c = inputs = 1.0, running / _SCALES[1], tokens / _SCALES[2]
        expected_s = sum(map(mul, inputs, self._seconds))
        if self._seen >= _ENOUGH:
            taken_s = min(taken_s, _OUTLIER * max(expected_s, taken_s / 10))
        spread = [row[0] * a + row[1] * b + row[2] * c for row in self._covariance]
        variance = 1 + sum(map(mul, inputs, spread))
        for i, (row, own) in enumerate(zip(self._covariance, spread, strict=True)):
            self._seconds[i] += own / variance * (taken_s - expected_s)
            for j in range(3):
                row[j] -= own * spread[j] / variance
            row[i] += _DRIFT if row[i] < _UNCERTAIN else 0.0
        self._seen += 1

    def tokens(self, running: int, waiting: int) -> int:
        """Return the prompt tokens of the next step, a block at least.

        running: sequences whose next token the step makes; without any it is as long as it may be.
        waiting: prompts that are not read. The more of them wait for each running sequence, the longer is the step.
        """
        room = max(BLOCK_TOKENS, self._most - running)
        if not running:
            return room
        if self._seen < _ENOUGH:
            return min(room, _UNKNOWN)
        step_s, of_running_s, of_tokens_s = map(truediv, self._seconds, _SCALES)
        without_s = max(step_s + of_running_s * running, 1e-6)
        longer_s = (MAX_SLOWDOWN - 1 + waiting / running) * without_s
        return int(min(max(longer_s / max(of_tokens_s, 1e-9), BLOCK_TOKENS), room))
