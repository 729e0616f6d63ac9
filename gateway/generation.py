"""One generation under way: its deltas as they come, watched, and whichever end it has."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import Span, SpanKind

from clients.wire.connection import new_request_id
from clients.wire.token_stream import NO_OUTPUTS, TokenStream
from contract.errors import Cancelled, DeadlineExceeded, EngineFailed, Overloaded, TridentError, Unavailable
from contract.generation import FinishReason, GenerationRequest, TokenDelta, Usage
from gateway.admission.degradation import overflow_note
from gateway.admission.engine_priority import engine_priority
from gateway.admission.permit import Turn
from gateway.admission.prompt_tokens import PromptCount
from gateway.api.caller_errors import from_backend
from gateway.routing.replicas import Door
from gateway.routing.upstream import Upstream, UpstreamStream
from gateway.telemetry import observability, replica_spans
from gateway.telemetry.observability import end_span

if TYPE_CHECKING:
    from gateway.admission.permit import Permit
    from gateway.request_context import RequestContext
    from gateway.service import Service

UNHEALTHY_S = 1.0  # a replica that was taken out and has made nothing for so long keeps no request without a token


class Generation:
    """An asynchronous iterator of TokenDelta that ends or raises TridentError. ``request`` is what is served.

    target: the overflow target that serves it, "" for the usual replicas. turn: its slot, which it waits for before it
    is sent and releases at its end. ended: called once, at the end. After ``relay`` it yields a delta for each message
    of the replica, NO_OUTPUTS for one without outputs, and ``message`` holds its bytes.

    Before its first token a request may change places: to another replica when its own makes nothing or is taken for
    unhealthy, at most ``hang_retries`` times, and to the next overflow target or back to the replicas when a place
    fails, each place once (docs/decisions/0018).
    """

    def __init__(
        self,
        service: Service,
        request: GenerationRequest,
        permit: Permit,
        turn: Turn,
        asking: RequestContext,
        began_s: float,
        span: Span | None,
        ended: Callable[[Generation], None],
    ) -> None:
        self._service, self._permit, self._asking, self._span, self._ended = service, permit, asking, span, ended
        self._turn = turn
        self.request = request
        self.target = permit.target
        self._tried = {permit.target}  # places, "" for the usual replicas
        self._hang_retries = 0
        self._earlier_attempts = 0  # at places before this one
        self._deadline_s = math.inf
        self._started = False  # anything arrived: from then on nothing is tried elsewhere
        self.id = new_request_id()
        self.began_s = began_s
        self.first_s = 0.0
        self.usage: Usage | None = None
        self.finish_reason = ""
        self.tokens = 0
        self.error: TridentError | None = None
        self.prompt_count: PromptCount | None = None
        self._waiting_since_s = 0.0
        self._cut_error: TridentError | None = None
        self._replica_span: Span | None = None
        self._answered_ns: int | None = None  # when the replica's last response came, wall clock
        self._door: Door | None = None
        self._stream: TokenStream | UpstreamStream | None = None
        self._payload = b""  # the ModelInferRequest to send as it is
        self._shadow = service.shadow.begin(request) if service.shadow else None
        self._closed = False
        service.opened(self)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> TokenDelta:
        while True:
            try:
                return await self._next()
            except TridentError as error:
                if not await self._goes_on(error):
                    raise
                self._stream = None

    async def _next(self) -> TokenDelta:
        if self._stream is None:
            self._begin_deadline()
            await self._turn.begin()
            if self._cut_error is not None:
                raise self._cut_error
            self._stream = self._opened()
        self._awaits()
        try:
            delta = await self._stream.__anext__()
        except Cancelled:
            if self._cut_error is not None:
                raise self._cut_error from None
            raise
        except TridentError as error:
            if error is self._cut_error:
                raise
            raise self._failed(error, self._stream.attempts) from error.__cause__
        except StopAsyncIteration:
            self._waiting_since_s = 0.0
            if self.finish_reason or self._closed:
                raise
            # cut between two deltas, or by the replica
            ended = EngineFailed("the replica ended its answer without saying why")
            raise self._cut_error or from_backend(ended) from None
        if self._payload:
            self._saw_message(delta)
            return delta
        self.saw(delta)
        if delta.finish_reason is FinishReason.CANCELLED:
            raise from_backend(Unavailable("the replica ended the generation before it was done"))
        if delta.usage is not None and not self._service.tells_cached_tokens:
            return dataclasses.replace(delta, usage=dataclasses.replace(delta.usage, cached_tokens=0))
        return delta

    def _awaits(self) -> None:
        """It is the replica's turn now, and its silence counts."""
        self._waiting_since_s = time.monotonic()

    def _failed(self, error: TridentError, attempts: int) -> TridentError:
        """``error`` of the place under way after ``attempts`` calls there, as the caller may be told it."""
        self._waiting_since_s = 0.0
        error = from_backend(error)
        error.attempts = self._earlier_attempts + attempts
        return error

    async def _goes_on(self, error: TridentError) -> bool:
        """Whether the request is to be tried at another place after ``error``, which is then ``target``, with its slot
        at the replicas where it needs one. Raises the refusal of the queue."""
        going_on = (Unavailable, Overloaded, EngineFailed) if self.upstream is not None else (Unavailable, Overloaded)
        left_s = self._deadline_s - time.monotonic()
        if self._started or self._closed or error is self._cut_error or not isinstance(error, going_on) or left_s <= 0:
            return False
        service, asking = self._service, self._asking
        place = service.next_place(asking, self.request, self._tried)
        if place is None:
            if isinstance(error, Overloaded | Unavailable):
                error.retry_after_s = service.retry_after_s(asking, self.request, error)
            return False
        try:
            await self._turn.go(place, left_s)
        except TridentError as refused:
            refused.__cause__ = error
            raise
        if self._closed or self._cut_error is not None:
            self._turn.release()
            raise self._cut_error or Cancelled("the caller went away")
        self._earlier_attempts = error.attempts
        self._tried.add(place)
        self._service.moved(asking, self.id, self.target or "replicas", place or "replicas", error)
        end_span(self._replica_span, error)
        self._replica_span = self._door = None
        self.target = place
        if place:
            self._permit.headers["x-trident-degraded"] = overflow_note(place)
        elif self._permit.headers.get("x-trident-degraded", "").startswith("overflow="):
            del self._permit.headers["x-trident-degraded"]
        return True

    @property
    def upstream(self) -> Upstream | None:
        """The upstream that serves the request, if one does."""
        return self._service.overflow.upstream(self.target)

    @property
    def left_s(self) -> float | None:
        """Seconds until the request's own deadline, which begins when it first waits for its slot and goes on
        elsewhere."""
        self._begin_deadline()
        return max(0.001, self._deadline_s - time.monotonic())

    def _begin_deadline(self) -> None:
        if self._deadline_s == math.inf:
            most_s = self._service.settings.request_timeout_s
            self._deadline_s = time.monotonic() + (self.request.timeout_s or most_s)

    def door(self, payload: bytes = b"") -> Door:
        """Where the generation may go; its span begins."""
        service, asking = self._service, self._asking
        route_span = service.tracing.child(self._span, "route")
        self._replica_span = service.tracing.child(self._span, "replica", SpanKind.CLIENT)
        handed = observability.traceparent(self._replica_span, asking.carrier)
        self._door = service.replicas.door(self.request, self._turn.pool, asking.session, handed, payload)
        self._door.priority = engine_priority(asking.tenant.priority, asking.own_priority)
        if self._turn.may_move:
            self._door.move = self._moved
        if route_span is not None:
            self._door.explain = route_span.is_recording()
            self._door.picked = lambda: self._routed(route_span)
        return self._door

    async def _moved(self) -> str:
        """Waits for a slot in another pool, which is no silence of a replica, and names the pool."""
        self._waiting_since_s = 0.0
        pool = await self._turn.move()
        self._awaits()
        return pool

    def _routed(self, span: Span) -> None:
        """A replica is picked: the first ends the span, later ones are attempts after a failure."""
        place: dict[str, Any] = {"server.address": self._door.replica, "trident.pool": self._door.pool}
        if self._door.explanation is not None:
            place |= self._door.explanation.attributes()
        if span.is_recording():
            end_span(span, **place)
        else:
            self._replica_span.add_event("failover", place)

    def saw(self, delta: TokenDelta) -> None:
        """Something arrived from the replica."""
        self._waiting_since_s = 0.0
        self._started = True
        if self._door is not None:
            self._door.made_tokens()
        # An upstream names no ids; a chunk of it is a token or a little more.
        tokens = len(delta.token_ids) or bool(delta.text)
        self.tokens += tokens
        if not self.first_s and (tokens or delta.finish_reason):
            self.first_s = time.monotonic()
        if delta.finish_reason:
            self.finish_reason, self.usage = delta.finish_reason.value, delta.usage
            self._turn.release()  # now: another choice of the same caller may be waiting for it
            if self._replica_span is not None:
                self._answered_ns = time.time_ns()
                replica_spans.record(self._service.tracing, self._replica_span, delta.timings, self._answered_ns)
        if self._shadow is not None:
            self._shadow.saw(delta)

    def relay(self, payload: bytes) -> None:
        """Send this serialised ModelInferRequest in place of one made from ``request``, and keep each message."""
        self._payload = payload

    @property
    def message(self) -> bytes:
        """The bytes of the latest message, also of one that carried the error which ended the stream; else empty."""
        return self._stream.message if isinstance(self._stream, TokenStream) else b""

    @property
    def deferred_error(self) -> TridentError | None:
        """The error that the latest message carried behind its text, raised by the next step."""
        return self._stream.deferred_error if isinstance(self._stream, TokenStream) else None

    def _saw_message(self, delta: TokenDelta) -> None:
        if delta is not NO_OUTPUTS:
            self.saw(delta)
        if not self.finish_reason and self._stream.whole:
            self.saw(TokenDelta(finish_reason=FinishReason.STOP))

    def check(self, now_s: float) -> None:
        """Ends what has waited for too long, or has it tried elsewhere. Time that a request without a token spends at
        a replica which works for others is no silence: it is queueing, and ends with the request's own deadline."""
        if not self._waiting_since_s:
            return
        settings, door = self._service.settings, self._door
        progress_s = door.progress_s if door is not None else 0.0
        silent_s = now_s - (self._waiting_since_s if self._started else max(self._waiting_since_s, progress_s))
        first_s, idle_s = settings.first_token_timeout_s, settings.idle_timeout_s
        if silent_s <= min(UNHEALTHY_S, first_s, idle_s):
            return
        moves = not self._started and self._hang_retries < settings.hang_retries and self._has_elsewhere()
        patience_s = min(first_s, idle_s) if moves else idle_s
        if silent_s > patience_s:
            silent = DeadlineExceeded(f"silent for {patience_s:g} s")
            if door is not None and now_s - progress_s > patience_s:
                door.was_silent(silent)
            if moves:
                self._abandon(Unavailable(f"{self._place()[1]} made nothing for {patience_s:g} s"))
            else:
                self._cut_silent(patience_s)
        elif moves and door is not None and door.is_down():
            self._abandon(Unavailable(f"{door.replica} was taken out before it made a token"))

    def _has_elsewhere(self) -> bool:
        if self.upstream is None and self._door is not None and self._door.has_alternative():
            return True
        return self._service.next_place(self._asking, self.request, self._tried) is not None

    def _abandon(self, error: TridentError) -> None:
        """Has the request tried elsewhere. An upstream's silence is booked there with it."""
        self._hang_retries += 1
        self._awaits()
        if self._stream is not None:
            self._stream.abandon(error)

    def _cut_silent(self, patience_s: float) -> None:
        attempts = self._earlier_attempts + (self._stream.attempts if self._stream is not None else 0)
        tried = f"; it was tried {attempts} times" if attempts > 1 else ""
        error = DeadlineExceeded(f"the engine was silent for {patience_s:g} s{tried}")
        if isinstance(self._stream, UpstreamStream):
            self._cut_error = error
            self._stream.abandon(error)
        else:
            self.cut(error)

    def cut(self, error: TridentError) -> None:
        """Ends it with ``error``, for its reader to see; the engine is freed at once."""
        if self._cut_error is None and not self._closed:
            self._cut_error = error
            self._turn.fail(error)
            if self._stream is not None:
                self._stream.cancel()

    def close(self, error: BaseException | None = None) -> None:
        """The end, whichever: ``error`` is what the caller saw, or Cancelled if the caller went. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        attempts = self._earlier_attempts
        if self._stream is not None:
            attempts += self._stream.attempts
            self._stream.cancel()
        if error is None and not self.finish_reason:
            error = Cancelled("the caller went away")
        if error is not None and not isinstance(error, TridentError):
            error = Cancelled("the caller went away")
        self.error, self.usage = error, self.usage or self._usage_so_far()
        self._turn.release()
        self._service.closed(self)
        try:
            self._tell(error, attempts)
        finally:
            self._ended(self)  # what was reserved comes back, whatever becomes of what is said

    def _tell(self, error: TridentError | None, attempts: int) -> None:
        """Metrics, spans and the log hear of the end."""
        pool, replica = self._place()
        self._service.metrics.ended(self, self._asking, pool, attempts)
        if self._shadow is not None:
            self._shadow.ended(error)
        place = {"server.address": replica, "trident.attempts": attempts}
        end_span(self._replica_span, error, end_ns=self._answered_ns, **place)
        usage = self.usage
        self._service.log(
            self._asking,
            error,
            self.began_s,
            generation_id=self.id,
            replica=replica,
            pool=pool,
            attempts=attempts,
            finish_reason=self.finish_reason,
            ttft_s=round(self.first_s - self.began_s, 6) if self.first_s else None,
            input_tokens=usage.input_tokens if usage else 0,
            output_tokens=usage.output_tokens if usage else 0,
        )

    def _place(self) -> tuple[str, str]:
        """(pool or target, replica or upstream), empty if nothing was asked."""
        if isinstance(self._stream, UpstreamStream):
            return self.target, self._stream.url
        return (self._door.pool, self._door.replica) if self._door else ("", "")

    def _usage_so_far(self) -> Usage | None:
        """Of a generation that was cut: what it produced, and its prompt as counted or estimated when it was admitted.
        None if nothing was produced."""
        if not self.tokens:
            return None
        return Usage(self.prompt_count.likely if self.prompt_count else 0, self.tokens)

    def _opened(self) -> TokenStream | UpstreamStream:
        upstream, left_s = self.upstream, self.left_s
        if upstream is None:
            request_id = self.request.request_id if self._payload else self.id
            asked = dataclasses.replace(self.request, request_id=request_id, timeout_s=left_s)
            return TokenStream(self.door(self._payload), asked, self._service.replicas.schedule(), bool(self._payload))
        self._replica_span = self._service.tracing.child(self._span, "upstream", SpanKind.CLIENT)
        asked = dataclasses.replace(self.request, timeout_s=left_s)
        return upstream.stream(asked, observability.traceparent(self._replica_span, self._asking.carrier))
