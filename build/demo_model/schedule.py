"""The learning rate over a training run that is bounded by steps and by the clock.

The clock may shorten a run but never shapes it otherwise: whatever happened, (steps, decay_from) says everything.
"""

from dataclasses import dataclass

WARMUP_STEPS = 20
DECAY_SHARE = 0.4  # of the run; a long descent is worth more here than a long plateau
PLANNED_SHARE = 0.8  # of the clock's budget; the descent reads longer contexts, so its steps take longer


@dataclass(frozen=True)
class Schedule:
    """Warm up, stay, descend linearly to zero: `factor(step)` multiplies every learning rate."""

    steps: int
    decay_from: int

    @classmethod
    def planned(cls, steps: int, decay_from: int | None = None) -> "Schedule":
        return cls(steps, round(steps * (1 - DECAY_SHARE)) if decay_from is None else decay_from)

    def factor(self, step: int) -> float:
        warmup = min(1.0, (step + 1) / WARMUP_STEPS)
        descent = min(1.0, (self.steps - step) / max(1, self.steps - self.decay_from))
        return min(warmup, max(0.0, descent))

    def shortened(self, step: int, elapsed_s: float, budget_s: float) -> "Schedule":
        """The schedule to go on with, given that `step` steps took `elapsed_s`; self while there is time enough.

        It is changed at most once, when the descent has to begin now in order to end in time; a descent under way
        keeps its shape, so that (steps, decay_from) says everything about a finished run.
        """
        if step < WARMUP_STEPS or step >= self.decay_from:
            return self
        affordable = int(PLANNED_SHARE * budget_s * step / elapsed_s)
        if affordable >= self.steps or step < affordable * (1 - DECAY_SHARE):
            return self
        return Schedule(max(step + 1, affordable), step)
