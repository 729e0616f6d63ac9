"""The coalescing window: how long tokens of many streams wait to be sent together.

A response costs about the same CPU with one token as with sixty, and responses sent in one burst cost less than the
same ones spread out, because every thread on the way finds more work each time it wakes (benchmarks/LOG.md). So under
load the tokens of all streams are sent after the same step. A stream's first token and its end are never delayed
(stream.py).
"""

from __future__ import annotations

from collections import deque

from contract.scheduling import window_s
from python_backends.cpu_engine.serving_cost import ServingCost

# The next step may be as short as the shortest of so many: one beside which a burst is sent takes longer. Where it is
# not, the tokens leave when the window is over, with no more responses than if they had not waited.
_STEPS = 4
# Where none of these fits, one in so many windows is kept open all the same to learn how long a step is without a
# burst beside it, unless even the shortest is longer than so many windows.
_TRY_EVERY, _TRY_WITHIN = 16, 1.5


class CoalescingWindow:
    """Closes with the last step that keeps the oldest token's wait within the window. Not thread-safe."""

    def __init__(self, max_ns: int, cost: ServingCost) -> None:
        """max_ns: upper bound of the window, which grows with the streams; 0 sends every token with its step."""
        self._max_ns = max_ns
        self._cost = cost
        self._opened_ns: int | None = None  # when the oldest waiting token came
        self._last_step_ns = 0
        self._steps_ns = deque[int](maxlen=_STEPS)
        self._alone = 0  # steps whose tokens were sent alone, one after the other

    def width_ns(self, live_streams: int) -> int:
        return min(self._max_ns, int(1e9 * window_s(live_streams, self._cost.response_s, self._cost.cores)))

    def add_step(self, now_ns: int, live_streams: int) -> bool:
        """Record a step's tokens; return whether all waiting tokens are sent now."""
        self._steps_ns.append(now_ns - self._last_step_ns)
        self._last_step_ns = now_ns
        if self._opened_ns is None:
            self._opened_ns = now_ns
        # Closes now if the oldest token could not wait for the next step.
        opened_ns, step_ns = self._opened_ns, min(self._steps_ns)
        if opened_ns < now_ns:
            self._alone = 0
        elif now_ns + step_ns - opened_ns > (width_ns := self.width_ns(live_streams)):
            self._alone += 1
            if self._alone % _TRY_EVERY == 0 and step_ns <= _TRY_WITHIN * width_ns:
                return False
        return self._close_if_over(opened_ns, now_ns + step_ns, live_streams)

    def expired(self, now_ns: int, live_streams: int) -> bool:
        """Return whether the waiting tokens are sent now because the step that should send them is late."""
        return self._opened_ns is not None and self._close_if_over(self._opened_ns, now_ns, live_streams)

    def remaining_ns(self, now_ns: int, live_streams: int) -> int | None:
        """Return the time until it expires, None while no token waits."""
        return None if self._opened_ns is None else self._opened_ns + self.width_ns(live_streams) - now_ns

    def _close_if_over(self, opened_ns: int, then_ns: int, live_streams: int) -> bool:
        over = then_ns - opened_ns > self.width_ns(live_streams)
        if over:
            self._opened_ns = None
        return over
