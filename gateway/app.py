"""Build the HTTP application: OpenAI's endpoints and health over one Service."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import openapi
from gateway.api import admin, encoder_http, error_responses, monitoring, samples, tokenization, usage
from gateway.api.encoder_http import EncoderEndpoint
from gateway.api.formatters import ChatFormatter, CompletionFormatter
from gateway.api.openai_http import OpenAIEndpoint, answered
from gateway.api.responses.endpoint import ResponsesEndpoint
from gateway.api.responses.store import ResponseStore
from gateway.api.tokenization import TokenizationEndpoint
from gateway.batch.endpoints import Batches
from gateway.cache import semantic_cache
from gateway.cache.reuse import ResponseReuse
from gateway.config.tenant import Tenant
from gateway.models import ServedModel
from gateway.service import Service
from gateway.tools.vocabulary import Vocabulary


def build(service: Service) -> ASGIApp:
    """Return the application; its lifespan starts and closes the service."""
    settings = service.settings
    vocabulary = Vocabulary(settings.tokenizer)
    semantic = semantic_cache.configured(
        settings,
        time.monotonic,
        service.metrics.registry,
        service.encoding,
        lambda model: service.encoder_pool(model, "embeddings", Tenant()),
    )
    reuse = ResponseReuse(service, service.configuration.policy.reuse, time.monotonic, semantic)
    batches = Batches(service, vocabulary) if settings.batch_db else None
    responses = ResponseStore(settings)

    def described(model: ServedModel) -> dict[str, Any]:
        prices = service.configuration.policy.prices
        return model.describe(prices.currency if prices else "USD")

    async def models(request: Request, tenant: Tenant) -> Any:
        return {"object": "list", "data": [described(model) for model in service.models_of(tenant)]}

    async def get_model(request: Request, tenant: Tenant) -> Any:
        return described(service.model_of(request.path_params["name"], tenant))

    async def tokenizer_info(request: Request, tenant: Tenant) -> Any:
        model = service.model_of(request.query_params.get("model", settings.triton_model), tenant)
        return await asyncio.to_thread(tokenization.info, model.rules.tokenizer)

    async def schema(request: Request) -> Response:
        # orjson has no integers beyond 64 bits, and the schema's limits exceed them.
        return Response(json.dumps(openapi.document(settings)), media_type="application/json")

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await service.start()
        if batches is not None:
            await batches.start()
        yield
        if batches is not None:
            await batches.close()
        await service.close()
        await reuse.aclose()
        responses.close()

    post = partial(Route, methods=["POST"])
    application = Starlette(
        routes=[
            Route("/v1/models", answered(service, models)),
            Route("/v1/models/{name:path}", answered(service, get_model)),
            post("/v1/chat/completions", OpenAIEndpoint(service, reuse, ChatFormatter, vocabulary)),
            post("/v1/completions", OpenAIEndpoint(service, reuse, CompletionFormatter, vocabulary)),
            *ResponsesEndpoint(service, reuse, vocabulary, responses).routes(),
            *(post(path, EncoderEndpoint(service, kind)) for path, kind in encoder_http.BODIES.items()),
            *(post(path, TokenizationEndpoint(service, kind)) for path, kind in tokenization.BODIES.items()),
            Route("/tokenizer_info", answered(service, tokenizer_info)),
            *monitoring.health_routes(service, public=True),
            *admin.routes(service),
            *samples.routes(service),
            *usage.routes(service),
            post("/v1/feedback", answered(service, partial(samples.feedback, service))),
            Route("/openapi.json", schema),
            *(batches.routes() if batches is not None else ()),
        ],
        exception_handlers={HTTPException: _http_exception},
        lifespan=lifespan,
    )
    application.router.redirect_slashes = False  # a redirect would go to the host that the client's Host header names
    endpoints = {route.path: route.endpoint for route in application.routes if isinstance(route, Route)}
    streaming = {path: endpoint for path, endpoint in endpoints.items() if isinstance(endpoint, OpenAIEndpoint)}

    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette would pass every token through two functions and every request through ten.
        direct = streaming.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (direct or application)(scope, receive, send)

    return dispatch


async def _http_exception(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(exc.status_code, "bad_request")
    problem = f"{request.method} {request.url.path}: {exc.detail}"
    status, headers, body = error_responses.plain(exc.status_code, problem, code)
    allowed = [(key.lower().encode(), value.encode()) for key, value in (exc.headers or {}).items()]
    return error_responses.response(status, [*headers, *allowed], body)
