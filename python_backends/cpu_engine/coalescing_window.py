"""The coalescing window: how long tokens of many streams wait to be sent together.

A response costs about the same CPU with one token as with sixty, and responses sent in one burst cost less than the
same ones spread out, because every thread on the way finds more work each time it wakes (benchmarks/LOG.md). So under
load the tokens of all streams are sent after the same step. A stream's first token and its end are never delayed
(stream.py).
"""

from __future__ import annotations

# A response costs ~0.4 ms of CPU from here to the client, so this limits responses to a third of a core, or to two
# thirds where a third would delay tokens by more than COMFORT_NS.
PER_STREAM_NS = 1_100_000
COMFORT_NS = 18_000_000
# Minimum: 250 tokens a second to each client, a quarter of a 60 Hz frame. A response for each of more frequent steps
# would take half of a small machine from the engine.
MIN_NS = 4_000_000


class CoalescingWindow:
    """Closes with the last step that keeps the oldest token's wait within the window. Not thread-safe."""

    def __init__(self, max_ns: int) -> None:
        """max_ns: upper bound of the window, which grows with the streams; 0 sends every token with its step."""
        self._max_ns = max_ns
        self._opened_ns: int | None = None  # when the oldest waiting token came
        self._last_step_ns = 0
        self._steps_ns = (0, 0)  # the last two steps: one beside which a burst is sent takes longer

    def width_ns(self, live_streams: int) -> int:
        return min(
            self._max_ns,
            max(MIN_NS, min(COMFORT_NS, live_streams * PER_STREAM_NS), live_streams * PER_STREAM_NS // 2),
        )

    def add_step(self, now_ns: int, live_streams: int) -> bool:
        """Record a step's tokens; return whether all waiting tokens are sent now."""
        self._steps_ns = (self._steps_ns[1], now_ns - self._last_step_ns)
        self._last_step_ns = now_ns
        if self._opened_ns is None:
            self._opened_ns = now_ns
        # Closes now if the oldest token could not wait for the next step.
        return self._close_if_over(self._opened_ns, now_ns + sum(self._steps_ns) // 2, live_streams)

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
