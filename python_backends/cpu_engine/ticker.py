"""The engine's periodic work: deadlines, probes of silent streams, late flushes, disconnected HTTP clients, gauges."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from contract.errors import DeadlineExceeded
from python_backends.cpu_engine.coalescing_window import CoalescingWindow, ServingCost
from python_backends.cpu_engine.metrics import EngineLoad, EngineMetrics
from python_backends.cpu_engine.response_senders import ResponseSenders
from python_backends.cpu_engine.scheduler import Scheduler
from python_backends.cpu_engine.stream import Stream
from python_backends.ensemble.token_increment import StreamEvent
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

CHECK_EVERY_NS = 1_000_000_000
_CLOSE_WAIT = "08"  # TCP_CLOSE_WAIT of the kernel's tcp_states.h
_TABLES = Path("/proc/net/tcp"), Path("/proc/net/tcp6")
_MAX_LIVE = 64  # with more it is improbable that all have disconnected, and reading the tables takes long


def half_closed(port: int, tables: Collection[Path] = _TABLES) -> frozenset[str]:
    """Return the connections to the local ``port`` that clients have closed and the server has not, by address."""
    row = re.compile(rf":{port:04X} ([0-9A-F]+:[0-9A-F]{{4}}) {_CLOSE_WAIT} ")
    found: set[str] = set()
    for table in tables:
        with contextlib.suppress(OSError):  # no IPv6, or no /proc
            found.update(row.findall(table.read_text()))
    return frozenset(found)


class HttpDisconnects:
    """Requests whose HTTP client has disconnected, which Triton's HTTP endpoint does not detect.

    Triton 2.51 does not read a connection while its request runs, and no model learns which connection a request came
    by. A connection that the client has closed stays in CLOSE_WAIT until its request ends, or has a response, and each
    has one request. So when there are as many of them as requests in the engine without a response, the clients of all
    these have disconnected; when there are fewer, it cannot be known which (docs/decisions/0013). Streams among them
    are only counted, not ended: other calls, such as a probe of a server that is loading a model, leave such
    connections too.
    """

    def __init__(self, half_closed: Callable[[], Collection[str]]) -> None:
        """half_closed: return the connections in CLOSE_WAIT."""
        self._half_closed = half_closed
        self._checked_ns = 0
        self._suspects: tuple[frozenset[int], frozenset[str]] = frozenset(), frozenset()

    def due(self, now_ns: int) -> bool:
        """Whether a second has passed since the last check."""
        return now_ns - self._checked_ns >= CHECK_EVERY_NS

    def check(self, live: frozenset[int], now_ns: int, silent: int = 0) -> frozenset[int]:
        """Return the keys of the live requests whose clients have disconnected: all or none.

        They have if at two checks in a row, a second apart, the same requests were live and the same connections, as
        many as these and the silent streams, were half closed. A connection of a health check is so for a moment, also
        twice in a row.

        live: keys of the requests in the engine that answer once.
        now_ns: any monotonic clock.
        silent: streams that have sent nothing for CHECK_EVERY_NS, whose connections may be half closed too.
        """
        self._checked_ns = now_ns
        before, self._suspects = self._suspects, (frozenset(), frozenset())
        if 0 < len(live) <= _MAX_LIVE and len(closed := frozenset(self._half_closed())) == len(live) + silent:
            self._suspects = live, closed
        return live if self._suspects[0] and before == self._suspects else frozenset()


@dataclass
class Ticker:
    """Runs in a thread of its own, every TICK_S or sooner, and sleeps while there is no work.

    senders: the engine's lock too, held while streams, scheduler and window are used, and at ``end`` and ``load``.
    end: end a stream, see Engine._end.
    load: return what the gauges show.
    """

    streams: dict[int, Stream]
    scheduler: Scheduler
    window: CoalescingWindow
    cost: ServingCost
    senders: ResponseSenders
    metrics: EngineMetrics
    http_disconnects: HttpDisconnects
    end: Callable[..., None]
    load: Callable[[], EngineLoad]
    clock_ns: Callable[[], int]

    def __post_init__(self) -> None:
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
        with self.senders:
            load = self.load()
        self.metrics.show(load)

    def _tick(self) -> float:
        """Do what is due; return the time until the next tick."""
        self._end_disconnected()
        self.cost.update(self.clock_ns(), self.senders.sent)
        with self.senders:
            now_ns = self.clock_ns()
            if self.window.expired(now_ns, self.scheduler.running):
                self.senders.flush(self.streams.values())
            if now_ns >= self._check_ns:
                self._check_ns = now_ns + self._check_streams(now_ns)
            idle = not self.streams and not self.scheduler.running
            if idle:
                self._work.clear()
            show = idle or self._since_gauges_s >= _GAUGES_S
            load = self.load() if show else None
            # A tick, or less if the window closes earlier: a long step, as a prompt's, must not delay its tokens.
            remaining_ns = self.window.remaining_ns(self.clock_ns(), self.scheduler.running)
            pause_s = TICK_S if remaining_ns is None else min(TICK_S, max(_MIN_PAUSE_S, remaining_ns / 1e9))
        if load is not None:
            self.metrics.show(load)
            self._since_gauges_s = 0.0
        return pause_s

    def _end_disconnected(self) -> None:
        """End the requests that answer once whose HTTP clients have disconnected: those of streams show at a response.
        Reads /proc/net outside the lock, which takes long."""
        now_ns = self.clock_ns()
        if not self.http_disconnects.due(now_ns):
            return
        with self.senders:
            live = frozenset(key for key, stream in self.streams.items() if stream.request.answers_once)
            since_ns = now_ns - CHECK_EVERY_NS
            silent = sum(one.last_sent_ids_ns <= since_ns and key not in live for key, one in self.streams.items())
        disconnected = self.http_disconnects.check(live, now_ns, silent)
        with self.senders:
            for key in disconnected:
                self.end(key, StreamEvent.CANCELLED, cancelled_by="client")

    def _check_streams(self, now_ns: int) -> int:
        """End streams past their deadline and probe silent ones. Return the time until the next check."""
        probed = set(self.scheduler.waiting_keys(_PROBED_WAITING))
        # A slow engine's tokens arrive further apart than that; then only two missing ones are silence.
        last_step = self.load().last_step
        step_ns = last_step.end_ns - last_step.start_ns if last_step.start_ns else 0
        running_silence_ns = max(_PROBE_RUNNING_NS, 2 * step_ns)
        next_ns = _PROBE_RUNNING_NS
        for stream in list(self.streams.values()):
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
                self.senders.put(stream)
            else:
                next_ns = min(next_ns, allowed_ns - silent_ns)
        return next_ns

    def _end_expired(self, stream: Stream) -> None:
        where = "while it was generating" if stream.started_ns else "while it waited for a slot"
        if self.scheduler.holds(stream.key):
            where = "while its grammar waited to be compiled"
        error = DeadlineExceeded(f"the deadline passed {where}")
        self.end(stream.key, StreamEvent.ERROR, error=error, cancelled_by="deadline")
