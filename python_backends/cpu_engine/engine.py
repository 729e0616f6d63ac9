"""The engine: schedules requests, sends them to the worker, and turns its step reports into responses.

Threads that call it: Triton's (submit, stop_request), the worker link's (on_ready, on_report, on_death), the control
socket's (on_control), the senders' and the ticker's. One lock guards the tables and the streams: the senders', which
hand over what became due under it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Protocol

from contract.errors import DeadlineExceeded, EngineFailed, InvalidArgument, TridentError, Unavailable
from contract.generation import Guide
from python_backends.cpu_engine.coalescing_window import CoalescingWindow, ServerCpu, ServingCost
from python_backends.cpu_engine.metrics import EngineLoad, EngineMetrics
from python_backends.cpu_engine.prefix_cache import PrefixCacheEstimate
from python_backends.cpu_engine.request import EngineRequest
from python_backends.cpu_engine.response_senders import ResponseSenders
from python_backends.cpu_engine.scheduler import Scheduler
from python_backends.cpu_engine.stream import Sink, Stream
from python_backends.cpu_engine.ticker import HttpDisconnects, Ticker
from python_backends.ensemble.control import ControlMessage, Verb
from python_backends.ensemble.token_increment import StreamEvent, TokenIncrement
from python_backends.ensemble.worker_messages import AddSequence, EndSequence, StepReport
from python_backends.limits import EngineLimits
from python_backends.triton_io import log_error

_PAUSES_S = (0.0, 0.2, 1.0, 5.0)  # before the next start of the worker, by the number that failed in a row


class Link(Protocol):
    """The connection to the worker, see link.WorkerLink."""

    def send(self, command: AddSequence | EndSequence) -> None: ...

    def close(self) -> None: ...


class WorkerStarts:
    """Whether the worker is ready, and when to give up starting it. The engine holds its lock, except for ``wait``."""

    def __init__(self) -> None:
        self._failures = 0
        self._ready = threading.Event()
        self._decided = threading.Event()  # ready, or given up

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    @property
    def given_up(self) -> bool:
        return self._failures >= len(_PAUSES_S)

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next start."""
        return _PAUSES_S[min(self._failures, len(_PAUSES_S) - 1)]

    def succeeded(self) -> None:
        """Record that the worker takes commands."""
        self._failures = 0
        self._ready.set()
        self._decided.set()

    def ended(self) -> None:
        """Record that the worker's process is gone; it counts as a failed start if it never became ready."""
        self._failures += not self._ready.is_set()
        self._ready.clear()
        if self.given_up:
            self._decided.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the worker is ready, starting it was given up, or the timeout; return whether it is ready."""
        self._decided.wait(timeout_s)
        return self._ready.is_set()


class Engine:
    """Generates the tokens of many requests at once with one worker, which it restarts when it dies."""

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
        half_closed: Callable[[], Collection[str]] = frozenset,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """
        open_link: start a worker that reports to this engine.
        max_waiting: requests that may wait for a slot.
        max_coalesce_ns: longest time that tokens wait for each other, see CoalescingWindow.
        prefix_reuse: the worker keeps a prefix cache.
        half_closed: see HttpDisconnects.
        """
        self._limits = limits
        self._metrics = metrics
        self._open_link = open_link
        self._clock_ns = clock_ns
        self._epoch = clock_ns()
        self._keys = itertools.count(1)
        self._streams: dict[int, Stream] = {}
        self._scheduler = Scheduler(limits.max_batch_size, limits.kv_cache_blocks, max_waiting)
        cost = ServingCost(ServerCpu().read)
        self._window = CoalescingWindow(max_coalesce_ns, cost)
        self._prefixes = PrefixCacheEstimate(limits.kv_cache_blocks if prefix_reuse else 0)
        self._starts = WorkerStarts()
        self._last_step = StepReport(0, 0)
        self._steps = 0
        self._closing = False  # accepts no more requests
        self._senders = ResponseSenders(sender_threads, self._on_sent, self._on_lost, clock_ns)
        parts = self._streams, self._scheduler, self._window, cost, self._senders, metrics
        self._ticker = Ticker(*parts, HttpDisconnects(half_closed), self._end, self._load, clock_ns)
        with self._senders:
            self._link = open_link(self)
            load = self._load()
        metrics.show(load)  # its slots are known before the first request
        self._ticker.start()

    def __len__(self) -> int:
        """The streams that have not ended."""
        return len(self._streams)

    def __contains__(self, key: int) -> bool:
        """Whether a stream has not ended."""
        return key in self._streams

    def submit(self, request: EngineRequest, sink: Sink, held: bool = False) -> int:
        """Accept a request and return its stream's key; responses go to ``sink``.

        held: it does not start before ``guide_checked``; ``max_waiting`` leaves it out.
        Raises Overloaded: ``max_waiting`` requests wait already.
        Raises Unavailable: the engine is closing, or its worker does not start.
        Raises DeadlineExceeded: the deadline has passed.
        """
        now_ns = self._clock_ns()
        with self._senders:
            if self._closing:
                raise Unavailable("the server is shutting down")
            if self._starts.given_up:
                raise Unavailable("the engine process does not start; see the server's log")
            if request.deadline_ns is not None and now_ns >= request.deadline_ns:
                raise DeadlineExceeded("the deadline had passed before the request reached the engine")
            key = next(self._keys)
            tokens = request.worker_ids.size + request.max_tokens
            accept = self._scheduler.hold if held else self._scheduler.enqueue
            accept(key, self._limits.blocks(tokens), request.priority)
            stream = Stream(self._epoch, key, request, sink, submitted_ns=now_ns)
            self._streams[key] = stream
            if not held:
                self._metrics.accepted(stream)
                self._start_scheduled(now_ns)
            self._ticker.watch(request.deadline_ns)
        return key

    def guide_checked(self, key: int, guide: Guide | TridentError) -> None:
        """Queue a held request with its guide, or refuse it; one that has ended is left alone. Raises Overloaded:
        ``max_waiting`` requests wait already; call it again with this error."""
        with self._senders:
            stream = self._streams.get(key)
            if stream is None:
                return
            if isinstance(guide, TridentError):
                self._scheduler.release(key)
                self._remove(stream, StreamEvent.ERROR, error=guide)
                self._metrics.refused(guide)
                return
            stream.request = replace(stream.request, guide=guide)
            self._scheduler.offer(key)
            self._metrics.accepted(stream)
            self._start_scheduled(self._clock_ns())

    def refused(self, error: TridentError) -> None:
        """Count a request that was refused before or by ``submit``."""
        self._metrics.refused(error)
        self._ticker.wake()

    def stop_request(self, request_id: str) -> None:
        """End every live stream of that request id, as TensorRT-LLM's stop does."""
        with self._senders:
            for key in [key for key, stream in self._streams.items() if stream.request.request_id == request_id]:
                self._end(key, StreamEvent.CANCELLED, cancelled_by="stop_request")

    def on_control(self, message: ControlMessage) -> None:
        """Execute a command of the detokenizer or the supervisor."""
        if message.verb is Verb.ABORT:
            self.abort(message.reason)
        elif message.epoch == self._epoch:
            with self._senders:
                if message.verb is Verb.CANCEL:
                    self._end(message.key, StreamEvent.CANCELLED, cancelled_by="client")
                elif message.verb is Verb.STOP:
                    self._end(message.key, StreamEvent.STOP)

    def abort(self, reason: str) -> None:
        """End every stream with the error Unavailable and accept no more requests."""
        with self._senders:
            self._closing = True
            for key in list(self._streams):
                self._end(key, StreamEvent.ERROR, error=Unavailable(reason), cancelled_by="shutdown")

    def close(self) -> None:
        """End every stream, send its last response, and end the worker."""
        self.abort("the engine was unloaded")
        self._ticker.close()
        self._senders.close()
        self._link.close()

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Return True once the worker is ready, False when starting it was given up or at the timeout."""
        return self._starts.wait(timeout_s)

    def on_ready(self) -> None:
        """Start the requests that wait for the worker."""
        with self._senders:
            self._starts.succeeded()
            self._start_scheduled(self._clock_ns())

    def on_report(self, report: StepReport) -> None:
        """Add a step's tokens to their streams, send those that are due, and start requests in freed slots."""
        with self._senders:
            now_ns = self._clock_ns()
            if report.end_ns:
                self._last_step = report
                self._steps += 1
                if report.drafting:
                    self._metrics.drafted(report.drafting, report.accepted)
            for id, cached_tokens in report.begun.items():
                begun = self._streams.get(id)
                if begun is not None and not begun.first_scheduled_ns:
                    begun.first_scheduled_ns = max(report.start_ns, begun.started_ns)
                    begun.num_cached_tokens = cached_tokens
            any_ended = False
            for output in report.outputs:
                stream = self._streams.get(output.id)
                if output.event.last:
                    self._scheduler.release(output.id)
                    any_ended = True
                if stream is None:
                    continue  # the engine ended it; this output confirms that its blocks are free
                if not stream.first_scheduled_ns:  # of an engine that does not report what it begins to read
                    stream.first_scheduled_ns = max(report.start_ns, stream.started_ns)
                if output.prompt_log_probs:
                    stream.add_prompt_log_probs(output.prompt_log_probs, output.prompt_top_log_probs)
                if stream.replay:
                    try:
                        output = stream.without_replayed(output)
                    except InvalidArgument as exc:
                        self._end(output.id, StreamEvent.ERROR, error=exc)
                        continue
                if output.token_ids and not stream.first_token_ns:
                    self._prefixes.remember(stream.request.worker_ids)
                token_ids, log_probs, top = output.token_ids, output.log_probs, output.top_log_probs
                if (keep := stream.stop_sequence_end(token_ids)) is not None:
                    token_ids, log_probs, top = token_ids[:keep], log_probs[:keep], top[:keep]
                stream.add_tokens(token_ids, log_probs, top, now_ns)
                if keep is not None:
                    self._end(output.id, StreamEvent.STOP)
                elif output.event is StreamEvent.ERROR:
                    self._finish(stream, output.event, error=EngineFailed(output.error))
                elif output.event.last:
                    event, stop_id = output.event, stream.request.ended_by
                    if stop_id >= 0:
                        event = StreamEvent.STOP
                    elif event is StreamEvent.STOP and output.token_ids:
                        stop_id = output.token_ids[-1]
                    self._finish(stream, event, stop_id)
                elif not stream.last_sent_ids_ns and stream.due(flush=False):
                    self._senders.put(stream)
            if report.end_ns and self._window.add_step(now_ns, self._scheduler.running):
                self._senders.flush(self._streams.values())
            if any_ended:
                self._start_scheduled(now_ns)

    def on_death(self, reason: str) -> None:
        """End the running streams with an error and start the next worker, for which waiting ones wait."""
        while reason:
            self._fail_streams(reason)
            if self._closing:
                return
            log_error(f"engine process restarts: reason={reason}")
            time.sleep(self._starts.pause_s)
            reason = self._start_worker()

    def _fail_streams(self, reason: str) -> None:
        with self._senders:
            if self._closing:
                return
            self._starts.ended()
            self._last_step = StepReport(0, 0)
            self._prefixes.clear()
            for key in self._scheduler.running_keys():
                self._scheduler.release(key)
                if key in self._streams:
                    error = EngineFailed(f"{reason}; it is being restarted")
                    self._finish(self._streams[key], StreamEvent.ERROR, error=error)
            if self._starts.given_up:
                for stream in list(self._streams.values()):
                    self._scheduler.release(stream.key)
                    self._finish(stream, StreamEvent.ERROR, error=Unavailable(f"{reason}; it does not start"))

    def _start_worker(self) -> str:
        """Return why a worker could not be started; empty if it was, or if the engine is closing."""
        with self._senders:
            if self._closing:
                return ""
            try:
                self._link = self._open_link(self)
            except OSError as exc:  # no memory or no processes left, for now
                return f"the engine process could not be started: {exc}"
        return ""

    # ---- under the lock -----------------------------------------------------------------------------------------

    def _start_scheduled(self, now_ns: int) -> None:
        if not self._starts.ready or self._closing:
            return
        for key in self._scheduler.schedule():
            stream = self._streams[key]
            request = stream.request
            stream.num_cached_tokens = self._prefixes.cached_tokens(request.worker_ids)
            stream.started_ns = now_ns
            given = request.max_tokens, request.sampling, request.stop_ids, request.priority, request.guide
            self._link.send(AddSequence(key, request.worker_ids, *given, stream.num_cached_tokens))

    def _end(
        self, key: int, event: StreamEvent, *, error: TridentError | None = None, cancelled_by: str | None = None
    ) -> None:
        """End a stream from the engine's side. The worker's last output for it releases its slot and blocks."""
        stream = self._streams.get(key)
        if stream is None:
            return
        if cancelled_by is not None:
            self._metrics.cancelled(cancelled_by)
        if stream.started_ns:
            self._link.send(EndSequence(key))
        else:
            self._scheduler.release(key)
            self._start_scheduled(self._clock_ns())  # those behind it may fit
        self._finish(stream, event, error=error)

    def _finish(self, stream: Stream, event: StreamEvent, stop_id: int = -1, error: TridentError | None = None) -> None:
        self._remove(stream, event, stop_id, error)
        self._metrics.finished(stream, self._clock_ns())

    def _remove(self, stream: Stream, event: StreamEvent, stop_id: int = -1, error: TridentError | None = None) -> None:
        del self._streams[stream.key]
        stream.finish(event, stop_id, error)
        self._senders.put(stream)

    def _load(self) -> EngineLoad:
        running, waiting = Counter[str](), Counter[str]()
        for stream in self._streams.values():
            if stream.request.adapter:
                (running if stream.started_ns else waiting)[stream.request.adapter] += 1
        return EngineLoad(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            slots=self._limits.max_batch_size,
            blocks=self._limits.kv_cache_blocks,
            # The last step's figures say nothing about an engine that runs no request.
            last_step=self._last_step if self._scheduler.running else StepReport(0, self._last_step.end_ns),
            steps=self._steps,
            running_adapters=running,
            waiting_adapters=waiting,
        )

    # ---- sender threads, under the lock --------------------------------------------------------------------------

    def _on_sent(self, responses: Sequence[tuple[Stream, TokenIncrement]]) -> None:
        self._metrics.sent(responses)
        self._ticker.wake()

    def _on_lost(self, stream: Stream, problem: Exception) -> None:
        self._end(stream.key, StreamEvent.ERROR, error=EngineFailed(f"a response could not be sent: {problem!r}"))
