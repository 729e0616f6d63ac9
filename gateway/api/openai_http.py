"""Serve OpenAI's endpoints: a JSON body in, a JSON response or an event stream out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from clients.wire.connection import new_request_id
from clients.wire.request import MAX_REQUEST_ID, can_travel
from contract.errors import EngineFailed, InvalidArgument, TridentError
from contract.generation import GenerationRequest, changed
from gateway.admission.body_budget import Lease
from gateway.api import error_responses, prompting, request_body, schemas
from gateway.api.error_responses import for_caller
from gateway.api.request_body import BodyTooLarge
from gateway.api.response_stream import Headers, ResponseStream
from gateway.api.schemas import ChatRequest, CompletionRequest
from gateway.api.sse import EventEncoder, Formatter
from gateway.cache.reuse import ResponseDeltas, ResponseReuse
from gateway.choices import ChoiceDelta, ChoiceDeltas, together
from gateway.config.settings import Settings
from gateway.config.tenant import Tenant
from gateway.hooks.hooks import RequestHooks
from gateway.prompts import json_text
from gateway.request_context import RequestContext
from gateway.service import Service
from gateway.telemetry.content import ResponseTrace
from gateway.tools import chat_format
from gateway.tools.cutter import ChoiceCutters, CutDeltas, CutterRules
from gateway.tools.vocabulary import Vocabulary, vocabulary_of

_LOG = logging.getLogger(__name__)
# Of the tensors that a replica's errors name.
_OPENAI_NAMES = {"text_input": "prompt", "input_ids": "prompt", "stop_words": "stop"}
Body = ChatRequest | CompletionRequest
FormatterType = type[Formatter]
Handle = Callable[[Request, Tenant], Awaitable[Any]]


class Opened(NamedTuple):
    """A response as the caller gets it, the vocabulary of its model, and the context with that model."""

    stream: ResponseDeltas
    vocabulary: Vocabulary
    context: RequestContext

    def formatter(self, kind: FormatterType, body: Any) -> Formatter:
        return kind(body, self.stream.request_id, self.stream.created_s, self.vocabulary)


class OpenAIEndpoint:
    """Serve one endpoint, as an ASGI application."""

    def __init__(
        self, service: Service, reuse: ResponseReuse, formatter: FormatterType, vocabulary: Vocabulary
    ) -> None:
        self._service, self._reuse = service, reuse
        self._formatter, self._vocabulary = formatter, vocabulary
        self.operation = formatter.operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        request_id = request.headers.get("x-request-id") or new_request_id()
        service = self._service
        try:
            tenant = await service.tenant(request.headers)
        except TridentError as exc:  # before the body, so that no memory is held for a client without a key
            await self._reject(receive, send, error_responses.http(exc), request_id)
            return
        with service.bodies.lease(tenant.name, alone=service.configuration.keyless) as lease:
            body = await self._read_body(request, lease, receive, send, request_id)
            if body is None:
                return
            status, error = 499, None
            async with ResponseStream(scope, receive, send, service.settings, service.watchdog) as response:
                try:
                    check_request_id(request_id)
                    await self._handle(response, request, tenant, body, request_id)
                    status = 200
                except TridentError as exc:
                    error = exc
                except Exception:
                    _LOG.exception("unhandled exception in request %s", request_id, extra={"fields": {}})
                    error = EngineFailed(f"the gateway failed; quote {request_id} when you report it")
                if error is not None:
                    status = error.http_status
                    await self._send_error(response, error, request_id)
        service.metrics.requests.labels("http", self.operation, status).inc()

    async def _read_body(
        self, request: Request, lease: Lease, receive: Receive, send: Send, request_id: str
    ) -> bytes | None:
        """Return the body; None if it was rejected or the client disconnected."""
        settings = self._service.settings
        try:
            return await request_body.read(request, lease, settings.max_body_bytes, settings.body_timeout_s)
        except ClientDisconnect:
            return None
        except TridentError as exc:
            self._service.metrics.rejected(exc)
            rejection = error_responses.http(exc)
        except BodyTooLarge:
            problem = f"the body must be at most {settings.max_body_bytes} bytes"
            rejection = error_responses.plain(413, problem, "request_too_large")
        except asyncio.TimeoutError:
            problem = f"the body did not arrive within {settings.body_timeout_s:g} s"
            rejection = error_responses.plain(408, problem, "timeout")
        lease.release()  # not only after the rest was discarded
        await self._reject(receive, send, rejection, request_id)
        return None

    async def _handle(
        self, response: ResponseStream, request: Request, tenant: Tenant, data: bytes, request_id: str
    ) -> None:
        body = await self._read(data, tenant)
        timeout_s = requested_timeout_s(request.headers, self._service.settings)
        session = request.headers.get("x-session-id", "")[:MAX_REQUEST_ID]
        context = RequestContext(tenant, "http", self.operation, request_id, joined(request.headers.items()), session)
        opening = _opened(self._service, body, context, timeout_s, self._vocabulary, self._reuse.open)
        async with opening as opened:
            # Called when the status is sent: until then a stream may go elsewhere, which changes its headers.
            headers = partial(response_headers, request_id, opened.stream.headers)
            await self._respond(response, body, opened, headers)

    async def _read(self, data: bytes, tenant: Tenant) -> Body:
        """Return the body in ``data``. Raises: InvalidArgument."""
        body: Body = schemas.parse(self._formatter.schema, data, self._service.settings)
        return body

    async def _respond(
        self, response: ResponseStream, body: Any, opened: Opened, headers: Callable[[], Headers]
    ) -> None:
        """Send the whole response, or its events. body: of ``_read``."""
        formatter, stream = opened.formatter(self._formatter, body), opened.stream
        if body.stream:
            encoder = EventEncoder(formatter, stream.first_event, stream.replayed)
            await response.send_events(headers, stream.deltas, encoder)
        else:
            fields = formatter.response(await together(stream.deltas, opened.context.request_id))
            await response.respond(200, [*headers(), error_responses.JSON], orjson.dumps(fields))

    async def _send_error(self, response: ResponseStream, error: TridentError, request_id: str) -> None:
        """Send the error as a status or, if the status was sent already, as the stream's last event."""
        error = for_caller(error, _printable(request_id))
        if response.started:
            assert response.encoder is not None, "only an event stream starts before its end"
            await response.end(response.encoder.failed(error))
            return
        status, headers, body = error_responses.http(error)
        await response.respond(status, [*headers, *response_headers(_printable(request_id), {})], body)

    async def _reject(
        self, receive: Receive, send: Send, rejection: tuple[int, Headers, bytes], request_id: str
    ) -> None:
        """Respond to a body that was not read to its end, and have the connection closed."""
        status, headers, body = rejection
        headers = [*headers, *response_headers(_printable(request_id), {}), (b"connection", b"close")]
        headers.append((b"content-length", b"%d" % len(body)))
        self._service.metrics.requests.labels("http", self.operation, status).inc()
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await request_body.discard(receive)
        await send({"type": "http.response.body", "body": b""})


async def complete(
    service: Service, vocabulary: Vocabulary, formatter_type: FormatterType, context: RequestContext, data: bytes
) -> dict[str, Any]:
    """Return an endpoint's whole response to a body that does not come over HTTP. Raises: as the status would be."""
    body: Body = schemas.parse(formatter_type.schema, data, service.settings)
    if body.stream:
        raise InvalidArgument("stream", "must be false here, got true")

    async def generated(requests: Sequence[GenerationRequest], context: RequestContext) -> ResponseDeltas:
        choices = await service.choices(requests, context)
        return ResponseDeltas(aiter(choices), choices.headers, choices.close, context.request_id, int(time.time()))

    opening = _opened(service, body, context, service.settings.request_timeout_s, vocabulary, generated)
    async with opening as opened:
        completions = await together(opened.stream.deltas, context.request_id)
        return opened.formatter(formatter_type, body).response(completions)


async def _routed(
    service: Service, body: Body, context: RequestContext, timeout_s: float, hooks: RequestHooks | None
) -> tuple[list[GenerationRequest], RequestContext, CutterRules | None]:
    """Return the choices of a body, the context with their model, whose name the response carries, and what is cut."""
    user = getattr(body, "safety_identifier", None) or body.user or ""
    context = changed(context, user=user[:MAX_REQUEST_ID])
    used = None
    if isinstance(body, ChatRequest) and body.prompt is not None:
        used = prompting.prepared(service.prompts, body.prompt, context)
        body.use(used)
    requests = body.generations(service.settings, timeout_s)
    if hooks is not None:
        requests = await hooks.changed(requests, body.model, user)
    context = await service.routed(body.model, requests, context, body.has_default_length)
    if hooks is not None:
        hooks.call.model = context.model.name
    if used is not None:
        context = await prompting.weighed(used, requests[0], context)
    if context.model.rules.plain_tools and requests[0].tools:
        tools = json_text.plain_tools(requests[0].tools)
        requests = [replace(request, tools=tools) for request in requests]
    if context.model.rules.context is not None:
        requests, context = await prompting.bounded(service, requests, context, used)
    if body.has_default_length:
        requests = await prompting.with_room(requests, context.model.rules)
    if service.models.configured:
        body.model = context.model.name
    form = chat_format.configured(service.settings, context.model.rules)
    requests, rules = body.held(requests, form, service.settings)
    if adapter := context.model.adapter:
        requests = [replace(request, adapter=adapter) for request in requests]
    if context.trace is not None:
        context.trace.requested(requests)
    return requests, context, rules


async def _all_shown(
    deltas: ChoiceDeltas, hooks: RequestHooks | None, trace: ResponseTrace | None
) -> AsyncGenerator[ChoiceDelta, None]:
    """Yield the deltas as the caller gets them, as many as there are; closing it closes those."""
    try:
        async for item in deltas:
            yield await _shown(item, hooks, trace)
    finally:
        await deltas.aclose()


async def _shown(item: ChoiceDelta, hooks: RequestHooks | None, trace: ResponseTrace | None) -> ChoiceDelta:
    if hooks is not None:
        item = await hooks.output(item)
    if trace is not None:
        trace.read(*item)
    return item


@contextlib.asynccontextmanager
async def _opened(
    service: Service,
    body: Body,
    context: RequestContext,
    timeout_s: float,
    vocabulary: Vocabulary,
    open_: Callable[[Sequence[GenerationRequest], RequestContext], Awaitable[ResponseDeltas]],
) -> AsyncIterator[Opened]:
    """Admit all choices of a request, or raise; close them on exit. vocabulary: of a gateway without models."""
    with service.hooks.call(context) as hooks, service.response_trace(context) as trace:
        context = changed(context, trace=trace)
        requests, context, rules = await _routed(service, body, context, timeout_s, hooks)
        if service.models.configured:
            vocabulary = vocabulary_of(context.model.rules.tokenizer)
        try:
            stream = await open_(requests, context)
            error: BaseException | None = None
            try:
                if rules is not None:
                    cutters = ChoiceCutters(rules, vocabulary, stream.request_id)
                    replayed = tuple(map(cutters.cut, stream.replayed))
                    stream = replace(stream, deltas=CutDeltas(stream.deltas, cutters), replayed=replayed)
                if hooks is not None or trace is not None:
                    replayed = tuple([await _shown(item, hooks, trace) for item in stream.replayed])
                    stream = replace(stream, deltas=_all_shown(stream.deltas, hooks, trace), replayed=replayed)
                yield Opened(stream, vocabulary, context)
            except BaseException as exc:
                error = exc
                raise
            finally:
                stream.close(error)
        except InvalidArgument as exc:
            if (shown := _for_body(exc, body, requests[0])) is exc:
                raise
            raise shown from exc


def _for_body(error: InvalidArgument, body: Body, request: GenerationRequest) -> InvalidArgument:
    """Return an error about a request with the field of its body."""
    if error.field.startswith("guided_decoding_guide"):
        if request.tools is not None and request.guide is not None and isinstance(body, ChatRequest):
            return body.tools_error(error, request.guide)
        return body.guide_error(error)
    name = _openai_name(error.field, body)
    return error if name == error.field else type(error)(name, error.problem)


def _openai_name(field: str, body: Body) -> str:
    """Return the name that a field of the ensemble has in a body, with the place in its list: ``stop.1``."""
    if isinstance(body, ChatRequest) and field in ("text_input", "input_ids"):
        return "messages"
    if isinstance(body, ChatRequest) and field == "max_tokens" and body.max_tokens is None:
        return field if body.max_completion_tokens is None else "max_completion_tokens"
    tensor, _, row = field.partition("[")
    if tensor not in _OPENAI_NAMES:
        return field
    return _OPENAI_NAMES[tensor] + (f".{row.rstrip(']')}" if row else "")


def answered(service: Service, handle: Handle) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint that sends what ``handle`` returns for a request and its tenant, as ``answering`` does."""

    async def handled(request: Request) -> Any:
        return await handle(request, await service.tenant(request.headers))

    return error_responses.answering(handled)


def counted_route(service: Service, operation: str, path: str, **handlers: Handle) -> Route:
    """Return a route, counted, with the request's id. handlers: by method; what is no response is sent as JSON."""

    async def handled(request: Request, tenant: Tenant) -> Any:
        return await handlers["GET" if request.method == "HEAD" else request.method](request, tenant)

    answer = answered(service, handled)

    async def endpoint(request: Request) -> Response:
        response = await answer(request)
        if response.status_code >= 400 and not await request_body.drained(request):
            response.headers["connection"] = "close"
        response.headers["x-request-id"] = _printable(request.headers.get("x-request-id") or new_request_id())
        service.metrics.requests.labels("http", operation, response.status_code).inc()
        return response

    return Route(path, endpoint, methods=list(handlers))


def chosen(request: Request, name: str, *allowed: str) -> str:
    """Return a parameter of the query, by default the first one allowed. Raises: InvalidArgument."""
    value = request.query_params.get(name, allowed[0])
    if value not in allowed:
        raise InvalidArgument(name, f"must be one of {', '.join(allowed)}, got {value!r:.80}")
    return value


def limit(request: Request, default: int, most: int) -> int:
    """Return the parameter ``limit`` of the query. Raises: InvalidArgument."""
    text = request.query_params.get("limit", str(default))
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= most:
        raise InvalidArgument("limit", f"must be an integer from 1 to {most}, got {text!r:.50}")
    return int(text)


def page(rows: Sequence[Mapping[str, Any]], has_more: bool) -> dict[str, Any]:
    """Return a part of a list as OpenAI's clients page through it."""
    ends = {"first_id": rows[0]["id"] if rows else None, "last_id": rows[-1]["id"] if rows else None}
    return {"object": "list", "data": rows, **ends, "has_more": has_more}


def check_request_id(request_id: str) -> None:
    """Raises InvalidArgument for an id that cannot be a header's value."""
    if not can_travel(request_id):
        raise InvalidArgument("x-request-id", f"must be at most {MAX_REQUEST_ID} printable ASCII characters")


def joined(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return headers by name, those sent several times joined by commas."""
    found: dict[str, str] = {}
    for name, value in headers:
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


def requested_timeout_s(headers: Mapping[str, str], settings: Settings) -> float:
    """Return the time that a request has. Raises: InvalidArgument."""
    header, max_s = headers.get("x-trident-timeout-s"), settings.request_timeout_s
    if header is None:
        return max_s
    try:
        timeout_s = float(header)
    except ValueError:
        timeout_s = 0.0
    if not 0.0 < timeout_s < float("inf"):
        raise InvalidArgument("x-trident-timeout-s", f"must be a number of seconds above 0, got {header!r:.50}")
    return min(timeout_s, max_s)


def response_headers(request_id: str, more: Mapping[str, str]) -> Headers:
    return [(b"x-request-id", request_id.encode()), *((key.encode(), value.encode()) for key, value in more.items())]


def _printable(request_id: str) -> str:
    return request_id if can_travel(request_id) else new_request_id()
