"""The coalescing window: how long tokens of many streams wait to leave together.

A response costs the machine about the same whether it carries one token or sixty, and responses that leave in one
burst cost less than the same ones spread out, because every thread on the way finds more work each time it wakes
(benchmarks/LOG.md). So under load all streams' tokens leave with the same step. A stream's first token and its end
are never held back (stream.py).
"""

from __future__ import annotations

# One response costs ~0.4 ms of CPU from here to the client, so this lets responses take a third of a core, or two
# thirds where a third would keep readers waiting.
PER_STREAM_NS = 1_100_000
COMFORT_NS = 18_000_000
# Steps closer together than this are more than 250 tokens a second to each reader, whom a quarter of a screen's frame
# does not keep waiting; a response for each of them would take half of a small machine from the engine.
LEAST_NS = 4_000_000


class CoalescingWindow:
    """Closes with the last step that keeps the oldest token's wait within the window: what waits until a later step
    would be late. ``max_ns`` bounds it, 0 lets every token leave at once; within that it grows with the streams."""

    def __init__(self, max_ns: int) -> None:
        self._max_ns = max_ns
        self._opened_ns: int | None = None  # when the oldest waiting token came
        self._last_step_ns = 0
        self._steps_ns = (0, 0)  # the last two steps: the one that a burst was sent beside is slower

    def width_ns(self, live_streams: int) -> int:
        return min(
            self._max_ns,
            max(LEAST_NS, min(COMFORT_NS, live_streams * PER_STREAM_NS), live_streams * PER_STREAM_NS // 2),
        )

    def step(self, now_ns: int, live_streams: int) -> bool:
        """A step's tokens have come. Whether they, and all that wait, leave now."""
        self._steps_ns = (self._steps_ns[1], now_ns - self._last_step_ns)
        self._last_step_ns = now_ns
        if self._opened_ns is None:
            self._opened_ns = now_ns
        return self._closed(now_ns + sum(self._steps_ns) // 2, live_streams)

    def over(self, now_ns: int, live_streams: int) -> bool:
        """Between steps: whether the step that should have taken what waits is late."""
        return self._opened_ns is not None and self._closed(now_ns, live_streams)

    def left_ns(self, now_ns: int, live_streams: int) -> int | None:
        """Until it is over, None while nothing waits."""
        return None if self._opened_ns is None else self._opened_ns + self.width_ns(live_streams) - now_ns

    def _closed(self, then_ns: int, live_streams: int) -> bool:
        closed = then_ns - self._opened_ns > self.width_ns(live_streams)
        if closed:
            self._opened_ns = None
        return closed
