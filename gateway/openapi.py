"""The published OpenAPI document, made of the same schemas that bodies are held to."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from gateway.api.schemas import MAX_STOPS, ChatRequest, CompletionRequest
from gateway.batch import openapi
from gateway.config.settings import Settings

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
    _drop_bounds_of_abuse(definitions["$defs"])
    _add_rules(definitions["$defs"], settings)
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
            "/health/ready": get("application/json", "503", schema=any_object),
            "/health/deep": get("application/json", "404", "503", schema=any_object),
            **(openapi.paths(settings, refusals) if settings.batch_db else {}),
        },
        "components": definitions and {"schemas": definitions["$defs"]},
    }


def _drop_bounds_of_abuse(schema: Any) -> None:
    """Bounds that no caller comes near are not published: whoever tests by the schema would try them all."""
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _drop_bounds_of_abuse(inner)
    for name in ("maxItems", "maxProperties"):
        if isinstance(schema, dict) and isinstance(schema.get(name), int) and schema[name] > MAX_STOPS:
            del schema[name]


def _add_rules(schemas: dict[str, Any], settings: Settings) -> None:
    """What holds between fields, and what the settings allow."""
    most = settings.max_choices
    chat, completion = schemas["ChatRequest"], schemas["CompletionRequest"]
    # Two names of one limit: equal ones are taken, which a schema cannot say.
    both = {name: {"type": "integer"} for name in ("max_tokens", "max_completion_tokens")}
    chat["allOf"] = [
        {"not": {"required": list(both), "properties": both}},
        _only_with("top_logprobs", "integer", "logprobs"),
    ]
    choices = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": most}, {"type": "null"}]}
    # As many prompts as there may be with so many choices of each.
    fitting = [_several(prompts, most // prompts) for prompts in sorted({most // n for n in range(1, most + 1)})]
    completion["allOf"] = [
        {"anyOf": [{"properties": {"best_of": {"type": "null"}}}, _alike(None, 1), *map(_alike, range(1, most + 1))]},
        {"anyOf": [{"properties": {"logprobs": {"type": "null"}}}, {"properties": {"echo": {"enum": [None, False]}}}]},
        {"anyOf": [{"properties": {"prompt": {"type": "string"}}}, *fitting]},
    ]
    for schema in (chat, completion):
        schema["properties"]["n"] = choices
        schema["allOf"].append(_only_with("stream_options", "object", "stream"))


def _only_with(field: str, kind: str, switch: str) -> dict[str, Any]:
    """``field`` may be set only where ``switch`` is true."""
    return {
        "if": {"required": [field], "properties": {field: {"type": kind}}},
        "then": {"required": [switch], "properties": {switch: {"const": True}}},
    }


def _several(prompts: int, choices: int) -> dict[str, Any]:
    few = {"anyOf": [{"type": "integer", "maximum": choices}, {"type": "null"}]}
    return {"properties": {"prompt": {"type": "array", "maxItems": prompts}, "n": few}}


def _alike(n: int | None, best_of: int | None = None) -> dict[str, Any]:
    best_of = best_of or n
    return {"required": ["best_of"], "properties": {"best_of": {"const": best_of}, "n": {"const": n}}}


def _answer(description: str, media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {media_type: {"schema": schema}}}
