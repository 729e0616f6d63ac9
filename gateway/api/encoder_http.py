"""Serve /v1/embeddings, /v1/rerank and /v1/score: a JSON body in, a JSON response out."""

from __future__ import annotations

import base64
import re
import time
from typing import Any

import numpy as np
import orjson
from starlette.requests import Request

from contract.errors import InvalidArgument
from gateway.api import openai_http, schemas
from gateway.api.encoder_schemas import EmbeddingsRequest, RerankRequest, ScoreRequest
from gateway.api.openai_http import OpenAIEndpoint
from gateway.api.response_stream import ResponseStream
from gateway.config.tenant import Tenant
from gateway.encoding import EncodedRows
from gateway.request_context import RequestContext
from gateway.service import Service

EncoderBody = EmbeddingsRequest | RerankRequest | ScoreRequest
_ROW = re.compile(r"(text_input|text_pair|input_ids)\[(\d+)\]")


class EncoderEndpoint(OpenAIEndpoint):
    """Serve one endpoint of an encoder, as an ASGI application."""

    def __init__(self, service: Service, schema: type[EncoderBody]) -> None:
        self._service, self._schema = service, schema
        self.operation = schema.operation

    async def _handle(
        self, response: ResponseStream, request: Request, tenant: Tenant, data: bytes, request_id: str
    ) -> None:
        openai_http.check_request_id(request_id)
        body: EncoderBody = schemas.validated(self._schema, data)
        pool = self._service.encoder_pool(body.model, self._schema.capability, tenant)
        model = self._service.model_of(body.model, tenant)
        limit_s = self._service.settings.request_timeout_s
        timeout_s = openai_http.requested_timeout_s(request.headers.get("x-trident-timeout-s"), limit_s)
        headers = openai_http.joined_headers(request)
        context = RequestContext(tenant, "http", self.operation, request_id, headers, model=model)
        context = self._service.classified(context)
        try:
            encoded = await self._service.encoding.admitted(body.rows(), pool, context, timeout_s)
        except InvalidArgument as exc:
            raise _for_body(exc, body) from exc
        body.model = model.name
        fields = answer(body, encoded, request_id)
        told = {**encoded.headers, **self._service.context_headers(context)}
        await response.respond(
            200,
            [*openai_http.response_headers(request_id, told), openai_http.JSON],
            orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY),
        )


def answer(body: EncoderBody, encoded: EncodedRows, request_id: str) -> dict[str, Any]:
    """Return the response to a body as its clients read it."""
    usage = {"prompt_tokens": encoded.tokens, "total_tokens": encoded.tokens}
    values = np.ascontiguousarray(encoded.values)
    if isinstance(body, EmbeddingsRequest):
        in_base64 = body.encoding_format == "base64"
        vectors = [base64.b64encode(row).decode() for row in values] if in_base64 else list(values)
        data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(vectors)]
        return {"object": "list", "data": data, "model": body.model, "usage": usage}
    scores = values[:, 0].tolist()
    if isinstance(body, ScoreRequest):
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        about = {"id": f"score-{request_id}", "object": "list", "created": int(time.time()), "model": body.model}
        return {**about, "data": data, "usage": {**usage, "completion_tokens": 0}}
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
    if body.return_documents:
        texts = body.texts
        results = [{**result, "document": {"text": texts[result["index"]]}} for result in results]
    return {"id": f"rerank-{request_id}", "model": body.model, "results": results, "usage": usage}


def _for_body(error: InvalidArgument, body: EncoderBody) -> InvalidArgument:
    """Return the error of an encoder or of admission, about the field of this body."""
    match = _ROW.fullmatch(error.field)
    if match is not None:
        return type(error)(body.field(match[1], int(match[2])), error.problem)
    if error.field == "text_pair" and isinstance(body, EmbeddingsRequest):
        return InvalidArgument("model", "scores pairs of texts and makes no embeddings; use /v1/rerank or /v1/score")
    inputs = ("max_tokens", "text_input", "text_pair", "input_ids")
    return type(error)(body.main_field if error.field in inputs else error.field, error.problem)
