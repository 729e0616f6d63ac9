"""The published OpenAPI document, made of the same schemas that bodies are held to."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from gateway import batch_openapi
from gateway.schemas import ChatRequest, CompletionRequest
from gateway.settings import Settings

_REFUSALS = {
    "400": "A field is wrong; `param` names it",
    "401": "No key, or an unknown one",
    "403": "The key may not do this",
    "404": "No such model",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "429": "A budget or a bound is reached; `Retry-After` says when to come back",
    "431": "Too many headers",
    "499": "The generation was cancelled",
    "500": "The engine or the gateway failed",
    "503": "No replica can serve now",
    "504": "The deadline passed",
}


def document(settings: Settings) -> dict[str, Any]:
    """OpenAPI 3.1."""
    names, definitions = models_json_schema(
        [(ChatRequest, "validation"), (CompletionRequest, "validation")], ref_template="#/components/schemas/{model}"
    )
    error = {"type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}}
    refusals = {code: _answer(said, "application/json", error) for code, said in _REFUSALS.items()}
    any_object = {"type": "object"}
    generated = _answer("The answer, or its events", "application/json", any_object)
    generated["content"]["text/event-stream"] = {"schema": {"type": "string"}}

    def post(kind: type) -> dict[str, Any]:
        body = {"required": True, "content": {"application/json": {"schema": names[kind, "validation"]}}}
        return {"post": {"requestBody": body, "responses": {"200": generated, **refusals}}}

    def get(media_type: str, *codes: str, schema: dict | None = None) -> dict[str, Any]:
        answer = {"200": _answer("It is so", media_type, schema or {"type": "string"})}
        return {"get": {"responses": {**answer, **{code: _answer("It is not so", media_type, {}) for code in codes}}}}

    one_model = get("application/json", "401", "403", "404", schema=any_object)
    one_model["get"]["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return {
        "openapi": "3.1.0",
        "info": {"title": f"Trident gateway: {settings.model}", "version": "1"},
        "paths": {
            "/v1/chat/completions": post(ChatRequest),
            "/v1/completions": post(CompletionRequest),
            "/v1/models": get("application/json", "401", schema=any_object),
            "/v1/models/{name}": one_model,
            "/health/live": get("text/plain"),
            "/health/ready": get("text/plain", "503"),
            "/health/deep": get("application/json", "503", schema=any_object),
            "/metrics": get("text/plain"),
            **(batch_openapi.paths(settings, refusals) if settings.batch_db else {}),
        },
        "components": definitions and {"schemas": definitions["$defs"]},
    }


def _answer(description: str, media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {media_type: {"schema": schema}}}
