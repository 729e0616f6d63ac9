"""The engine's periodic work: deadlines, probes of silent streams, late flushes, disconnected HTTP clients, gauges."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from contract.errors import DeadlineExceeded, TridentError
from python_backends.cpu_engine.coalescing_window import CoalescingWindow
from python_backends.cpu_engine.http_disconnects import CHECK_EVERY_NS, HttpDisconnects
from python_backends.cpu_engine.metrics import EngineLoad, EngineMetrics
from python_backends.cpu_engine.response_senders import ResponseSenders
from python_backends.cpu_engine.scheduler import Scheduler
from python_backends.cpu_engine.serving_cost import ServingCost
from python_backends.cpu_engine.stream import Stream
from python_backends.ensemble.stream_state import StreamEvent
from python_backends.triton_io import log_error

TICK_S = 0.02
_MIN_PAUSE_S = 0.001
_PAUSE_AFTER_FAILURE_S = 0.5
_GAUGES_S = 0.1  # between two updates, TensorRT-LLM's stats_check_period_ms

# A stream without a response for so long is probed, so that a disconnected client is detected even while its prompt is
# processed or its whole output gathered. Waiting streams hold no slot: only the oldest are probed, and less often.
_PROBE_RUNNING_NS = 80_000_000
_PROBE_WAITING_NS = 250_000_000
_PROBED_WAITING = 64


class EndStream(Protocol):
    """Engine.end."""

    def __call__(
        self, key: int, event: StreamEvent, *, error: TridentError | None = None, cancelled_by: str | None = None
    ) -> None: ...


class Ticker:
    """Runs in a thread of its own, every TICK_S or sooner, and sleeps while there is no work."""

    def __init__(
        self,
        streams: dict[int, Stream],
        scheduler: Scheduler,
        window: CoalescingWindow,
        cost: ServingCost,
        senders: ResponseSenders,
        metrics: EngineMetrics,
        http_disconnects: HttpDisconnects,
        *,
        end: EndStream,
        load: Callable[[], EngineLoad],
        clock_ns: Callable[[], int],
    ) -> None:
        """
        senders: the engine's lock too, held while streams, scheduler and window are used, and at ``end`` and ``load``.
        end: end a stream.
        load: return what the gauges show.
        """
        self._streams = streams
        self._scheduler = scheduler
        self._window = window
        self._cost = cost
        self._senders = senders
        self._metrics = metrics
        self._http_disconnects = http_disconnects
        self._end = end
        self._load = load
        self._clock_ns = clock_ns
        self._closed = False
        self._since_gauges_s = 0.0
        self._check_ns = 0  # when the next deadline passes or the next stream has been silent for too long
        self._work = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Tick until no stream is left. Call it after every change that ``EngineMetrics.show`` must send."""
        if not self._work.is_set():  # cheaper than setting it again
            self._work.set()

    def watch(self, deadline_ns: int | None) -> None:
        """Tick for a new stream. The caller holds the lock."""
        if deadline_ns is not None:
            self._check_ns = min(self._check_ns, deadline_ns)
        self.wake()

    @property
    def idle(self) -> bool:
        return not self._work.is_set()

    def close(self) -> None:
        """Tick once more and stop the thread."""
        self._closed = True
        self._work.set()
        self._thread.join(timeout=1)

    def _run(self) -> None:
        while not self._closed:
            self._work.wait()
            try:
                pause_s = self._tick()
            except Exception as exc:  # the thread's outer edge: without it no deadline would be kept any more
                log_error(f"tick failed: error={exc!r}")
                self._work.set()
                pause_s = _PAUSE_AFTER_FAILURE_S
            self._since_gauges_s += pause_s
            time.sleep(pause_s)
        with self._senders:
            load = self._load()
        self._metrics.show(load)

    def _tick(self) -> float:
        """Do what is due; return the time until the next tick."""
        self._end_disconnected()
        self._cost.update(self._clock_ns(), self._senders.sent)
        with self._senders:
            now_ns = self._clock_ns()
            if self._window.expired(now_ns, self._scheduler.running):
                self._senders.flush(self._streams.values())
            if now_ns >= self._check_ns:
                self._check_ns = now_ns + self._check_streams(now_ns)
            idle = not self._streams and not self._scheduler.running
            if idle:
                self._work.clear()
            show = idle or self._since_gauges_s >= _GAUGES_S
            load = self._load() if show else None
            pause_s = self._pause_s()
        if load is not None:
            self._metrics.show(load)
            self._since_gauges_s = 0.0
        return pause_s

    def _end_disconnected(self) -> None:
        """End the requests that answer once whose HTTP clients have disconnected: those of streams show at a response.

        Reads /proc/net outside the lock, which takes long.
        """
        now_ns = self._clock_ns()
        if not self._http_disconnects.due(now_ns):
            return
        with self._senders:
            live = frozenset(key for key, stream in self._streams.items() if stream.request.answers_once)
            since_ns = now_ns - CHECK_EVERY_NS
            silent = sum(
                stream.last_sent_ids_ns <= since_ns and key not in live for key, stream in self._streams.items()
            )
        disconnected = self._http_disconnects.check(live, now_ns, silent)
        with self._senders:
            for key in disconnected:
                self._end(key, StreamEvent.CANCELLED, cancelled_by="client")

    def _check_streams(self, now_ns: int) -> int:
        """End streams past their deadline and probe silent ones. Return the time until the next check."""
        probed = set(self._scheduler.waiting_keys(_PROBED_WAITING))
        # A slow engine's tokens arrive further apart than that; then only two missing ones are silence.
        last_step = self._load().last_step
        step_ns = last_step.end_ns - last_step.start_ns if last_step.start_ns else 0
        running_silence_ns = max(_PROBE_RUNNING_NS, 2 * step_ns)
        next_ns = _PROBE_RUNNING_NS
        for stream in list(self._streams.values()):
            if (deadline_ns := stream.request.deadline_ns) is not None:
                if now_ns >= deadline_ns:
                    self._end_expired(stream)
                    continue
                next_ns = min(next_ns, deadline_ns - now_ns)
            if not stream.started_ns and stream.key not in probed:
                continue
            allowed_ns = running_silence_ns if stream.started_ns else _PROBE_WAITING_NS
            silent_ns = now_ns - (stream.last_sent_ns or stream.submitted_ns)
            if silent_ns >= allowed_ns:
                stream.probe_due = True
                self._senders.put(stream)
            else:
                next_ns = min(next_ns, allowed_ns - silent_ns)
        return next_ns

    def _end_expired(self, stream: Stream) -> None:
        where = "while it was generating" if stream.started_ns else "while it waited for a slot"
        if self._scheduler.holds(stream.key):
            where = "while its grammar waited to be compiled"
        error = DeadlineExceeded(f"the deadline passed {where}")
        self._end(stream.key, StreamEvent.ERROR, error=error, cancelled_by="deadline")

    def _pause_s(self) -> float:
        """A tick, or less if the window closes earlier: a long step, such as a prompt's, must not delay its tokens."""
        remaining_ns = self._window.remaining_ns(self._clock_ns(), self._scheduler.running)
        return TICK_S if remaining_ns is None else min(TICK_S, max(_MIN_PAUSE_S, remaining_ns / 1e9))
