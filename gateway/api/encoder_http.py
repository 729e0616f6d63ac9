"""Serve /v1/embeddings, /v1/rerank and /v1/score: a JSON body in, a JSON response out."""

from __future__ import annotations

import base64
import re
import time
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import orjson
from pydantic import BeforeValidator, Field, StrictBool, StrictInt, StrictStr, WithJsonSchema
from starlette.requests import Request

from clients.wire.encoder_call import Rows
from contract.errors import InvalidArgument
from gateway.api import openai_http, schemas
from gateway.api.error_responses import JSON
from gateway.api.openai_http import OpenAIEndpoint
from gateway.api.response_stream import ResponseStream
from gateway.api.strict_model import WHOLE, StrictModel
from gateway.config.tenant import Tenant
from gateway.encoding import EncodedRows
from gateway.request_context import RequestContext
from gateway.service import Service

_ROW = re.compile(r"(text_input|text_pair|input_ids)\[(\d+)\]")
MAX_INPUTS = 2048  # OpenAI's limit
MAX_QUERY = 65_536  # characters of a text that is paired with many
_Id = Annotated[StrictInt, Field(ge=0, lt=2**31), WHOLE]
_Text = Annotated[StrictStr, Field(min_length=1)]
_FILLED = Field(min_length=1, fail_fast=True)
_Ids = Annotated[list[_Id], _FILLED]


def _check_count(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_INPUTS and not isinstance(value[0], int):
        raise ValueError(f"must have at most {MAX_INPUTS} entries, got {len(value)}")
    return value


_COUNT = BeforeValidator(_check_count)
_TEXT = {"type": "string", "minLength": 1}
_ONE_OR_MORE = {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": _TEXT}]}
_TextOrTexts = Annotated[_Text | Annotated[list[_Text], _FILLED], _COUNT, WithJsonSchema(_ONE_OR_MORE)]


class _EncoderRequest(StrictModel):
    """The fields that all share. truncate_prompt_tokens: as vLLM has it; -1 for the model's limit."""

    operation: ClassVar[str]
    capability: ClassVar[str]  # that the model needs
    main_field: ClassVar[str]  # named by errors about the whole input
    model: StrictStr
    user: StrictStr | None = None  # accepted and not stored
    truncate_prompt_tokens: Annotated[StrictInt, Field(ge=-1, lt=2**31), WHOLE] | None = None


class EmbeddingsRequest(_EncoderRequest):
    """The body of POST /v1/embeddings. prompt_name: one of the model's own prompts, put before each text."""

    operation, capability, main_field = "embeddings", "embeddings", "input"
    input: Annotated[_Text | Annotated[list[_Text], _FILLED] | _Ids | Annotated[list[_Ids], _FILLED], _COUNT]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[StrictInt, Field(ge=1, lt=2**31), WHOLE] | None = None
    prompt_name: Annotated[StrictStr, Field(min_length=1, max_length=128)] | None = None

    def rows(self) -> Rows:
        """Return a row for each input. Raises InvalidArgument."""
        given: Any = self.input
        if isinstance(given, str) or isinstance(given[0], int):
            given = [given]
        has_ids = not isinstance(given[0], str)
        if has_ids and self.prompt_name is not None:
            raise InvalidArgument("prompt_name", "must be left out with token ids, which have no prompt")
        texts, ids = ((), tuple(map(tuple, given))) if has_ids else (tuple(given), ())
        return Rows(texts, (), ids, self.prompt_name or "", self.dimensions, self.truncate_prompt_tokens)

    def field(self, name: str, row: int) -> str:
        """Return the field of this body that an encoder's error about an input names."""
        return "input" if isinstance(self.input, str) or isinstance(self.input[0], int) else f"input[{row}]"


class Document(StrictModel):
    """A document as an object, as Cohere's and Jina's clients may send it."""

    text: _Text


class RerankRequest(_EncoderRequest):
    """The body of POST /v1/rerank, in Cohere's and Jina's form."""

    operation, capability, main_field = "rerank", "rerank", "documents"
    query: Annotated[StrictStr, Field(min_length=1, max_length=MAX_QUERY)]
    documents: Annotated[list[_Text | Document], _FILLED, _COUNT]
    top_n: Annotated[StrictInt, Field(ge=1, lt=2**31), WHOLE] | None = None
    return_documents: StrictBool | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(document if isinstance(document, str) else document.text for document in self.documents)

    def rows(self) -> Rows:
        """Return a pair of the query and each document."""
        texts = self.texts
        return Rows((self.query,) * len(texts), texts, truncate=self.truncate_prompt_tokens)

    def field(self, name: str, row: int) -> str:
        return "query" if name == "text_input" else f"documents[{row}]"


class ScoreRequest(_EncoderRequest):
    """The body of POST /v1/score, in vLLM's form: pairs, or one text with each of several."""

    operation, capability, main_field = "score", "rerank", "text_1"
    text_1: _TextOrTexts
    text_2: _TextOrTexts

    def rows(self) -> Rows:
        """Return the pairs. Raises InvalidArgument."""
        first, second = ([text] if isinstance(text, str) else text for text in (self.text_1, self.text_2))
        if len(first) == 1:
            if len(second) > 1 and len(first[0]) > MAX_QUERY:
                raise InvalidArgument("text_1", f"must have at most {MAX_QUERY} characters with several text_2")
            first = first * len(second)
        if len(first) != len(second):
            raise InvalidArgument("text_1", f"must be one text or as many as text_2, {len(second)}, got {len(first)}")
        return Rows(tuple(first), tuple(second), truncate=self.truncate_prompt_tokens)

    def field(self, name: str, row: int) -> str:
        own, value = ("text_1", self.text_1) if name == "text_input" else ("text_2", self.text_2)
        return own if isinstance(value, str) or len(value) == 1 else f"{own}[{row}]"


EncoderBody = EmbeddingsRequest | RerankRequest | ScoreRequest
BODIES: dict[str, type[EncoderBody]] = {
    "/v1/embeddings": EmbeddingsRequest,
    "/v1/rerank": RerankRequest,
    "/v1/score": ScoreRequest,
}


class EncoderEndpoint(OpenAIEndpoint):
    """Serve one endpoint of an encoder, as an ASGI application."""

    def __init__(self, service: Service, schema: type[EncoderBody]) -> None:
        self._service, self._schema = service, schema
        self.operation = schema.operation

    async def _handle(
        self, response: ResponseStream, request: Request, tenant: Tenant, data: bytes, request_id: str
    ) -> None:
        body: EncoderBody = schemas.validated(self._schema, data)
        pool = self._service.encoder_pool(body.model, self._schema.capability, tenant)
        model = self._service.model_of(body.model, tenant)
        timeout_s = openai_http.requested_timeout_s(request.headers, self._service.settings)
        headers = openai_http.joined(request.headers.items())
        context = RequestContext(tenant, "http", self.operation, request_id, headers, model=model)
        context = self._service.classified(context)
        try:
            encoded = await self._service.encoding.admitted(body.rows(), pool, context, timeout_s)
        except InvalidArgument as exc:
            raise _for_body(exc, body) from exc
        body.model = model.name
        told = {**encoded.headers, **self._service.context_headers(context)}
        content = orjson.dumps(answer(body, encoded, request_id), option=orjson.OPT_SERIALIZE_NUMPY)
        await response.respond(200, [*openai_http.response_headers(request_id, told), JSON], content)


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
