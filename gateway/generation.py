"""One generation under way: its deltas as they come, watched, and whichever end it has."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import Span, SpanKind

from clients.connection import new_request_id
from clients.token_stream import TokenStream
from contract.errors import Cancelled, DeadlineExceeded, EngineFailed, TridentError, Unavailable
from contract.generation import FinishReason, GenerationRequest, TokenDelta, Usage
from gateway import observability, replica_spans
from gateway.caller_errors import from_backend
from gateway.engine_priority import engine_priority
from gateway.observability import end_span
from gateway.prompt_tokens import PromptCount
from gateway.replicas import Door
from gateway.upstream import UpstreamStream

if TYPE_CHECKING:
    from gateway.service import Asking, Service


class Generation:
    """An asynchronous iterator of TokenDelta that ends or raises TridentError. ``request`` is what is served.

    target: the overflow target that serves it, "" for the usual replicas. ended: called once, at the end. The KServe
    door reads raw messages instead of iterating, and reports them by ``saw``.
    """

    def __init__(
        self,
        service: Service,
        request: GenerationRequest,
        target: str,
        asking: Asking,
        began_s: float,
        span: Span | None,
        ended: Callable[[Generation], None],
    ) -> None:
        self._service, self._target, self._asking, self._span, self._ended = service, target, asking, span, ended
        self.request = request
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
        self._task: asyncio.Task | None = None
        self._shadow = service.shadow.begin(request) if service.shadow else None
        self._closed = False
        service.opened(self)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> TokenDelta:
        if self._stream is None:
            self._stream = self._opened()
        self.awaits()
        try:
            delta = await self._stream.__anext__()
        except Cancelled:
            if self._cut_error is not None:
                raise self._cut_error from None
            raise
        except TridentError as error:
            raise from_backend(error) from error.__cause__
        except StopAsyncIteration:
            self._waiting_since_s = 0.0
            if self.finish_reason or self._closed:
                raise
            # cut between two deltas, or by the replica
            ended = EngineFailed("the replica ended its answer without saying why")
            raise self._cut_error or from_backend(ended) from None
        self.saw(delta)
        if delta.finish_reason is FinishReason.CANCELLED:
            raise from_backend(Unavailable("the replica ended the generation before it was done"))
        if delta.usage is not None and not self._service.tells_cached_tokens:
            return dataclasses.replace(delta, usage=dataclasses.replace(delta.usage, cached_tokens=0))
        return delta

    def awaits(self) -> None:
        """It is the replica's turn now, and its silence counts."""
        self._waiting_since_s = time.monotonic()

    def door(self, payload: bytes = b"") -> Door:
        """Where the generation may go; its span begins."""
        service, asking = self._service, self._asking
        route_span = service.tracing.child(self._span, "route")
        self._replica_span = service.tracing.child(self._span, "replica", SpanKind.CLIENT)
        handed = observability.traceparent(self._replica_span, asking.carrier)
        pool = service.overflow.pool(self._target) or asking.tenant.pool
        self._door = service.replicas.door(self.request, pool, asking.session, handed, payload)
        self._door.priority = engine_priority(asking.tenant.priority, asking.own_priority)
        if route_span is not None:
            self._door.explain = route_span.is_recording()
            self._door.picked = lambda: self._routed(route_span)
        return self._door

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
        # An upstream names no ids; a chunk of it is a token or a little more.
        tokens = len(delta.token_ids) or bool(delta.text)
        self.tokens += tokens
        if not self.first_s and (tokens or delta.finish_reason):
            self.first_s = time.monotonic()
        if delta.finish_reason:
            self.finish_reason, self.usage = delta.finish_reason.value, delta.usage
            if self._replica_span is not None:
                self._answered_ns = time.time_ns()
                replica_spans.record(self._service.tracing, self._replica_span, delta.timings, self._answered_ns)
        if self._shadow is not None:
            self._shadow.saw(delta)

    def watched_by(self, task: asyncio.Task) -> None:
        """The task that reads raw messages; ``cut`` cancels it."""
        self._task = task

    def sweep(self, now_s: float) -> None:
        patience_s = self._service.settings.idle_timeout_s
        if self._waiting_since_s and now_s - self._waiting_since_s > patience_s:
            silent = DeadlineExceeded(f"the engine was silent for {patience_s:g} s")
            if self._door is not None:
                self._door.was_silent(silent)
            self.cut(silent)

    def cut(self, error: TridentError) -> None:
        """Ends it with ``error``, for its reader to see; the engine is freed at once."""
        if self._cut_error is None and not self._closed:
            self._cut_error = error
            if self._stream is not None:
                self._stream.cancel()
            elif self._task is not None:
                self._task.cancel()

    @property
    def cut_error(self) -> TridentError | None:
        return self._cut_error

    def close(self, error: BaseException | None = None, attempts: int = 0) -> None:
        """The end, whichever: ``error`` is what the caller saw, or Cancelled if the caller went. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._stream is not None:
            attempts = self._stream.attempts
            self._stream.cancel()
        if error is None and not self.finish_reason:
            error = Cancelled("the caller went away")
        if error is not None and not isinstance(error, TridentError):
            error = Cancelled("the caller went away")
        self.error, self.usage = error, self.usage or self._usage_so_far()
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
            return self._target, self._stream.url
        return (self._door.pool, self._door.replica) if self._door else ("", "")

    def _usage_so_far(self) -> Usage | None:
        """Of a generation that was cut: what it produced, and its prompt as counted or estimated when it was admitted.
        None if nothing was produced."""
        if not self.tokens:
            return None
        return Usage(self.prompt_count.likely if self.prompt_count else 0, self.tokens)

    def _opened(self) -> TokenStream | UpstreamStream:
        upstream = self._service.overflow.upstream(self._target)
        if upstream is None:
            asked = dataclasses.replace(self.request, request_id=self.id)
            return TokenStream(self.door(), asked, self._service.replicas.schedule())
        self._replica_span = self._service.tracing.child(self._span, "upstream", SpanKind.CLIENT)
        return upstream.stream(self.request, observability.traceparent(self._replica_span, self._asking.carrier))
