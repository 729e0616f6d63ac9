"""Serve /v1/responses: responses are generated as chats are, and stored unless the request says otherwise."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from contract.errors import InvalidArgument
from gateway.api.error_responses import JSON
from gateway.api.formatters import ChatFormatter
from gateway.api.openai_http import OpenAIEndpoint, Opened, chosen, counted_route, limit, page
from gateway.api.response_stream import Headers, ResponseStream
from gateway.api.responses.events import ResponseEvents, ResponseFold
from gateway.api.responses.items import plain_items
from gateway.api.responses.schemas import ResponsesChat, parse, renamed
from gateway.api.responses.store import ResponseStore
from gateway.cache.coalescing import HEADER as IDEMPOTENCY
from gateway.cache.reuse import ResponseDeltas, ResponseReuse
from gateway.config.tenant import Tenant
from gateway.request_context import RequestContext
from gateway.service import Service
from gateway.tools.vocabulary import Vocabulary

OPERATION = "responses"
MAX_LISTED, LISTED = 100, 20


class ResponsesEndpoint(OpenAIEndpoint):
    """Serve POST /v1/responses, as an ASGI application; ``routes`` serve what is stored."""

    def __init__(self, service: Service, reuse: ResponseReuse, vocabulary: Vocabulary, store: ResponseStore) -> None:
        super().__init__(service, reuse, ChatFormatter, vocabulary)
        self.operation, self._store = OPERATION, store

    async def _handle(
        self, response: ResponseStream, request: Request, tenant: Tenant, data: bytes, request_id: str
    ) -> None:
        try:
            await super()._handle(response, request, tenant, data, request_id)
        except InvalidArgument as exc:
            raise renamed(exc) from exc

    async def _read(self, data: bytes, tenant: Tenant) -> ResponsesChat:
        original = parse(data)
        inputs = plain_items(original.input, secrets.token_hex(12))
        if any(item["type"] == "item_reference" for item in inputs):
            inputs = await asyncio.to_thread(self._store.resolved, tenant.name, inputs)
        before: list[dict[str, Any]] = []
        if original.previous_response_id is not None:
            before = await asyncio.to_thread(self._store.conversation, tenant.name, original.previous_response_id)
        return original.chat([*before, *inputs], len(inputs))

    async def _respond(
        self, response: ResponseStream, body: ResponsesChat, opened: Opened, headers: Callable[[], Headers]
    ) -> None:
        stream, tenant = opened.stream, opened.context.tenant.name
        chat = ChatFormatter(body, stream.request_id, stream.created_s, opened.vocabulary)
        head = {"id": _response_id(stream, opened.context), "object": "response", "created_at": stream.created_s}
        head |= {"model": body.model, **body.original.returned()}
        fold = ResponseFold(head, lambda delta: (chat.logprobs(delta) or {}).get("content", ()))
        put = partial(self._store.put, tenant, body.inputs)
        events = ResponseEvents(stream, fold, put if body.original.store else None)
        if body.stream:
            await response.send_events(headers, events, events)
            return
        async for _ in events:
            pass
        await response.respond(200, [*headers(), JSON], orjson.dumps(fold.response))

    def routes(self) -> list[Route]:
        stored = partial(counted_route, self._service, OPERATION)
        return [
            Route("/v1/responses", self, methods=["POST"]),
            stored("/v1/responses/{id}", GET=self._get, DELETE=self._delete),
            stored("/v1/responses/{id}/input_items", GET=self._input_items),
        ]

    async def _get(self, request: Request, tenant: Tenant) -> Any:
        _check_query(request)
        body = await asyncio.to_thread(self._store.get, tenant.name, request.path_params["id"])
        return Response(body, media_type="application/json")

    async def _delete(self, request: Request, tenant: Tenant) -> Any:
        _check_query(request)
        response_id = request.path_params["id"]
        await asyncio.to_thread(self._store.delete, tenant.name, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    async def _input_items(self, request: Request, tenant: Tenant) -> Any:
        _check_query(request, "limit", "order", "after")
        most, after = limit(request, LISTED, MAX_LISTED), request.query_params.get("after")
        order = chosen(request, "order", "desc", "asc")
        items = await asyncio.to_thread(self._store.inputs, tenant.name, request.path_params["id"])
        if order == "desc":
            items.reverse()
        if after is not None:
            places = [place for place, item in enumerate(items) if item["id"] == after]
            if not places:
                raise InvalidArgument("after", f"must be the id of an item of the response, got {after!r:.100}")
            items = items[places[-1] + 1 :]
        return page(items[:most], len(items) > most)


def _response_id(stream: ResponseDeltas, context: RequestContext) -> str:
    """Return an id, the same for a retry with an idempotency key."""
    key = context.carrier.get(IDEMPOTENCY.lower())
    if key is None:
        return f"resp_{secrets.token_hex(24)}"
    first = f"{context.tenant.name}/{key}/{stream.request_id}/{stream.created_s}"
    return f"resp_{hashlib.sha256(first.encode()).hexdigest()[:48]}"


def _check_query(request: Request, *allowed: str) -> None:
    for name in request.query_params:
        if name not in allowed:
            raise InvalidArgument(f"{name:.100}", "is not supported; leave it out")
