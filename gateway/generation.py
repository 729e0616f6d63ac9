"""One generation in flight: its deltas, its timeouts, its moves to other targets, and its end."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.trace import Span, SpanKind

from clients.wire.connection import new_request_id
from clients.wire.token_stream import NO_OUTPUTS, TokenStream
from contract.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidArgument,
    Overloaded,
    TridentError,
    Unavailable,
)
from contract.generation import FinishReason, GenerationRequest, TokenDelta, Usage
from gateway import continuation
from gateway.admission.fair_admission import DEGRADED_HEADER, Permit, Stage
from gateway.admission.request_class import engine_priority
from gateway.config.settings import Settings
from gateway.continuation import Continuation, SuspectPrompts
from gateway.live_generations import LiveGenerations
from gateway.request_context import RequestContext
from gateway.routing.backend_errors import from_backend
from gateway.routing.overflow import Overflow
from gateway.routing.replicas import Replicas, Route
from gateway.routing.shadow import Copy
from gateway.routing.upstream import Spend, UpstreamStream
from gateway.samples.recorder import Recording
from gateway.telemetry import request_log
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.tracing import Tracing, end_span, record_replica, traceparent

# A request without a token leaves a replica that is unhealthy and has made no progress for this long.
UNHEALTHY_S = 1.0
LEFT = "the caller went away"


@dataclass(frozen=True)
class GenerationRuntime:
    """What all generations of a gateway use, and what encodes.

    shadow: begins the shadow copy of a request that a pool serves; returns None for most.
    record: begins the recording of a request for samples; returns None for one that is not recorded.
    suspects: prompts that are not continued.
    reports_cached_tokens: whether callers may see prefix cache hits. All tenants share the replicas' prefix cache, so
        the number would tell one tenant about the prompts of another.
    """

    settings: Settings
    replicas: Replicas
    overflow: Overflow
    live: LiveGenerations
    metrics: Metrics
    tracing: Tracing
    shadow: Callable[[GenerationRequest, str], Copy | None] = lambda request, pool: None
    reports_cached_tokens: Callable[[], bool] = lambda: True
    record: Callable[[GenerationRequest, RequestContext, float], Recording | None] = lambda *_: None
    suspects: SuspectPrompts = field(default_factory=SuspectPrompts)


class Generation:
    """An asynchronous iterator of TokenDelta that ends, or raises TridentError.

    Before its first token a request may move: to another replica when its own makes no progress or becomes unhealthy,
    at most ``hang_retries`` times, and to the next target when one fails, each target once (docs/decisions/0015). When
    its replica is lost it goes on at another one of its pool, from the ids so far (docs/decisions/0023).

    request: what is served, perhaps with fewer ``max_tokens`` than requested.
    target: the overflow target that serves it; "" for replicas of its own pool. upstream: None if replicas serve it.
    """

    def __init__(
        self,
        runtime: GenerationRuntime,
        permit: Permit,
        index: int,
        context: RequestContext,
        began_s: float,
        span: Span | None,
        on_end: Callable[[Generation], int],
    ) -> None:
        """index: of the permit's request. began_s: arrival, ``time.monotonic()``. span: of the request. on_end: called
        once, at the end; returns what it adds to the cost of its request."""
        self._runtime, self._permit, self._context, self._span = runtime, permit, context, span
        self.request, self._turn, self.prompt_count = permit.requests[index], permit.turns[index], permit.counts[index]
        self.index, self._on_end, request = index, on_end, self.request
        self._aim(runtime.overflow.first(permit.target, request) if permit.target else "")
        if self.target:
            permit.headers[DEGRADED_HEADER] = f"overflow={self.target}"
        self._tried = {self.target}  # targets
        self._hang_retries = self._earlier_attempts = 0  # those at targets before this one
        self._deadline_s = math.inf
        self._started = False  # any response arrived: from then on nothing is retried
        self.id = new_request_id()
        self.began_s, self.first_s = began_s, 0.0
        self.usage: Usage | None = None
        self.finish_reason = ""
        self.tokens = self._first_tokens = 0
        self.error: TridentError | None = None
        self._waiting_since_s = 0.0  # 0: the idle timer is stopped
        self._cut_error: TridentError | None = None
        self._replica_span: Span | None = None
        self._answered_ns: int | None = None  # last response of the replica, wall clock
        self._route: Route | None = None
        self._stream: TokenStream | UpstreamStream | None = None
        self._payload, self._packs = b"", False  # see ``relay``
        self._continued_payload: Callable[[tuple[int, ...]], bytes] | None = None
        self._continuation = Continuation(runtime.settings.continuations)
        self._engine = ""  # hash of the engine that made the first token
        self._opened_s = 0.0  # when the current attempt began
        self._silence: TridentError | None = None  # why a continuable attempt was cancelled
        self._shadow = runtime.shadow(request, self._turn.pool)
        if (recording := runtime.record(request, context, began_s)) is not None:
            recording.choice = index
        self.recording = recording
        self._closed = False
        runtime.live.add(self)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> TokenDelta:
        while True:
            try:
                stream = self._stream or await self._open()
                self._waiting_since_s = time.monotonic()  # the replica owes a response
                delta = await stream.__anext__()
            except StopAsyncIteration:
                self._waiting_since_s = 0.0
                if self.finish_reason or self._closed:
                    raise
                # Cut while its reader held the latest delta, as a pause of this whole process does.
                if self._silence is not None and await self._continue(self._silence):
                    self._stream = None
                    continue
                ended = EngineFailed("the replica ended its stream without a finish_reason")
                raise self._cut_error or self._continuation.error or from_backend(ended) from None
            except TridentError as exc:
                error = self._shown(exc)
                counted = exc is self.deferred_error  # when the text in front of it came
                if counted or not (await self._retry_elsewhere(error) or await self._continue(error)):
                    raise self._first_loss(error) from exc.__cause__
                self._stream = None
                continue
            if delta is not NO_OUTPUTS:
                # Text in front of an error is what the replica had held back; it is generated again.
                deferred = stream.deferred_error
                if deferred is not None and await self._continue(from_backend(deferred)):
                    stream.cancel()
                    self._stream = None
                    continue
                self._observe(delta)
            if self._payload:
                if stream.finished and not self.finish_reason:
                    self._observe(TokenDelta(finish_reason=FinishReason.STOP))
            elif delta.finish_reason:
                return self._shown_end(delta)
            return delta

    async def _open(self) -> TokenStream | UpstreamStream:
        if self._deadline_s == math.inf:  # it starts when the request first waits for its slot
            timeout_s = self.request.timeout_s or self._runtime.settings.request_timeout_s
            self._deadline_s = time.monotonic() + timeout_s
        await self._turn.begin()
        if self._cut_error is not None:
            raise self._cut_error
        self._opened_s = time.monotonic()
        spend = await self.upstream.reserve(self.request) if self.upstream is not None else None
        if spend is not None and (self._closed or self._cut_error is not None):
            spend.settle(None)
            raise self._cut_error or Cancelled(LEFT)
        self._stream = self._opened(spend)
        return self._stream

    def _shown(self, error: TridentError) -> TridentError:
        if self._cut_error is not None and (error is self._cut_error or isinstance(error, Cancelled)):
            return self._cut_error
        if self._silence is not None:
            return self._silence
        if self._stream is None or isinstance(error, Cancelled):
            return error
        self._waiting_since_s = 0.0
        error = from_backend(error)
        error.attempts = self._attempts
        return error

    def _shown_end(self, delta: TokenDelta) -> TokenDelta:
        """Return the last delta as the caller sees it. Raises Unavailable for a generation that the replica ended."""
        if delta.finish_reason is FinishReason.CANCELLED:
            raise from_backend(Unavailable("the replica ended the generation before it was done"))
        if delta.usage is not None and not self._runtime.reports_cached_tokens():
            return dataclasses.replace(delta, usage=dataclasses.replace(delta.usage, cached_tokens=0))
        return delta

    @property
    def _attempts(self) -> int:
        return self._earlier_attempts + (self._stream.attempts if self._stream is not None else 0)

    async def _retry_elsewhere(self, error: TridentError) -> bool:
        """Move the request to the next target after ``error``; False if there is none, or it may not move.

        Raises Overloaded, DeadlineExceeded: the queue for a slot there refuses it.
        """
        retryable = (Unavailable, Overloaded, EngineFailed) if self.upstream is not None else (Unavailable, Overloaded)
        remaining_s = self._deadline_s - time.monotonic()
        if self._started or self._closed or error is self._cut_error:
            return False
        if not isinstance(error, retryable) or remaining_s <= 0:
            return False
        overflow, context = self._runtime.overflow, self._context
        target = overflow.next_target(context, self.request, self._tried)
        if target is None:
            if isinstance(error, Overloaded | Unavailable):
                error.retry_after_s = overflow.retry_after_s(context, self.request, error)
            return False
        try:
            await self._turn.go(target, remaining_s)
        except TridentError as refused:
            refused.__cause__ = error
            raise
        if self._closed or self._cut_error is not None:
            self._turn.release()
            raise self._cut_error or Cancelled(LEFT)
        self._earlier_attempts = self._attempts
        self._tried.add(target)
        places = {"from": self.target or "replicas", "to": target or "replicas"}
        request_log.moved("request moved to another target", context, self.id, error, **places)
        end_span(self._replica_span, error)
        self._replica_span = self._route = None
        self._aim(target)
        if target:
            self._permit.admission.degraded[Stage.OVERFLOW.value] += 1
            self._permit.headers[DEGRADED_HEADER] = f"overflow={target}"
        elif self._permit.headers.get(DEGRADED_HEADER, "").startswith("overflow="):
            del self._permit.headers[DEGRADED_HEADER]
        return True

    async def _continue(self, error: TridentError) -> bool:
        """Wait until another replica of the pool can go on after ``error``; False if the request cannot go on."""
        state, route = self._continuation, self._route
        silence, self._silence = self._silence, None
        if self._closed or self.finish_reason or self._cut_error is not None or self.upstream is not None:
            return False
        begun = self._started or state.count > 0
        lost = silence is not None or isinstance(error, EngineFailed) or (begun and isinstance(error, Unavailable))
        if route is None or not lost:
            return False
        in_band = self._stream is not None and bool(self._stream.message)
        began = self._stream is not None and self._started and not state.lost_s
        ran_s = time.monotonic() - self._opened_s
        state.lose(error, route.replica, silence is not None or continuation.is_loss(error, in_band, ran_s, began))
        suspects = self._runtime.suspects
        if state.exhausted:
            suspects.add(self.request, self._context.request_id, error)
        if not state.allows(self.request) or (self._payload and self._continued_payload is None):
            result = "refused"
        elif self.request in suspects:
            result = "suspect"
        else:
            result = "continued" if await self._wait_for_replica(route) else "no_replica"
        self._runtime.metrics.continuations.labels(result).inc()
        if result != "continued":
            return False
        self._earlier_attempts = self._attempts
        self._permit.headers[continuation.HEADER] = str(state.count)
        places = {"from": route.replica, "tokens": self.tokens}
        request_log.moved("generation continues at another replica", self._context, self.id, error, **places)
        end_span(self._replica_span, error)
        self._replica_span = None
        return True

    async def _wait_for_replica(self, route: Route) -> bool:
        """Wait until a replica of the pool with the same engine is ready; False if none is in time.

        Raises the error of a generation that was cut or closed meanwhile.
        """
        self._waiting_since_s = 0.0
        until_s = min(self._deadline_s, self._continuation.lost_s + continuation.WAIT_S)
        if not route.has_alternative():
            await asyncio.sleep(continuation.PAUSE_S)
        while not (self._closed or self._cut_error is not None):
            if self._runtime.replicas.ready_with(self._turn.pool, self._engine):
                return True
            if time.monotonic() >= until_s:
                return False
            await asyncio.sleep(continuation.POLL_S)
        raise self._cut_error or Cancelled(LEFT)

    def _first_loss(self, error: TridentError) -> TridentError:
        """Return the error of the first lost replica where ``error`` only says why the request could not go on."""
        loss = self._continuation.error
        return loss if loss is not None and isinstance(error, InvalidArgument | Unavailable | EngineFailed) else error

    def _aim(self, target: str) -> None:
        """Let the request go to a target, also where a later configuration has it no more."""
        self.target, self.upstream = target, self._runtime.overflow.upstreams.get(target)

    @property
    def remaining_s(self) -> float:
        """Until the deadline, once it has begun."""
        return max(0.001, self._deadline_s - time.monotonic())

    def _open_route(self) -> Route:
        tracing, context = self._runtime.tracing, self._context
        route_span = tracing.child(self._span, "route")
        self._replica_span = tracing.child(self._span, "replica", SpanKind.CLIENT)
        parent = traceparent(self._replica_span, context.carrier)
        replicas, state, payload = self._runtime.replicas, self._continuation, self._payload
        if state.count and self._continued_payload is not None:
            payload = self._continued_payload(state.ids(self.request))
        tried = state.tried | replicas.with_other_engine(self._turn.pool, self._engine)
        route = replicas.route(self.request, self._turn.pool, context.session, parent, payload, tried)
        route.packs = self._packs or not payload
        route.priority = engine_priority(context.tenant.priority, context.own_priority)
        if self._turn.may_move:
            route.move, route.group = self._change_pool, context.tenant.pool
        if route_span is not None:
            route.explain = route_span.is_recording()
            route.picked = lambda: self._routed(route, route_span)
        self._route = route
        return route

    async def _change_pool(self) -> str:
        """Wait for a slot in another pool and returns its name. The idle timer is stopped meanwhile."""
        self._waiting_since_s = 0.0
        pool = await self._turn.move()
        self._waiting_since_s = time.monotonic()
        return pool

    def _routed(self, route: Route, route_span: Span) -> None:
        """Record the picked replica: the first one ends its span, later ones are failovers."""
        attributes: dict[str, Any] = {"server.address": route.replica, "trident.pool": route.pool}
        if route.explanation is not None:
            attributes |= route.explanation.attributes()
        if route_span.is_recording():
            end_span(route_span, **attributes)
        elif self._replica_span is not None:
            self._replica_span.add_event("failover", attributes)

    def _observe(self, delta: TokenDelta) -> None:
        self._waiting_since_s = 0.0
        self._started = True
        tokens = _generated(delta)
        self.tokens += tokens
        if self._route is not None:
            engine = self._route.made_tokens(tokens)
            self._engine = self._engine or engine
        self._continuation.observe(delta)
        if not self.first_s and (tokens or delta.finish_reason):
            self.first_s, self._first_tokens = time.monotonic(), tokens
        if delta.finish_reason:
            self.finish_reason, self.usage = delta.finish_reason.value, delta.usage
            self._turn.release()  # at once: another choice may wait for it
            if self._route is not None and delta.usage is not None:
                self._route.read_usage(delta.usage)
            if self._replica_span is not None:
                self._answered_ns = time.time_ns()
                record_replica(self._runtime.tracing, self._replica_span, delta.timings, self._answered_ns)
        if self._shadow is not None:
            self._shadow.observe(delta)
        if self.recording is not None:
            self.recording.observe(delta)

    def relay(self, payload: bytes, continued: Callable[[tuple[int, ...]], bytes] | None, packs: bool = False) -> None:
        """Send this serialised ModelInferRequest in place of one made from ``request``. Each message gives a delta,
        NO_OUTPUTS where it has none, and ``message`` holds its bytes.

        continued: returns the payload that goes on behind these ids; None if the request cannot go on.
        packs: the messages may be those of the packed ensemble, where the replica has it; see ``sent_packed``.
        """
        self._payload, self._continued_payload, self._packs = payload, continued, packs
        if self._shadow is not None:
            self._shadow.payload = payload

    @property
    def sent_packed(self) -> bool:
        """Whether the latest message came from the packed ensemble."""
        return self._route is not None and self._route.sent_packed

    @property
    def message(self) -> bytes:
        """The bytes of the latest message, also of one that carried the error which ended the stream; else empty."""
        return self._stream.message if self._stream is not None else b""

    @property
    def deferred_error(self) -> TridentError | None:
        """The error that the latest message carried behind its text, raised by the next step."""
        return self._stream.deferred_error if self._stream is not None else None

    def check(self, now_s: float) -> None:
        """Retry or cuts a request whose target is silent for too long.

        A request without a token from its replica, which makes progress for others, is queued, not silent: only its
        own deadline ends it.
        """
        if not self._waiting_since_s:
            return
        settings, route = self._runtime.settings, self._route
        progress_s = route.progress_s if route is not None else 0.0
        started = self._started and not self._continuation.lost_s  # at this replica
        silent_s = now_s - (self._waiting_since_s if started else max(self._waiting_since_s, progress_s))
        first_s, idle_s = settings.first_token_timeout_s, settings.idle_timeout_s
        if silent_s <= min(UNHEALTHY_S, first_s, idle_s):
            return
        may_retry = not started and self._hang_retries < settings.hang_retries and self._has_alternative()
        timeout_s = min(first_s, idle_s) if may_retry else idle_s
        if silent_s > timeout_s:
            if route is not None and now_s - progress_s > timeout_s:
                route.was_silent(DeadlineExceeded(f"silent for {timeout_s:g} s"))
            if may_retry:
                self._abandon(Unavailable(f"{self._location()[1]} made no progress for {timeout_s:g} s"))
            else:
                self._cut_silent(timeout_s)
        elif may_retry and route is not None and route.is_down():
            self._abandon(Unavailable(f"{route.replica} became unhealthy before it made a token"))

    def _has_alternative(self) -> bool:
        if self.upstream is None and self._route is not None and self._route.has_alternative():
            return True
        return self._runtime.overflow.next_target(self._context, self.request, self._tried) is not None

    def _abandon(self, error: TridentError) -> None:
        """Cancel the attempt, so that the request is retried; an upstream counts ``error`` as its failure."""
        self._hang_retries += 1
        self._waiting_since_s = time.monotonic()
        if self._stream is not None:
            self._stream.abandon(error)

    def _cut_silent(self, timeout_s: float) -> None:
        tried = f"; it was tried {self._attempts} times" if self._attempts > 1 else ""
        error = DeadlineExceeded(f"the engine was silent for {timeout_s:g} s{tried}")
        if self._started and self.upstream is None and self._continuation.allows(self.request) and self._stream:
            self._silence = error
            self._stream.cancel()
            return
        if isinstance(self._stream, UpstreamStream):
            self._cut_error = error
            self._stream.abandon(error)
        else:
            self.cut(error)

    def cut(self, error: TridentError) -> None:
        """End the generation with ``error``, which its reader sees; the engine is freed at once."""
        if self._cut_error is None and not self._closed:
            self._cut_error = error
            self._turn.fail(error)
            if self._stream is not None:
                self._stream.cancel()

    def close(self, error: BaseException | None = None) -> None:
        """End the generation; a second call does nothing.

        error: what the caller saw; None for success, or if the caller left.
        """
        if self._closed:
            return
        self._closed = True
        if self._stream is not None:
            self._stream.cancel()
        if not isinstance(error, TridentError):
            error = None if error is None and self.finish_reason else Cancelled(LEFT)
        self.error = error
        if self.usage is None and self.tokens:  # it was cut: its prompt is as it was counted at admission
            self.usage = Usage(self.prompt_count.likely, self.tokens)
        self._turn.release()
        self._runtime.live.discard(self)
        location = {"server.address": self._location()[1], "trident.attempts": self._attempts}
        end_span(self._replica_span, error, end_ns=self._answered_ns, **location)
        micros = self._on_end(self)
        del self._on_end  # which holds what holds this: it would wait for the garbage collector
        self._record(error, micros)

    def _record(self, error: TridentError | None, micros: int) -> None:
        (pool, replica), attempts = self._location(), self._attempts
        usage, recording = self.usage or Usage(0, 0), self.recording
        tokens: dict[str, Any] = {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens}
        self._runtime.metrics.ended(
            self._context,
            error,
            self.finish_reason,
            began_s=self.began_s,
            first_s=self.first_s,
            pool=pool,
            usage=usage,
            whole=self.tokens == self._first_tokens,
            attempts=attempts,
        )
        if recording is None and self._shadow is None and not request_log.writes(error):
            return
        ttft_s = round(self.first_s - self.began_s, 6) if self.first_s else None
        duration_s = round(time.monotonic() - self.began_s, 6)
        end = {"pool": pool, "finish_reason": self.finish_reason, "ttft_s": ttft_s, "duration_s": duration_s, **tokens}
        if recording is not None:
            recording.error, recording.end = error, end
        if self._shadow is not None:
            self._shadow.ended(error, recording.put if recording is not None else None)
        elif recording is not None:
            recording.put()
        known = {"generation_id": self.id, "replica": replica, "attempts": attempts, **end}
        known |= {"cached_tokens": usage.cached_tokens, **request_log.cost_fields(self._context, micros)}
        request_log.write(self._context, error, self.began_s, **known)

    def _location(self) -> tuple[str, str]:
        if isinstance(self._stream, UpstreamStream):
            return self.target, self._stream.url
        return (self._route.pool, self._route.replica) if self._route else ("", "")

    def _opened(self, spend: Spend | None) -> TokenStream | UpstreamStream:
        upstream, runtime = self.upstream, self._runtime
        relayed = bool(self._payload)
        request_id = self.id if upstream is None and not relayed else self.request.request_id
        changes: dict[str, Any] = {"request_id": request_id, "timeout_s": self.remaining_s}
        if upstream is None or spend is None:
            request = self._continuation.request(self.request, **changes)
            return TokenStream(self._open_route(), request, runtime.replicas.schedule(), relayed)
        request = dataclasses.replace(self.request, **changes)
        self._replica_span = runtime.tracing.child(self._span, "upstream", SpanKind.CLIENT)
        return upstream.stream(request, spend, traceparent(self._replica_span, self._context.carrier))


def _generated(delta: TokenDelta) -> int:
    """Return how many tokens of a response were generated, an echoed prompt's left out."""
    if not delta.token_ids:
        return int(bool(delta.text))  # upstreams send no token ids; a chunk of theirs is about one token
    generated = len(delta.token_ids) - delta.prompt_ids
    # A response that is the first and the last one tells only in its usage how many are the prompt's.
    return generated if delta.usage is None else min(generated, delta.usage.output_tokens)
