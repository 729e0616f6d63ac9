"""Answers that need no engine, or not one of their own: a retry's, one given before, one being made just now.

In this order: Idempotency-Key → exact cache → semantic cache → coalescing → engine. Only within a tenant. The cache and
coalescing are for single deterministic choices; ``cache-control: no-store`` (or ``x-trident-cache: off``) keeps a
request out of them altogether, ``no-cache`` has it made anew and kept. An answer that was cut short or sent elsewhere
under load is never kept. What it costs: a request of the budget and a place in the caps, no tokens.

The response says where it came from: ``x-trident-cache: hit | semantic | coalesced | replayed | miss``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from contract.errors import DeadlineExceeded, InvalidArgument
from contract.generation import GenerationRequest, TokenDelta
from gateway.cache.cache_control import HEADER as SAID
from gateway.cache.cache_control import CacheControl
from gateway.cache.coalescing import Coalescer, SharedReader, size_bytes
from gateway.cache.idempotency import HEADER, RESUME_HEADER, Idempotency
from gateway.cache.request_key import deterministic, request_key
from gateway.cache.response_cache import Answer, ResponseCache
from gateway.cache.reused_answer import ReusedAnswer
from gateway.cache.semantic_cache import SemanticCache
from gateway.choices import ChoiceDelta
from gateway.config.policy import ReuseRules
from gateway.request_context import RequestContext
from gateway.service import Service

DEGRADED = "x-trident-degraded"


@dataclass(eq=False)
class Served:
    """An answer for one caller, wherever it comes from. Read ``pieces``, then ``close``, whatever happens.

    request_id, created_s: what names it, those of the first try where this is a retry. first_event: the number of the
    first piece where pieces are numbered, so that a reader that was cut off can go on; else None. before: those that
    it has had already.
    """

    pieces: AsyncIterator[ChoiceDelta]
    headers: Mapping[str, str]
    close: Callable[[BaseException | None], None]
    request_id: str
    created_s: int
    first_event: int | None = None
    before: tuple[ChoiceDelta, ...] = ()


class Reuse:
    """One for a gateway, over its service. semantic: None where no embedding model is set."""

    def __init__(
        self, service: Service, rules: ReuseRules, clock: Callable[[], float], semantic: SemanticCache | None = None
    ) -> None:
        self._service, self._rules, self._semantic = service, rules, semantic
        self._coalescer = Coalescer(size=_size) if rules.coalesce else None
        self._cache = ResponseCache(rules.cache_bytes, rules.cache_ttl_s, clock) if rules.cache_bytes else None
        self._idempotency = Idempotency(
            clock,
            ttl_s=rules.idempotency_ttl_s,
            linger_s=rules.idempotency_linger_s,
            max_bytes=rules.idempotency_bytes,
            size=_size,
        )
        self._keeping: set[asyncio.Task] = set()

    async def served(self, wanted: Sequence[GenerationRequest], asking: RequestContext) -> Served:
        """Raises what ``Service.choices`` raises, and InvalidArgument for headers that cannot be obeyed."""
        control, carrier = CacheControl.from_headers(asking.carrier), asking.carrier
        key, seen = carrier.get(HEADER.lower()), carrier.get(RESUME_HEADER.lower())
        if key is None:
            if seen is not None:
                raise InvalidArgument(RESUME_HEADER, f"is allowed only with the {HEADER} of the stream it goes on with")
            return await self._made(wanted, asking, control)
        if not control.enabled or not self._rules.idempotency_bytes:
            problem = "asks for the answer to be kept; cache-control, x-trident-cache or the gateway's rules forbid it"
            raise InvalidArgument(HEADER, problem)
        if seen is not None and not wanted[0].stream:
            raise InvalidArgument(RESUME_HEADER, "is allowed only with stream=true; a whole answer has no events")
        tenant, start = asking.tenant.name, _start(seen)
        what = hashlib.sha256("".join(request_key(one, tenant, asking.operation) for one in wanted).encode())
        making = _Making(lambda: self._made(self._lasting(wanted), asking, control))
        reader = self._idempotency.follow(tenant, key, what.hexdigest(), lambda: making, start)
        served = await self._read(reader, making, wanted, asking, "replayed")
        return dataclasses.replace(served, first_event=start, before=reader.stream.deltas()[:start])

    async def aclose(self) -> None:
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        if self._semantic is not None:
            await self._semantic.aclose()

    async def _made(self, wanted: Sequence[GenerationRequest], asking: RequestContext, control: CacheControl) -> Served:
        """An answer of the caches, of a stream under way, or a new one."""
        asked, tenant = wanted[0], asking.tenant.name
        if len(wanted) > 1 or not control.enabled or not deterministic(asked):
            return await self._fresh(wanted, asking, "bypass")
        engine, anew = self._engine(asking), control.max_age_s <= 0
        key = request_key(asked, tenant, engine)
        if engine and not anew:
            if self._cache is not None and (found := self._cache.get(key, control.max_age_s)) is not None:
                return await self._given(found, wanted, asking, {SAID: "hit"})
            if self._semantic is not None:
                hit = await self._semantic.get(asked, tenant, engine, control)
                if hit is not None:
                    return await self._given(hit.answer, wanted, asking, hit.headers)

        def keep(answer: Answer) -> None:
            self._keep(key, answer, asked, asking, engine, control)

        if self._coalescer is None or anew:
            return await self._fresh(wanted, asking, "miss", keep)
        making = _Making(lambda: self._fresh(self._lasting(wanted), asking, "miss", keep))
        reader = self._coalescer.follow(key, lambda: making)
        return await self._read(reader, making, wanted, asking, "coalesced")

    async def _fresh(
        self,
        wanted: Sequence[GenerationRequest],
        asking: RequestContext,
        result: str,
        keep: Callable[[Answer], None] | None = None,
    ) -> Served:
        """The engine's. keep: told the whole answer, if nothing was given up in it."""
        choices = await self._service.choices(wanted, asking)
        self._count(result)
        pieces = aiter(choices)
        if keep is not None and DEGRADED not in choices.headers:
            pieces = _kept(pieces, lambda answer: None if choices.made_elsewhere else keep(answer))
        if result == "miss":
            choices.headers[SAID] = result
        return Served(pieces, choices.headers, choices.close, asking.request_id, int(time.time()))

    async def _given(
        self, answer: Answer, wanted: Sequence[GenerationRequest], asking: RequestContext, headers: Mapping[str, str]
    ) -> Served:
        """An answer that is there."""
        reused = ReusedAnswer(self._service, asking, wanted, headers[SAID])
        paid = await reused.admitted()
        self._count(headers[SAID])
        pieces = reused.read(_each(answer))
        return Served(pieces, {**paid, **headers}, reused.close, asking.request_id, int(time.time()))

    async def _read(
        self,
        reader: SharedReader,
        making: _Making,
        wanted: Sequence[GenerationRequest],
        asking: RequestContext,
        joined: str,
    ) -> Served:
        """What ``reader`` reads: ``making`` if it is the first, else what is being made already, or was."""
        first, making, timeout_s = reader.stream.source is making, reader.stream.source, wanted[0].timeout_s
        late = DeadlineExceeded("the request's time was up")
        alarm = asyncio.get_running_loop().call_later(timeout_s or 86_400.0, reader.fail, late)
        paid: Mapping[str, str] = {}

        def nothing(error: BaseException | None) -> None:
            """The first reader's permit is settled by what it reads."""

        settle: Callable[[BaseException | None], None] = nothing
        pieces: AsyncIterator[ChoiceDelta] = reader
        try:
            if not first:
                reused = ReusedAnswer(self._service, asking, wanted, joined)
                paid = await reused.admitted()
                settle, pieces = reused.close, reused.read(reader)
            await asyncio.wait_for(making.decided.wait(), timeout_s)
        except BaseException as exc:
            alarm.cancel()
            reader.leave()
            settle(exc)
            if isinstance(exc, asyncio.TimeoutError):
                raise late from None
            raise
        original = making.served
        headers: Mapping[str, str] = original.headers if original else {}
        if not first:
            self._count(joined)
            headers = _Joined({**paid, SAID: joined}, headers)

        def close(error: BaseException | None) -> None:
            alarm.cancel()
            reader.leave()
            settle(error)

        names = original if original and joined == "replayed" else None
        return Served(
            pieces,
            headers,
            close,
            names.request_id if names else asking.request_id,
            names.created_s if names else int(time.time()),
        )

    def _lasting(self, wanted: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        """The same for many readers: the time of one is not that of all."""
        most_s = self._service.settings.request_timeout_s
        return [dataclasses.replace(one, timeout_s=most_s) for one in wanted]

    def _engine(self, asking: RequestContext) -> str:
        """The hash of the engine that will answer, "" if it is not known or there are several."""
        return self._rules.engine or self._service.replicas.engine(asking.tenant.pool)

    def _keep(
        self,
        key: str,
        answer: Answer,
        asked: GenerationRequest,
        asking: RequestContext,
        engine: str,
        control: CacheControl,
    ) -> None:
        if not engine or engine != self._engine(asking):
            return  # it may have come from an engine that was on its way in or out
        if self._cache is not None:
            self._cache.put(key, answer)
        if self._semantic is not None:
            putting = self._semantic.put(asked, asking.tenant.name, engine, answer, control)
            task = asyncio.ensure_future(putting)
            self._keeping.add(task)
            task.add_done_callback(self._keeping.discard)

    def _count(self, result: str) -> None:
        self._service.metrics.reuse.labels(result).inc()


class _Joined(Mapping[str, str]):
    """The headers of one that joined an answer: its own, and what was given up in the answer, which may change until
    its first token."""

    def __init__(self, own: Mapping[str, str], original: Mapping[str, str]) -> None:
        self._own, self._original = own, original

    def _now(self) -> dict[str, str]:
        return {name: value for name, value in self._original.items() if name == DEGRADED} | dict(self._own)

    def __getitem__(self, name: str) -> str:
        return self._now()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


class _Making:
    """An answer that is made for the readers of a SharedStream, its admission included. ``served``: once admitted."""

    def __init__(self, make: Callable[[], Awaitable[Served]]) -> None:
        self._make = make
        self.decided = asyncio.Event()  # admitted, or refused: then the refusal is what readers read
        self.served: Served | None = None
        self._pieces: AsyncIterator[ChoiceDelta] | None = None

    def __aiter__(self) -> AsyncIterator[ChoiceDelta]:
        self._pieces = self._run()
        return self._pieces

    async def aclose(self) -> None:
        if self._pieces is not None:
            await self._pieces.aclose()

    async def _run(self) -> AsyncIterator[ChoiceDelta]:
        try:
            self.served = await self._make()
        finally:
            self.decided.set()
        error: BaseException | None = None
        try:
            async for piece in self.served.pieces:
                yield piece
        except BaseException as exc:
            error = exc
            raise
        finally:
            self.served.close(error)
            await self.served.pieces.aclose()


async def _kept(pieces: AsyncIterator[ChoiceDelta], keep: Callable[[Answer], None]) -> AsyncIterator[ChoiceDelta]:
    """``pieces`` of one choice as they are, kept once they have come to their end."""
    seen: list[TokenDelta] = []
    try:
        async for piece in pieces:
            seen.append(piece.delta)
            yield piece
    finally:
        await pieces.aclose()
    keep(tuple(seen))


async def _each(answer: Iterable[TokenDelta]) -> AsyncIterator[ChoiceDelta]:
    for delta in answer:
        yield ChoiceDelta(0, delta)


def _size(piece: ChoiceDelta) -> int:
    return size_bytes(piece.delta)


def _start(seen: str | None) -> int:
    """The first piece that a reader wants which has seen event ``seen``."""
    if seen is None:
        return 0
    if not (seen.isascii() and seen.isdecimal() and len(seen) < 10):
        raise InvalidArgument(RESUME_HEADER, f"got {seen!r:.50}; allowed is the id of an event of this stream")
    return int(seen) + 1
