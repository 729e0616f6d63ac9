"""The OpenAI door: a body in, a whole answer or an event stream out, the same way for every endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request

from clients.wire.completion import Completion
from clients.wire.connection import new_request_id
from clients.wire.request import MAX_REQUEST_ID, can_travel
from contract.errors import EngineFailed, InvalidArgument, TridentError
from contract.generation import GenerationRequest, TokenDelta, Usage
from gateway.admission.body_budget import Lease
from gateway.admission.permit import Tenant
from gateway.api import error_responses, schemas
from gateway.api.caller_errors import for_caller
from gateway.api.chat import Chat
from gateway.api.completions import Completions
from gateway.api.schemas import ChatRequest, CompletionRequest
from gateway.api.sse import Reader
from gateway.api.vocabulary import Vocabulary
from gateway.cache.reuse import Reuse, Served
from gateway.choices import ChoiceDelta, together
from gateway.request_context import RequestContext
from gateway.service import Service
from gateway.telemetry import observability

_LOG = logging.getLogger(__name__)
_DONE = b"data: [DONE]\n\n"
LINGER_S = 2.0  # how long a refused body may still come in
# What readers that split lines as Python's str does take for the end of one, beside what JSON escapes anyway.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
_MARK = secrets.token_hex(16)  # where the text goes; no caller knows it
_JSON = (b"content-type", b"application/json")
_OURS = {"text_input": "prompt", "stop_words": "stop"}  # what a replica's complaint names, as OpenAI calls it
Headers = list[tuple[bytes, bytes]]


class Form(Protocol):
    """What an endpoint's answers look like."""

    def first_chunk(self, choice: int) -> dict[str, Any] | None: ...
    def chunk(self, choice: int, delta: TokenDelta) -> dict[str, Any] | None: ...
    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]: ...
    def whole(self, answers: Sequence[Completion], usage: dict[str, Any]) -> dict[str, Any]: ...


class TooLarge(Exception):
    """The body is larger than allowed."""


class HttpDoor:
    """One endpoint, as an ASGI application."""

    def __init__(
        self, service: Service, reuse: Reuse, form: type[Chat] | type[Completions], vocabulary: Vocabulary
    ) -> None:
        self._service, self._reuse, self._form, self._vocabulary = service, reuse, form, vocabulary

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        request_id = request.headers.get("x-request-id") or new_request_id()
        service = self._service
        try:
            tenant = service.tenant(bearer(request.headers.get("authorization", "")))
        except TridentError as exc:  # whoever has no key cannot make us hold a body
            await self._refuse(receive, send, error_responses.http(exc), request_id)
            return
        with service.bodies.lease(tenant.name, alone=service.configuration.keyless) as held:
            body = await self._read(request, held, receive, send, request_id)
            if body is None:
                return
            code, error = 499, None
            async with Reader(scope, receive, send, service.settings, service.watchdog) as reader:
                try:
                    await self._answer(reader, request, tenant, body, request_id)
                    code = 200
                except TridentError as exc:
                    error = exc
                except Exception:
                    _LOG.exception("request %s met a defect", request_id.replace("%", "%%"), extra={"fields": {}})
                    error = EngineFailed(f"the gateway failed; quote {request_id} when you report it")
                if error is not None:
                    code = error.http_status
                    await self._say(reader, error, request_id)
        service.metrics.requests.labels("http", self._form.operation, code).inc()

    async def _read(self, request: Request, held: Lease, receive: Any, send: Any, request_id: str) -> bytes | None:
        """The body, counted in ``held``; None if there is none to answer, because it was refused or the caller left."""
        settings = self._service.settings
        try:
            return await _body(request, held, settings.max_body_bytes, settings.body_timeout_s)
        except ClientDisconnect:
            return None
        except TridentError as exc:
            self._service.metrics.rejections.labels(observability.reason(exc)).inc()
            said = error_responses.http(exc)
        except TooLarge:
            problem = f"the body is larger than {settings.max_body_bytes} bytes, the most allowed"
            said = error_responses.plain(413, problem, "request_too_large")
        except asyncio.TimeoutError:
            said = error_responses.plain(408, "the body did not arrive in time", "timeout")
        await self._refuse(receive, send, said, request_id)
        return None

    async def _answer(self, reader: Reader, request: Request, tenant: Tenant, body: bytes, request_id: str) -> None:
        service, settings = self._service, self._service.settings
        if not can_travel(request_id):
            raise InvalidArgument("x-request-id", f"allowed are at most {MAX_REQUEST_ID} printable ASCII characters")
        asked = schemas.parse(self._form.schema, body, settings)
        timeout_s = _timeout_s(request.headers.get("x-trident-timeout-s"), settings.request_timeout_s)
        session = request.headers.get("x-session-id", "")[:MAX_REQUEST_ID]
        asking = RequestContext(tenant, "http", self._form.operation, request_id, _carrier(request), session)
        async with _served(service, asked, asking, timeout_s, self._reuse.served) as served:
            form = self._form(asked, served.request_id, served.created_s, self._vocabulary)
            if asked.stream:
                await self._stream(reader, form, served, asked, request_id)
            else:
                answer = await _whole(form, served.pieces, asked, request_id)
                headers = _headers(request_id, served.headers)
                await reader.respond(200, [*headers, _JSON], orjson.dumps(answer))

    async def _stream(
        self, reader: Reader, form: Form, served: Served, asked: ChatRequest | CompletionRequest, request_id: str
    ) -> None:
        """Events as they come. Nothing is sent before there is something to say, so that an error that comes first
        is a status; but a caller that waits long hears heartbeats."""
        pieces, number = served.pieces, served.first_event
        usages: dict[int, Usage | None] = {}
        events = Events(form)
        first = asyncio.ensure_future(_next(pieces))
        try:
            done, _ = await asyncio.wait((first,), timeout=self._service.settings.heartbeat_s)
            if done:
                item = first.result()
                await reader.start_events(_headers(request_id, served.headers))
            else:
                await reader.start_events(_headers(request_id, served.headers))
                await reader.write(b": waiting\n\n")
                item = await first
            for choice, delta in served.before:  # what a reader that comes back has had already
                events.of(choice, delta)
                usages[choice] = delta.usage or usages.get(choice)
            while item is not None:
                choice, delta = item
                lines = events.of(choice, delta)
                usages[choice] = delta.usage or usages.get(choice)
                if number is not None:
                    if lines:
                        lines[-1] = b"id: %d\n%b" % (number, lines[-1])
                    number += 1
                if lines:
                    await reader.write(b"".join(lines))
                item = await anext(pieces, None)
            if asked.include_usage:
                usage = _usage([usages[choice] for choice in sorted(usages)], asked.choices)
                await reader.write(_event(form.usage_chunk(usage)))
            await reader.end(_DONE)
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await pieces.aclose()

    async def _say(self, reader: Reader, error: TridentError, request_id: str) -> None:
        """The error, as a status or, where that is gone already, as the stream's last event."""
        error = for_caller(error, _printable(request_id))
        if not reader.started:
            status, headers, body = error_responses.http(error)
            await reader.respond(status, [*headers, *_headers(_printable(request_id), {})], body)
            return
        await reader.end(_event(error_responses.error_object(error)))

    async def _refuse(self, receive: Any, send: Any, said: tuple[int, Headers, bytes], request_id: str) -> None:
        """An answer to a body that was not read to its end. The connection is closed, but not before the caller has had
        time to send the rest: one that still sends when it closes loses the answer with the connection."""
        status, headers, body = said
        headers = [*headers, *_headers(_printable(request_id), {}), (b"connection", b"close")]
        headers.append((b"content-length", b"%d" % len(body)))
        self._service.metrics.requests.labels("http", self._form.operation, status).inc()
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_discarded(receive), LINGER_S)
        await send({"type": "http.response.body", "body": b""})


async def _discarded(receive: Any) -> None:
    """Reads what is left of a body; returns at its end, or when the caller has gone."""
    while (message := await receive())["type"] == "http.request" and message.get("more_body"):
        pass


async def _body(request: Request, held: Lease, most: int, patience_s: float) -> bytes:
    """Raises TooLarge, asyncio.TimeoutError, ClientDisconnect, and Overloaded if ``held`` cannot hold it."""
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > most:
        raise TooLarge

    async def read() -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise TooLarge
            held.take(len(part))
            parts.append(part)
        return b"".join(parts)

    return await asyncio.wait_for(read(), patience_s)


async def answered(
    service: Service,
    kind: type[Chat] | type[Completions],
    vocabulary: Vocabulary,
    asking: RequestContext,
    body: bytes,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """What the endpoint answers to one body, as the table its JSON would hold, for askers that are not on HTTP.

    timeout_s: None for the gateway's own limit. Raises the TridentError that would have been the status;
    InvalidArgument for a body that asks for a stream.
    """
    asked = schemas.parse(kind.schema, body, service.settings)
    if asked.stream:
        raise InvalidArgument("stream", "is not allowed here: the answer is given whole")
    form = kind(asked, asking.request_id, int(time.time()), vocabulary)
    most_s = service.settings.request_timeout_s
    async with _served(service, asked, asking, min(most_s, timeout_s or most_s), service.choices) as choices:
        return await _whole(form, choices, asked, asking.request_id)


class _Closable(Protocol):
    def close(self, error: BaseException | None) -> None: ...


_Answer = TypeVar("_Answer", bound=_Closable)


@contextlib.asynccontextmanager
async def _served(
    service: Service,
    asked: ChatRequest | CompletionRequest,
    asking: RequestContext,
    timeout_s: float,
    make: Callable[[Sequence[GenerationRequest], RequestContext], Awaitable[_Answer]],
) -> AsyncIterator[_Answer]:
    """All choices, or none: the refusal is raised. Left, they are over."""
    service.check_model(asked.model, asking.tenant)
    wanted = asked.generations(service.settings, timeout_s)
    try:
        answer = await make(wanted, asking)
        error: BaseException | None = None
        try:
            yield answer
        except BaseException as exc:
            error = exc
            raise
        finally:
            answer.close(error)
    except InvalidArgument as exc:
        name = _OURS.get(exc.field)
        if name is None:
            raise
        raise type(exc)(
            "messages" if isinstance(asked, ChatRequest) and name == "prompt" else name, exc.problem
        ) from exc


async def _whole(
    form: Form, pieces: AsyncIterable[ChoiceDelta], asked: ChatRequest | CompletionRequest, request_id: str
) -> dict[str, Any]:
    answers = await together(pieces, request_id)
    return form.whole(answers, _usage([answer.usage for answer in answers], asked.choices))


async def _next(pieces: AsyncIterator[ChoiceDelta]) -> ChoiceDelta | None:
    return await anext(pieces, None)


def _usage(usages: Sequence[Usage | None], choices: int) -> dict[str, Any]:
    """Tokens of all choices, prompt by prompt; a prompt counts once, however many choices were made of it."""
    known = [usage or Usage(0, 0) for usage in usages]
    each = known[::choices]
    prompt, output = sum(one.input_tokens for one in each), sum(one.output_tokens for one in known)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in each)},
    }


class Events:
    """The pieces of a stream as events. Those that add text alone, as almost all do, differ from one another in that
    text alone: what stands around it is written once for each choice."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def of(self, choice: int, delta: TokenDelta) -> list[bytes]:
        """None for a delta that adds nothing to be seen, two where a choice begins with an event of its own."""
        lines = []
        if choice not in self._around:
            first, pattern = self._form.first_chunk(choice), self._form.chunk(choice, TokenDelta(_MARK))
            before, _, after = _event(pattern).partition(_json(_MARK))
            self._around[choice] = before, after
            lines += [] if first is None else [_event(first)]
        if delta.text and not (delta.finish_reason or delta.log_probs):
            before, after = self._around[choice]
            lines.append(b"%b%b%b" % (before, _json(delta.text), after))
        elif (chunk := self._form.chunk(choice, delta)) is not None:
            lines.append(_event(chunk))
        return lines


def _event(said: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % _json(said)


def _json(said: Any) -> bytes:
    """One line whatever it says, and however its reader splits lines."""
    data = orjson.dumps(said)
    if not data.isascii():
        for character, escaped in _LINE_ENDS:
            data = data.replace(character, escaped)
    return data


def _carrier(request: Request) -> dict[str, str]:
    """The headers; one that was sent several times says all of it."""
    said: dict[str, str] = {}
    for name, value in request.headers.items():
        said[name] = f"{said[name]}, {value}" if name in said else value
    return said


def bearer(header: str) -> str:
    scheme, _, key = header.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _timeout_s(header: str | None, most_s: float) -> float:
    if header is None:
        return most_s
    try:
        asked_s = float(header)
    except ValueError:
        asked_s = 0.0
    if not 0.0 < asked_s < float("inf"):
        raise InvalidArgument("x-trident-timeout-s", f"got {header!r:.50}; allowed is a number of seconds above 0")
    return min(asked_s, most_s)


def _headers(request_id: str, more: Mapping[str, str]) -> Headers:
    return [(b"x-request-id", request_id.encode()), *((key.encode(), value.encode()) for key, value in more.items())]


def _printable(request_id: str) -> str:
    return request_id if can_travel(request_id) else new_request_id()
