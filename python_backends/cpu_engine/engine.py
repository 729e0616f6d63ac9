"""The engine: admits requests, feeds the worker, turns its step reports into streams, and ends them for good reason.

Threads that enter: Triton's (submit, stop_request), the link's (on_report, on_death), the control socket's
(on_control) and the engine's own ticker. One lock guards the tables; a stream's own lock guards its pending tokens.
Order of locks: the engine's, then a stream's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from contract.errors import DeadlineExceeded, EngineFailed, TridentError, Unavailable
from python_backends.cpu_engine.coalescing_window import CoalescingWindow
from python_backends.cpu_engine.http_disconnects import HttpDisconnects
from python_backends.cpu_engine.metrics import EngineLoad, EngineMetrics
from python_backends.cpu_engine.prefix_cache_estimate import PrefixCacheEstimate
from python_backends.cpu_engine.request import EngineRequest
from python_backends.cpu_engine.response_senders import ResponseSenders
from python_backends.cpu_engine.scheduler import Scheduler
from python_backends.cpu_engine.stream import Sink, Stream
from python_backends.ensemble.control import ControlMessage, Verb
from python_backends.ensemble.stream_state import StreamEvent
from python_backends.ensemble.token_increment import TokenIncrement
from python_backends.ensemble.worker_messages import AddSequence, EndSequence, StepReport
from python_backends.limits import EngineLimits
from python_backends.triton_io import log_error

TICK_S = 0.02
_LEAST_PAUSE_S = 0.001
_SHOW_S = 0.1  # gauges, TensorRT-LLM's stats_check_period_ms

# A stream that said nothing for so long is probed, so that a client that left is noticed even while its prompt is
# being read or its whole answer gathered. Waiting streams hold no slot: only the oldest are probed, and less often.
_PROBE_RUNNING_NS = 80_000_000
_PROBE_WAITING_NS = 250_000_000
_PROBED_WAITING = 64

_RESTART_PAUSES_S = (0.0, 0.2, 1.0, 5.0)


class Link(Protocol):
    """The worker, see link.WorkerLink."""

    def send(self, command: AddSequence | EndSequence) -> None: ...

    def close(self) -> None: ...


class Engine:
    def __init__(
        self,
        limits: EngineLimits,
        open_link: Callable[[Engine], Link],
        metrics: EngineMetrics,
        *,
        max_waiting: int,
        sender_threads: int,
        max_coalesce_ns: int,
        prefix_reuse: bool,
        count_close_wait: Callable[[], int] = lambda: 0,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._limits = limits
        self._metrics = metrics
        self._clock_ns = clock_ns
        self._window = CoalescingWindow(max_coalesce_ns)
        self._epoch = clock_ns()
        self._next_key = 0
        self._lock = threading.RLock()
        self._streams: dict[int, Stream] = {}  # every stream that has not ended
        self._by_request_id: dict[str, set[int]] = {}
        self._scheduler = Scheduler(limits.max_batch_size, limits.kv_cache_blocks, max_waiting)
        self._http_disconnects = HttpDisconnects(count_close_wait)
        self._prefixes = PrefixCacheEstimate(limits.kv_cache_blocks if prefix_reuse else 0, limits.block_tokens)
        self._last_step = StepReport(0, 0)
        self._steps = 0
        self._closing = False  # takes no more requests
        self._closed = False
        self._failed_starts = 0
        self._worker_ready = threading.Event()
        self._start_known = threading.Event()  # the worker is ready, or has failed to start for good
        self._open_link = open_link
        self._senders = ResponseSenders(sender_threads, self._on_sent, self._on_lost, clock_ns)
        self._work = threading.Event()  # set while anything lives; the ticker sleeps without it
        with self._lock:
            self._link = open_link(self)
        self._ticker = threading.Thread(target=self._tick_while_live, name="ticker", daemon=True)
        self._ticker.start()

    # ---- requests -----------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, sink: Sink) -> int:
        """Takes the request and returns its key; responses go to ``sink``. Raises Overloaded, Unavailable or
        DeadlineExceeded when it cannot be taken."""
        now_ns = self._clock_ns()
        with self._lock:
            if self._closing:
                raise Unavailable("the server is shutting down")
            if self._starts_no_more():
                raise Unavailable("the engine process does not start; see the server's log")
            if request.deadline_ns is not None and now_ns >= request.deadline_ns:
                raise DeadlineExceeded("the deadline had passed before the request reached the engine")
            self._next_key += 1
            key = self._next_key
            tokens = request.input_ids.size + request.max_tokens
            self._scheduler.offer(key, -(-tokens // self._limits.block_tokens), request.priority)
            stream = Stream(self._epoch, key, request, sink, submitted_ns=now_ns)
            self._streams[key] = stream
            if request.request_id:
                self._by_request_id.setdefault(request.request_id, set()).add(key)
            self._metrics.accepted(stream)
            self._start_admitted(now_ns)
            self._work.set()
        return key

    def refused(self, error: TridentError) -> None:
        """Counts a request that was turned away before or by ``submit``."""
        self._metrics.refused(error)
        self._work.set()  # the ticker takes it to the metrics page

    def stop_request(self, request_id: str) -> int:
        """TensorRT-LLM's stop: ends every live stream of that request id; returns how many there were."""
        with self._lock:
            keys = list(self._by_request_id.get(request_id, ()))
            return sum(self._end(key, StreamEvent.CANCELLED, cancelled_by="stop_request") for key in keys)

    def on_control(self, message: ControlMessage) -> None:
        """What the detokenizer or the supervisor says."""
        if message.verb is Verb.ABORT:
            self.abort(message.reason)
        elif message.epoch == self._epoch:
            with self._lock:
                if message.verb is Verb.CANCEL:
                    self._end(message.key, StreamEvent.CANCELLED, cancelled_by="client")
                elif message.verb is Verb.STOP:
                    self._end(message.key, StreamEvent.STOP)

    def abort(self, reason: str) -> None:
        """Ends every stream with an error, and takes no more: the server is going."""
        with self._lock:
            self._closing = True
            for key in list(self._streams):
                self._end(key, StreamEvent.ERROR, error=Unavailable(reason), cancelled_by="shutdown")

    def close(self) -> None:
        """After this the worker is gone and every stream has had its last response."""
        self.abort("the engine was unloaded")
        self._closed = True
        self._work.set()
        self._ticker.join(timeout=1)
        self._senders.close()
        self._link.close()

    # ---- the worker ---------------------------------------------------------------------------------------------

    def wait_until_ready(self, timeout_s: float) -> bool:
        """False as soon as the worker has failed to start as often as it is tried at once, or at the timeout."""
        self._start_known.wait(timeout_s)
        return self._worker_ready.is_set()

    def on_ready(self) -> None:
        with self._lock:
            self._failed_starts = 0
            self._worker_ready.set()
            self._start_known.set()
            self._start_admitted(self._clock_ns())

    def on_report(self, report: StepReport) -> None:
        with self._lock:
            now_ns = self._clock_ns()
            if report.end_ns:
                self._last_step = report
                self._steps += 1
            ended = False
            for output in report.outputs:
                stream = self._streams.get(output.id)
                if output.event.last:
                    self._scheduler.release(output.id)
                    ended = True
                if stream is None:
                    continue  # it was ended from our side; this output only confirms that its blocks are free
                if not stream.first_scheduled_ns:
                    # The first step after it was added; chunked prefill may give it its first turn a step later.
                    stream.first_scheduled_ns = max(report.start_ns, stream.started_ns)
                keep = stream.stop_sequence_end(output.token_ids)
                with stream.lock:
                    stream.add_tokens(
                        output.token_ids[:keep], output.log_probs[:keep], output.top_log_probs[:keep], now_ns
                    )
                if keep is not None:
                    self._end(output.id, StreamEvent.STOP)
                elif output.event is StreamEvent.ERROR:
                    self._finish(stream, output.event, error=EngineFailed(output.error))
                elif output.event.last:
                    stop_id = output.token_ids[-1] if output.event is StreamEvent.STOP and output.token_ids else -1
                    self._finish(stream, output.event, stop_id)
                else:
                    self._send_if_due(stream, flush=False)
            if self._window.step(now_ns, self._scheduler.running):
                for stream in self._streams.values():
                    self._send_if_due(stream, flush=True)
            if ended:
                self._start_admitted(now_ns)

    def on_death(self, reason: str) -> None:
        """Running streams end with an error; waiting ones wait for the next worker, which is started."""
        while reason:
            self._bury(reason)
            if self._closing:
                return
            log_error(f"{reason}; starting it again")
            time.sleep(_RESTART_PAUSES_S[min(self._failed_starts, len(_RESTART_PAUSES_S) - 1)])
            reason = self._start_worker()

    def _bury(self, reason: str) -> None:
        with self._lock:
            if self._closing:
                return
            self._failed_starts += not self._worker_ready.is_set()
            self._worker_ready.clear()
            self._last_step = StepReport(0, 0)
            for key in self._scheduler.running_keys():
                self._scheduler.release(key)
                if key in self._streams:
                    error = EngineFailed(f"{reason}; it is being restarted")
                    self._finish(self._streams[key], StreamEvent.ERROR, error=error)
            if self._starts_no_more():
                self._start_known.set()
                for stream in list(self._streams.values()):
                    self._scheduler.release(stream.key)
                    self._finish(stream, StreamEvent.ERROR, error=Unavailable(f"{reason}; it does not start"))

    def _start_worker(self) -> str:
        """Why a worker could not be started; empty when one was, or when none is wanted any more."""
        with self._lock:
            if self._closing:
                return ""
            try:
                self._link = self._open_link(self)
            except OSError as exc:  # no memory or no processes left, for now
                return f"the engine process could not be started: {exc}"
        return ""

    # ---- under the lock -----------------------------------------------------------------------------------------

    def _starts_no_more(self) -> bool:
        return self._failed_starts >= len(_RESTART_PAUSES_S)

    def _start_admitted(self, now_ns: int) -> None:
        if not self._worker_ready.is_set():
            return
        for key in self._scheduler.admit():
            stream = self._streams[key]
            request = stream.request
            stream.num_cached_tokens = self._prefixes.cached_tokens(request.input_ids)
            self._prefixes.remember(request.input_ids)
            stream.started_ns = now_ns
            self._link.send(
                AddSequence(
                    key, request.input_ids, request.max_tokens, request.sampling, request.stop_ids, request.priority
                )
            )

    def _end(
        self, key: int, event: StreamEvent, *, error: TridentError | None = None, cancelled_by: str | None = None
    ) -> bool:
        """Ends a stream from our side. Its slot and blocks are released when the worker confirms."""
        stream = self._streams.get(key)
        if stream is None:
            return False
        if cancelled_by is not None:
            self._metrics.cancelled(cancelled_by)
        if stream.started_ns:
            self._link.send(EndSequence(key))
        else:
            self._scheduler.release(key)
        self._finish(stream, event, error=error)
        return True

    def _finish(self, stream: Stream, event: StreamEvent, stop_id: int = -1, error: TridentError | None = None) -> None:
        """The stream leaves the tables; its last response goes out."""
        del self._streams[stream.key]
        same_id = self._by_request_id.get(stream.request.request_id)
        if same_id is not None:
            same_id.discard(stream.key)
            if not same_id:
                del self._by_request_id[stream.request.request_id]
        with stream.lock:
            stream.finish(event, stop_id, error)
            if not stream.queued:
                self._senders.put(stream)
        self._metrics.finished(stream, self._clock_ns())

    def _send_if_due(self, stream: Stream, flush: bool) -> None:
        with stream.lock:
            if stream.due(flush):
                self._senders.put(stream)

    # ---- the ticker ---------------------------------------------------------------------------------------------

    def _tick_while_live(self) -> None:
        unshown_s = 0.0
        while not self._closed:
            self._work.wait()
            self._end_departed()
            with self._lock:
                self._tick(self._clock_ns())
                idle = not self._streams and not self._scheduler.running
                if idle:
                    self._work.clear()
                load = self._load()
                pause_s = self._until_next_look_s()
            if idle or unshown_s >= _SHOW_S:
                self._metrics.show(load)
                unshown_s = 0.0
            unshown_s += pause_s
            time.sleep(pause_s)
        self._metrics.show(self._load())

    def _end_departed(self) -> None:
        """Ends the requests whose HTTP callers have left. The kernel is asked outside the lock: it takes its time."""
        now_ns = self._clock_ns()
        if not self._http_disconnects.due(now_ns):
            return
        with self._lock:
            live = frozenset(self._streams)
        departed = self._http_disconnects.check(live, now_ns)
        with self._lock:
            for key in departed:
                self._end(key, StreamEvent.CANCELLED, cancelled_by="client")

    def _until_next_look_s(self) -> float:
        """A tick, or less where a step that takes long, such as a prompt's, must not keep other streams' tokens."""
        left_ns = self._window.left_ns(self._clock_ns(), self._scheduler.running)
        return TICK_S if left_ns is None else min(TICK_S, max(_LEAST_PAUSE_S, left_ns / 1e9))

    def _tick(self, now_ns: int) -> None:
        flush = self._window.over(now_ns, self._scheduler.running)
        probed = set(self._scheduler.waiting_keys(_PROBED_WAITING))
        # Where a step takes longer than that, its tokens ask the same question: only missing two of them is silence.
        step_ns = self._last_step.end_ns - self._last_step.start_ns
        running_patience_ns = max(_PROBE_RUNNING_NS, 2 * step_ns)
        for stream in list(self._streams.values()):
            if stream.request.deadline_ns is not None and now_ns >= stream.request.deadline_ns:
                where = "while it was generating" if stream.started_ns else "while it waited for a slot"
                error = DeadlineExceeded(f"the deadline passed {where}")
                self._end(stream.key, StreamEvent.ERROR, error=error, cancelled_by="deadline")
                continue
            silent_ns = now_ns - (stream.last_sent_ns or stream.submitted_ns)
            patience_ns = running_patience_ns if stream.started_ns else _PROBE_WAITING_NS
            with stream.lock:
                if silent_ns >= patience_ns and (stream.started_ns or stream.key in probed):
                    stream.probe_due = True
                if not stream.queued and (stream.probe_due or stream.due(flush)):
                    self._senders.put(stream)

    def _load(self) -> EngineLoad:
        return EngineLoad(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            slots=self._limits.max_batch_size,
            blocks=self._limits.kv_cache_blocks,
            # The worker's figures are of its last step; when nothing runs they are history.
            last_step=self._last_step if self._scheduler.running else StepReport(0, self._last_step.end_ns),
            steps=self._steps,
        )

    # ---- sender threads -----------------------------------------------------------------------------------------

    def _on_sent(self, stream: Stream, increment: TokenIncrement) -> None:
        if increment.token_ids:
            self._metrics.sent(stream, increment)
            self._work.set()  # the ticker may have looked for the last time

    def _on_lost(self, stream: Stream, problem: Exception) -> None:
        with self._lock:
            self._end(stream.key, StreamEvent.ERROR, error=EngineFailed(f"a response could not be sent: {problem!r}"))
