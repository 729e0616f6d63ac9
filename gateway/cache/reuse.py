"""Serve a response without a new generation: to a retry, from a cache, or by joining an equal request under way.

Looked up in this order: Idempotency-Key → exact cache → semantic cache → coalescing → engine. Nothing is shared
between tenants. Caches and coalescing serve single deterministic choices; ``cache-control: no-store`` (or
``x-trident-cache: off``) bypasses them, ``no-cache`` generates anew and stores. A degraded response, or one of an
overflow target, is never stored. A reused response is charged one request and no tokens.

The response names its origin: ``x-trident-cache: hit | semantic | coalesced | replayed | miss``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from contract.background import Background
from contract.errors import DeadlineExceeded, InvalidArgument, Unavailable
from contract.generation import GenerationRequest, TokenDelta
from gateway.admission.fair_admission import DEGRADED_HEADER
from gateway.admission.shared_state import Away
from gateway.cache.coalescing import HEADER, RESUME_HEADER, Coalescer, Idempotency, SharedReader, check_kept
from gateway.cache.records import (
    AWAY_S,
    HEAD,
    POLL_S,
    Head,
    Record,
    Records,
    SharedAnswers,
    renumbered,
    seeded,
    unfinished,
    unpaid,
)
from gateway.cache.response_cache import HEADER as CACHE_HEADER
from gateway.cache.response_cache import Answer, CacheControl, ResponseCache
from gateway.cache.reused_response import ReusedResponse
from gateway.cache.semantic_cache import SemanticCache
from gateway.choices import ChoiceDelta, ChoiceDeltas, Choices
from gateway.config.policy import ReuseRules
from gateway.continuation import HEADER as CONTINUED_HEADER
from gateway.request_context import RequestContext
from gateway.request_key import deterministic, request_key
from gateway.service import Service

NO_TIMEOUT_S = 86_400.0
SEVERAL = "several"  # engines, in place of the hash of one


@dataclass(eq=False)
class ResponseDeltas:
    """One response, generated or reused. Read ``deltas``, then call ``close``, whatever happens.

    deltas: of all choices, in order of arrival. close: with the error that the client saw, or None.
    request_id, created_s: identify the response; a retry gets those of the first attempt.
    first_event: number of the first delta, where the client can resume after an event; else None.
    replayed: deltas before ``first_event``, which the client has received.
    choices: of the response, if it is generated for this reader.
    """

    deltas: ChoiceDeltas
    headers: Mapping[str, str]
    close: Callable[[BaseException | None], None]
    request_id: str
    created_s: int
    first_event: int | None = None
    replayed: tuple[ChoiceDelta, ...] = ()
    choices: Choices | None = None


class ResponseReuse:
    """Open responses to requests, reusing what is allowed. semantic: None without an embeddings endpoint."""

    def __init__(
        self, service: Service, rules: ReuseRules, clock: Callable[[], float], semantic: SemanticCache | None = None
    ) -> None:
        self._service, self._rules, self._semantic = service, rules, semantic
        self._coalescer = Coalescer() if rules.coalesce else None
        self._cache = ResponseCache(rules.cache_bytes, rules.cache_ttl_s, clock) if rules.cache_bytes else None
        self._idempotency = Idempotency(
            clock, ttl_s=rules.idempotency_ttl_s, linger_s=rules.idempotency_linger_s, max_bytes=rules.idempotency_bytes
        )
        state, self._records = service.shared_state, None
        if state is not None and rules.idempotency_bytes:
            self._records = Records(state, rules.idempotency_ttl_s, lambda: service.draining)
        self._answers = SharedAnswers(state, rules.cache_ttl_s) if state is not None and rules.cache_bytes else None
        self._storing = Background()

    async def open(self, requests: Sequence[GenerationRequest], context: RequestContext) -> ResponseDeltas:
        """Return the response to one request of one or several choices. Raises: what ``Service.choices`` raises, and
        InvalidArgument for headers that cannot be honoured."""
        control, headers = CacheControl.from_headers(context.carrier), context.carrier
        key, last_event = headers.get(HEADER.lower()), headers.get(RESUME_HEADER.lower())
        if key is None:
            if last_event is not None:
                raise InvalidArgument(RESUME_HEADER, f"must be sent with the {HEADER} of the stream to resume")
            return await self._cached_or_generated(requests, context, control)
        if not control.enabled or not self._rules.idempotency_bytes:
            problem = "needs the response to be stored; cache-control, x-trident-cache or the gateway's rules forbid it"
            raise InvalidArgument(HEADER, problem)
        if last_event is not None and not requests[0].stream:
            raise InvalidArgument(RESUME_HEADER, "must be sent with stream=true; a complete response has no events")
        tenant, start = context.tenant.name, _first_event(last_event)
        kind = f"{context.operation} {context.model.name}"
        digest = hashlib.sha256("".join(request_key(request, tenant, kind) for request in requests).encode())
        lasting = self._with_longest_timeout(requests)

        async def begin() -> ResponseDeltas:
            if self._records is None:
                return await self._cached_or_generated(lasting, context, control)
            record = self._records.record(tenant, key, digest.hexdigest())
            return await _Recorded(self, record, lasting, context, control, start).open()

        generation = SharedGeneration(begin)
        recorded = self._records is not None
        reader = self._idempotency.follow(tenant, key, digest.hexdigest(), lambda: generation, start, recorded)
        response = await self._follow(reader, generation, requests, context, "replayed")
        if start:
            try:
                await reader.stream.item(start - 1, reader)
                check_kept(reader.stream, start)
            except BaseException as exc:
                response.close(exc)
                if isinstance(exc, StopAsyncIteration):
                    problem = f"must be at most {len(reader.stream) - 1}, this stream's last event, got {start - 1}"
                    raise InvalidArgument(RESUME_HEADER, problem) from None
                raise
        return dataclasses.replace(response, first_event=start, replayed=reader.stream.deltas()[:start])

    async def aclose(self) -> None:
        await self._storing.cancel()
        if self._records is not None:
            await self._records.aclose()
        if self._semantic is not None:
            await self._semantic.aclose()

    async def _cached_or_generated(
        self, requests: Sequence[GenerationRequest], context: RequestContext, control: CacheControl
    ) -> ResponseDeltas:
        """Serve a cache hit, join an equal request under way, or generate."""
        request, tenant = requests[0], context.tenant.name
        if len(requests) > 1 or not control.enabled or not deterministic(request):
            return await self._generate(requests, context, "bypass")
        engine, no_cache = self._engine(context), control.max_age_s <= 0
        key = request_key(request, tenant, engine or context.model.name)
        if engine and not no_cache:
            if self._cache is not None and (answer := self._cache.get(key, control.max_age_s)) is not None:
                return await self._serve_hit(answer, requests, context, {CACHE_HEADER: "hit"})
            if self._answers is not None and (answer := await self._answers.get(key, control.max_age_s)) is not None:
                return await self._serve_hit(answer, requests, context, {CACHE_HEADER: "hit"})
            if self._semantic is not None:
                hit = await self._semantic.get(request, tenant, engine, control)
                if hit is not None:
                    return await self._serve_hit(hit.answer, requests, context, hit.headers)

        def store(answer: Answer) -> None:
            if not engine or engine != self._engine(context):
                return  # during a roll-out the response may come from the other engine
            if self._cache is not None:
                self._cache.put(key, answer)
            if self._answers is not None:
                self._storing.start(self._answers.put(key, answer))
            if self._semantic is not None:
                self._storing.start(self._semantic.put(request, tenant, engine, answer, control))

        if self._coalescer is None or no_cache:
            return await self._generate(requests, context, "miss", store)
        generation = SharedGeneration(
            lambda: self._generate(self._with_longest_timeout(requests), context, "miss", store)
        )
        # A stream waits, is cut and is refused as its key and its class are: only their own requests may join it.
        joined = f"{key} {context.tenant.request_class} {context.key}"
        reader = self._coalescer.follow(joined, lambda: generation)
        return await self._follow(reader, generation, requests, context, "coalesced")

    async def _generate(
        self,
        requests: Sequence[GenerationRequest],
        context: RequestContext,
        result: str,
        store: Callable[[Answer], None] | None = None,
    ) -> ResponseDeltas:
        """Generate on an engine. store: called with the complete response, unless it was degraded."""
        choices = await self._service.choices(requests, context)
        self._count(result)
        deltas = aiter(choices)
        if store is not None and DEGRADED_HEADER not in choices.headers:
            deltas = _stored_at_end(deltas, lambda answer: None if choices.made_elsewhere else store(answer))
        if result == "miss":
            choices.headers[CACHE_HEADER] = result
        ids = context.request_id, int(time.time())
        return ResponseDeltas(deltas, choices.headers, choices.close, *ids, choices=choices)

    async def _serve_hit(
        self, answer: Answer, requests: Sequence[GenerationRequest], context: RequestContext, headers: Mapping[str, str]
    ) -> ResponseDeltas:
        """Serve a cached response."""
        reused = ReusedResponse(self._service, context, requests, headers[CACHE_HEADER])
        budget_headers = await reused.admit()
        self._count(headers[CACHE_HEADER])
        deltas = reused.read(_replay(answer))
        return ResponseDeltas(deltas, {**budget_headers, **headers}, reused.close, context.request_id, int(time.time()))

    async def _follow(
        self,
        reader: SharedReader,
        generation: SharedGeneration,
        requests: Sequence[GenerationRequest],
        context: RequestContext,
        result: str,
    ) -> ResponseDeltas:
        """Read a shared stream: ``generation`` if this is its first reader, else the one under way or finished."""
        source = reader.stream.source
        assert isinstance(source, SharedGeneration)
        first, timeout_s = source is generation, requests[0].timeout_s
        late = DeadlineExceeded(f"the response was not complete within {timeout_s or NO_TIMEOUT_S:g} s")
        timer = asyncio.get_running_loop().call_later(timeout_s or NO_TIMEOUT_S, reader.fail, late)
        deltas: ChoiceDeltas = reader
        reused: ReusedResponse | None = None
        budget_headers: Mapping[str, str] = {}
        try:
            if not first:  # the first reader's permit is settled by the generation
                joining = ReusedResponse(self._service, context, requests, result)
                budget_headers = await joining.admit()
                reused, deltas = joining, joining.read(reader)
            await asyncio.wait_for(source.admitted.wait(), timeout_s)
        except BaseException as exc:
            timer.cancel()
            reader.leave()
            if reused is not None:
                reused.close(exc)
            if isinstance(exc, asyncio.TimeoutError):
                raise late from None
            raise
        original = source.response
        headers: Mapping[str, str] = original.headers if original else {}
        if not first:
            self._count(result)
            headers = _JoinedHeaders({**budget_headers, CACHE_HEADER: result}, headers)

        def close(error: BaseException | None) -> None:
            timer.cancel()
            reader.leave()
            if reused is not None:
                reused.close(error)

        if original and result == "replayed":
            return ResponseDeltas(deltas, headers, close, original.request_id, original.created_s)
        choices = original.choices if original and first else None
        return ResponseDeltas(deltas, headers, close, context.request_id, int(time.time()), choices=choices)

    def _with_longest_timeout(self, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        """Use the gateway's timeout: a shared generation must outlive its first reader."""
        timeout_s = self._service.settings.request_timeout_s
        return [dataclasses.replace(request, timeout_s=timeout_s) for request in requests]

    def _engine(self, context: RequestContext, several: str = "") -> str:
        """Return the engine's hash, or ``several``, and the model's name; "" if the hash is unknown."""
        engine = self._rules.engine or self._service.replicas.engine(context.tenant.pool, several)
        return f"{engine} {context.model.name}" if engine else ""  # an adapter has the engine of its base

    def _count(self, result: str) -> None:
        self._service.metrics.reuse.labels(result).inc()


class _Recorded:
    """Opens an idempotent response whose stream is recorded in Redis: by generating it, by following the gateway that
    does, or by going on where that one ended. start: number of the first delta that the client has not received."""

    def __init__(
        self,
        reuse: ResponseReuse,
        record: Record,
        requests: Sequence[GenerationRequest],
        context: RequestContext,
        control: CacheControl,
        start: int,
    ) -> None:
        self._reuse, self._record, self._context, self._control = reuse, record, context, control
        self._start = start
        self._requests = [seeded(request, record, choice) for choice, request in enumerate(requests)]

    async def open(self) -> ResponseDeltas:
        """Raises: what ResponseReuse.open does."""
        record = self._record
        try:
            while (state := await record.claim()) == "kept":
                head = await self._head()
                if head is not None:
                    return await self._followed(head)
        except Away:
            if self._start:
                raise
            return await self._generated()
        if state == "different":
            raise InvalidArgument(HEADER, "must not be the key of an earlier, different request")
        try:
            if state == "lost" and (head := await self._head()) is not None:
                return await self._continued(head, self._start)
            if self._start:
                await record.delete()
                raise InvalidArgument(RESUME_HEADER, "must be an event of a stream that is still kept")
            return await self._generated()
        except BaseException:
            await record.release()
            raise

    async def _head(self) -> Head | None:
        """Wait until the stream was admitted; return None if it is gone or was never admitted."""
        while True:
            found = await self._record.read()
            if found is None or found[0] is not None or not found[2] or self._record.owned:
                return found[0] if found else None
            await asyncio.sleep(POLL_S)

    async def _generated(self) -> ResponseDeltas:
        try:
            response = await self._reuse._cached_or_generated(self._requests, self._context, self._control)
            engine = self._reuse._engine(self._context, SEVERAL)
            head = Head(dict(response.headers), response.request_id, response.created_s, engine)
            return await self._owned(response, head, self._record.generate(response.deltas))
        except BaseException:
            await self._record.delete()
            raise

    async def _followed(self, head: Head) -> ResponseDeltas:
        """Read the stream of another gateway."""
        reused = ReusedResponse(self._reuse._service, self._context, self._requests, "replayed")
        budget_headers = await reused.admit()
        self._reuse._count("replayed")
        headers = {**head.headers, **budget_headers, CACHE_HEADER: "replayed"}
        return ResponseDeltas(reused.read(self._tail(head)), headers, reused.close, head.request_id, head.created_s)

    async def _tail(self, head: Head) -> AsyncGenerator[ChoiceDelta, None]:
        """Yield the stream as the other gateway writes it, and go on if that one ends."""
        record, given, until_s = self._record, 0, time.monotonic() + AWAY_S
        response, error = None, None
        try:
            while not record.owned:
                self._reuse._service.live.check_not_cut_off()
                try:
                    found = await record.read()
                    if found is not None and not any(found[1:]):
                        await record.claim()
                    until_s = time.monotonic() + AWAY_S
                except Away:
                    if time.monotonic() > until_s:
                        raise
                    found = head, False, True
                for item in record.items[given:]:
                    yield item
                given = len(record.items)
                if found is None:
                    raise Unavailable("the request failed at the gateway that ran it; send it again", 1.0)
                if found[1]:
                    return
                await asyncio.sleep(POLL_S)
            response = await self._continued(head, given)
            async for item in response.deltas:
                given -= 1
                if given < 0:
                    yield item
        except BaseException as exc:
            error = exc
            await record.release()
            raise
        finally:
            if response is not None:
                await response.deltas.aclose()
                response.close(error)

    async def _continued(self, head: Head, given: int) -> ResponseDeltas:
        """Generate the rest of a stream whose gateway ended, behind what is recorded. Where that cannot be exact, all
        is generated anew, or Unavailable raised if the client has a part: ``given`` deltas."""
        reuse, record, service = self._reuse, self._record, self._reuse._service
        found = await record.read()
        head = found[0] or head if found is not None else head  # a gateway that released it has changed it since
        left = unfinished(record.items, self._requests, service.settings.continuations)
        engine = reuse._engine(self._context, SEVERAL)
        if left is None or head.engine not in ("", engine) or engine.startswith(SEVERAL):
            await record.delete()
            if given:
                raise Unavailable("the gateway that ran this stream ended, and no other can go on with it exactly", 1.0)
            self._record = Record(record.records, record.keys, record.request)
            await self._record.claim()
            await service.charge_for_other(head.reservation, None, self._context)
            return await self._generated()
        owed, paid = unpaid(record, self._requests, left)
        # Before admission: the reservation of a gateway that died would be in the way of its own stream.
        settled = HEAD.dump_json(dataclasses.replace(head, reservation=None)).decode()
        await record.write("head", settled, "charged", str(len(record.items)))
        await service.charge_for_other(head.reservation, owed, self._context)
        context = dataclasses.replace(self._context, paid=paid)
        if left:
            response = await reuse._generate(list(left.values()), context, "bypass")
        else:
            response = ResponseDeltas(_replay(()), head.headers, lambda error: None, "", 0)
        rest = record.generate(renumbered(response.deltas, list(left)))
        headers = {**response.headers, CONTINUED_HEADER: "1"}
        whole = dataclasses.replace(response, headers=headers, request_id=head.request_id, created_s=head.created_s)
        return await self._owned(whole, head, _behind(record.items, rest))

    async def _owned(self, response: ResponseDeltas, head: Head, deltas: ChoiceDeltas) -> ResponseDeltas:
        """Return the response, with ``deltas``, when its head is written, with the reservation of its budget."""
        reservation = response.choices.reservation if response.choices is not None else None
        try:
            await self._record.write_head(dataclasses.replace(head, reservation=reservation))
        except BaseException as exc:
            response.close(exc)
            await response.deltas.aclose()
            raise

        def close(error: BaseException | None) -> None:
            self._record.leave()  # deltas that were never read have not done so
            if self._record.lost and response.choices is not None:
                response.choices.charged_elsewhere = True
            response.close(error)

        return dataclasses.replace(response, deltas=deltas, close=close)


async def _behind(items: Iterable[ChoiceDelta], rest: ChoiceDeltas) -> AsyncGenerator[ChoiceDelta, None]:
    """Yield the items, then the rest."""
    async with aclosing(rest):
        for item in items:
            yield item
        async for item in rest:
            yield item


class _JoinedHeaders(Mapping[str, str]):
    """The headers of a joined response: its own, and the original's degradation, which may change until its first
    token."""

    def __init__(self, own: Mapping[str, str], original: Mapping[str, str]) -> None:
        self._own, self._original = own, original

    def _current(self) -> dict[str, str]:
        return {name: value for name, value in self._original.items() if name == DEGRADED_HEADER} | dict(self._own)

    def __getitem__(self, name: str) -> str:
        return self._current()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._current())

    def __len__(self) -> int:
        return len(self._current())


class SharedGeneration:
    """The source of a SharedStream: a response that is admitted and generated once for all its readers.

    admitted: set once it is admitted or rejected; a rejection is raised to the readers. response: None until then.
    """

    def __init__(self, open_: Callable[[], Awaitable[ResponseDeltas]]) -> None:
        self._open = open_
        self.admitted = asyncio.Event()
        self.response: ResponseDeltas | None = None
        self._deltas: AsyncGenerator[ChoiceDelta, None] | None = None

    def __aiter__(self) -> AsyncGenerator[ChoiceDelta, None]:
        self._deltas = self._run()
        return self._deltas

    async def aclose(self) -> None:
        if self._deltas is not None:
            await self._deltas.aclose()

    async def _run(self) -> AsyncGenerator[ChoiceDelta, None]:
        try:
            self.response = response = await self._open()
        finally:
            self.admitted.set()
        error: BaseException | None = None
        try:
            async for delta in response.deltas:
                yield delta
        except BaseException as exc:
            error = exc
            raise
        finally:
            response.close(error)
            await response.deltas.aclose()


async def _stored_at_end(deltas: ChoiceDeltas, store: Callable[[Answer], None]) -> AsyncGenerator[ChoiceDelta, None]:
    """Pass on the deltas of one choice; store them once they are complete."""
    seen: list[TokenDelta] = []
    async with aclosing(deltas):
        async for item in deltas:
            seen.append(item.delta)
            yield item
    store(tuple(seen))


async def _replay(answer: Iterable[TokenDelta]) -> AsyncGenerator[ChoiceDelta, None]:
    for delta in answer:
        yield ChoiceDelta(0, delta)


def _first_event(last_event: str | None) -> int:
    """Return the number of the first delta to send to a client that has received ``last_event``."""
    if last_event is None:
        return 0
    if not (last_event.isascii() and last_event.isdecimal() and len(last_event) < 10):
        raise InvalidArgument(RESUME_HEADER, f"must be the id of an event of this stream, got {last_event!r:.50}")
    return int(last_event) + 1
