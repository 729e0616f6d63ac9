"""One request that Envoy forwards: the endpoints that it may go to, and what it holds here until its end."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
from collections.abc import Callable, Collection, Mapping

from grpc import StatusCode

from clients.replica_set.reservation import Reservation
from clients.wire.response_reader import ResponseReader
from contract import errors
from contract.errors import Cancelled, DeadlineExceeded, EngineFailed, InvalidArgument, TridentError, Unavailable
from contract.generation import GenerationRequest, Usage
from gateway.admission.fair_admission import Permit
from gateway.api.picker.request import FRAME, GRPC, OPENAI
from gateway.config.settings import Settings
from gateway.request_context import RequestContext
from gateway.routing.replicas import Route, RoutedReplica
from gateway.service import Service
from gateway.telemetry import request_log

OnCut = Callable[[TridentError], object]
MOST_ENDPOINTS = 4  # the first, and those that Envoy tries after it
_NOT_READ = GenerationRequest(text_input="", max_tokens=1)
_BY_STATUS = {kind.http_status: kind for kind in reversed(errors.BY_NAME.values())} | {502: Unavailable}

# A text that quotes these names has a backslash in front of each quotation mark.
_TOLD = re.compile(rb'(?<!\\)"(?:num_)?(prompt|input|completion|output)_tokens"\s*:\s*(\d+)[,}\s]')
_EVENT = re.compile(rb"\ndata: ?\{")  # JSON escapes the line ends in texts
_LONGEST_MATCH = 64
_INPUT = (b"prompt", b"input")


class ResponseUsage:
    """What a response has used so far, read while Envoy relays it: JSON of OpenAI and Triton, or events, or gRPC."""

    def __init__(self, request: GenerationRequest, content_type: str) -> None:
        self._reader = ResponseReader(request) if content_type.startswith("application/grpc") else None
        self._events = content_type.startswith("text/event-stream")
        self._kept = b"\n" if self._events else b""
        self._input = self._output = 0  # as the endpoint told them
        self.tokens = 0  # counted, an event as one where ids are not read
        self.cached_tokens: int | None = None  # as a replica told over gRPC
        self.error: TridentError | None = None  # that a gRPC response carried in band

    @property
    def usage(self) -> Usage | None:
        """As the endpoint told it; None before."""
        return Usage(self._input, self._output, self.cached_tokens or 0) if self._output else None

    def feed(self, data: bytes) -> None:
        """Read the next bytes."""
        known = len(self._kept)
        self._kept += data
        if self._reader is not None:
            self._read_frames(self._reader)
            return
        self.tokens += sum(event.end() > known for event in _EVENT.finditer(self._kept)) if self._events else 0
        for match in _TOLD.finditer(self._kept):
            count = int(match[2])
            if match[1] in _INPUT:  # Triton's events have 0 before the last
                self._input = count or self._input
            else:
                self._output = count or self._output
        self._kept = self._kept[-_LONGEST_MATCH:]

    def _read_frames(self, reader: ResponseReader) -> None:
        while len(self._kept) >= FRAME.size:
            compressed, size = FRAME.unpack_from(self._kept)
            end = FRAME.size + size
            if len(self._kept) < end:
                return
            message, self._kept = self._kept[FRAME.size : end], self._kept[end:]
            try:
                delta = None if compressed else reader.read(message)
            except TridentError as error:
                self.error = error
                continue
            if delta is not None:
                self.tokens += len(delta.token_ids)
                self._input += delta.usage.input_tokens if delta.usage else 0  # of each request of the stream
                self._output += delta.usage.output_tokens if delta.usage else 0
                if delta.usage:
                    self.cached_tokens = (self.cached_tokens or 0) + delta.usage.cached_tokens


class Pick:
    """The permit of one request and its work at a replica; ``close`` it. endpoints: by "IP:PORT", best first."""

    def __init__(
        self, service: Service, context: RequestContext, permit: Permit, form: str, began_s: float, on_cut: OnCut
    ) -> None:
        """form: of ``request.form_of``. began_s: arrival. on_cut: ends the exchange with Envoy."""
        self._service, self._context, self._permit, self._form = service, context, permit, form
        self._began_s, self._on_cut = began_s, on_cut
        self.requests, self.headers = permit.requests, permit.headers
        self.endpoints: dict[str, RoutedReplica] = {}
        self.error: TridentError | None = None
        self._first = (*permit.requests, _NOT_READ)[0]
        self._route: Route | None = None
        self._replica: RoutedReplica | None = None
        self._reservations: list[Reservation] = []
        self._usage: ResponseUsage | None = None
        self._sent_s = self._first_s = 0.0
        self._decoding_s = 0.0, 0.0  # when the first tokens came, and the latest
        self._cut = self._closed = False
        service.live.add(self)

    async def choose(self, subset: Collection[str] | None) -> None:
        """Wait for every choice's slot and pick endpoints, of a subset or all. Raises: as the queue, or Unavailable."""
        turns, replicas = self._permit.turns, self._service.replicas
        await asyncio.gather(*(turn.begin() for turn in turns))
        named = {replica.url: self._endpoint(replica) for replica in replicas.all()}
        outside = {url for url, own in named.items() if not own or (subset is not None and own not in subset)}
        for _ in replicas.pools:
            pool = turns[0].pool if turns else self._context.tenant.pool
            self._route = replicas.route(self._first, pool, self._context.session)
            found = self._route.ordered(MOST_ENDPOINTS, frozenset(outside))
            self.endpoints = {named[replica.url]: replica for replica in found}
            if self.endpoints or not (turns and turns[0].may_move):
                break
            for turn in turns:
                await turn.move()
        if not self.endpoints:
            raise Unavailable(f"no endpoint is ready{'' if subset is None else ' among those of the subset'}", 1.0)
        self._book(next(iter(self.endpoints.values())))

    def _endpoint(self, replica: RoutedReplica) -> str:
        return endpoint(self._service.settings, replica.url, self._form)

    def _book(self, replica: RoutedReplica) -> None:
        """Reserve the work at a replica, and no longer at the one before."""
        self._release()
        self._replica, costs = replica, self._service.replicas.costs_of(replica)
        self._reservations = [Reservation(replica.work, costs, each) for each in self.requests or (_NOT_READ,)]
        replica.sent()
        self._sent_s = time.monotonic()
        if self._route is not None:
            self._route.sent_to(replica)

    def _release(self) -> None:
        for reservation in self._reservations:
            reservation.release()

    def served(self, served: str) -> None:
        """Take note of the endpoint that answers. Those in front of it in the list count as failed."""
        replica = next((each for each in self._service.replicas.all() if self._endpoint(each) == served), None)
        if replica is None or replica is self._replica:
            return
        for listed in list(self.endpoints)[: [*self.endpoints, served].index(served)]:
            self.endpoints[listed].ended(Unavailable(f"Envoy could not use {listed}"), 0.0)
        self._book(replica)

    def told(self, headers: Mapping[str, str]) -> None:
        """Take note of the response's headers, or of its trailers."""
        status, code = int(headers.get(":status", "200")), headers.get("grpc-status", "0")
        name = next((each.name for each in StatusCode if str(each.value[0]) == code), "")
        kind = _BY_STATUS.get(status, EngineFailed if status >= 500 else InvalidArgument) if status >= 400 else None
        kind = errors.BY_GRPC_STATUS.get(name, EngineFailed) if code != "0" else kind
        if kind is not None:
            self.error = errors.make(kind, f"the endpoint answered with status {status} {name}")
        if self._usage is None and self.requests:
            self._usage = ResponseUsage(self._first, headers.get("content-type", ""))

    def received(self, data: bytes) -> None:
        """Take note of a part of the response's body."""
        if not self._first_s:
            self._first_s = time.monotonic()
            for reservation in self._reservations:
                reservation.began()
        if self._usage is None:
            return
        before = self._usage.tokens
        self._usage.feed(data)
        if (grown := self._usage.tokens - before) and self._route is not None:
            now_s = time.monotonic()
            self._decoding_s = self._decoding_s[0] or now_s, now_s
            self._route.made_tokens(grown)

    def check(self, now_s: float) -> None:
        """End it at its deadline."""
        limit_s = self._first.timeout_s or self._service.settings.request_timeout_s
        if now_s - self._began_s > limit_s:
            self.cut(DeadlineExceeded(f"the response was not complete after {limit_s:g} s"))

    def cut(self, error: TridentError) -> None:
        """End it with ``error``: the exchange with Envoy, and by that the response."""
        if not (self._cut or self._closed):
            self._cut, self.error = True, self.error or error
            self._on_cut(error)

    def close(self, complete: bool) -> None:
        """Settle and release everything; a second call does nothing. complete: the response came to its end."""
        if self._closed:
            return
        self._closed = True
        error = self.error or (self._usage.error if self._usage is not None else None)
        self.error = error = error or (None if complete else Cancelled("the caller went away"))
        usage, replica = self._used(complete), self._replica
        self._service.live.discard(self)
        self._release()
        self._permit.settle(usage)
        if replica is not None:
            replica.ended(error, 0.0, self._sent_s)
        if error is None and self._usage is not None:
            self._learn(self._usage)
        metrics, context = self._service.metrics, self._context
        input_tokens, output_tokens = (usage.input_tokens, usage.output_tokens) if usage else (0, 0)
        pool, url = (replica.pool, replica.url) if replica else ("", "")
        metrics.ended(
            context,
            error,
            "" if error else "forwarded",
            began_s=self._began_s,
            first_s=self._first_s,
            pool=pool,
            usage=usage,
            whole=self._usage is None or not self._usage.tokens,
        )
        micros = context.charge().micros(usage)
        if usage is not None:
            metrics.used(context.tenant.name, usage, model=context.model.name, cost=micros / 1e6)
        cost = request_log.cost_fields(context, micros)
        told = {"input_tokens": input_tokens, "output_tokens": output_tokens, **cost}
        request_log.write(context, error, self._began_s, replica=url, pool=pool, **told)

    def _learn(self, seen: ResponseUsage) -> None:
        """Learn the replica's pace and what it has cached, as far as its response tells."""
        usage, (first_s, last_s) = seen.usage, self._decoding_s
        if usage is None or len(self._reservations) != 1 or self._route is None:
            return
        self._reservations[0].learn_seen(usage, last_s - first_s)
        if seen.cached_tokens is not None:
            self._route.read_usage(usage)

    def _used(self, complete: bool) -> Usage | None:
        """Return what the request used: as the response told, else as counted, else, unseen, all that it might."""
        told = self._usage
        if told is None:
            return None
        prompts = sum(count.likely for count in {id(count): count for count in self._permit.counts}.values())
        if complete and self.error is None and not told.tokens:
            return told.usage or Usage(prompts, sum(request.max_tokens for request in self.requests))
        return told.usage or (Usage(prompts, told.tokens) if told.tokens else None)


def endpoint(settings: Settings, replica: str, form: str) -> str:
    """Return the "IP:PORT" where the replica at "HOST:PORT" serves a form of requests; "" if its host is a name."""
    host = replica.rpartition(":")[0]
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return ""
    port = settings.picker_openai_port if form == OPENAI else settings.picker_http_port
    return replica if form == GRPC else settings.picker_endpoints.get(replica, f"{host}:{port}")
