"""Build the published OpenAPI document from the schemas that validate request bodies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pydantic.json_schema import models_json_schema

from gateway.api import tokenization
from gateway.api import usage as usage_api
from gateway.api.encoder_http import BODIES
from gateway.api.responses.schemas import ResponsesRequest
from gateway.api.samples import Feedback
from gateway.api.schemas import MAX_STOPS, ChatRequest, CompletionRequest
from gateway.batch.endpoints import MAX_FILES_LISTED, MAX_LISTED, BatchRequest
from gateway.batch.store import OUTPUT_PURPOSE, PURPOSE
from gateway.config.settings import Settings

_ERRORS = {
    "400": "A field is invalid; `param` names it",
    "401": "No key, or an unknown one",
    "403": "The key is not permitted to do this",
    "404": "Not found",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "429": "A budget or a limit is reached; retry after `Retry-After` seconds",
    "431": "Too many headers",
    "499": "The generation was cancelled",
    "500": "The engine or the gateway failed",
    "503": "No healthy replica",
    "504": "The deadline passed",
}

_AFTER = {"name": "after", "in": "query", "schema": {"type": "string"}}
_ORDER = {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}}
_PURPOSE = {"name": "purpose", "in": "query", "schema": {"enum": [PURPOSE, OUTPUT_PURPOSE]}}
_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
_FORM = {
    "type": "object",
    "required": ["purpose", "file"],
    "additionalProperties": False,
    "properties": {
        "purpose": {"type": "string", "enum": [PURPOSE]},
        "file": {"type": "string", "format": "binary", "minLength": 1},
    },
}
_ECHO = {"required": ["echo"], "properties": {"echo": {"const": True}}}
_NULL = {"type": "null"}
_POSITIVE: list[dict[str, Any]] = [{"type": "integer", "minimum": 1, "maximum": 2**31 - 1}, _NULL]
_NONE = {"anyOf": [_NULL, {"type": "array", "maxItems": 0}]}
_SOME = {"properties": {"tools": {"type": "array", "minItems": 1}}}
_TURN = ("content", "tool_calls", "reasoning_content")  # of an assistant's message, at least one of them
# The fields of a message by role: roles, fields that are required, fields that are allowed.
_ROLES: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (("system", "developer", "user"), ("content",), ("name",)),
    *((("assistant",), (name,), ("name", *_TURN)) for name in _TURN),
    (("tool",), ("content", "tool_call_id"), ("name",)),
)
_NOT_EMPTY = {"tool_calls": {"minItems": 1}, **dict.fromkeys(("tool_call_id", "reasoning_content"), {"minLength": 1})}


def document(settings: Settings) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document."""
    plain = {**BODIES, **tokenization.BODIES}
    kinds = (ChatRequest, CompletionRequest, ResponsesRequest, Feedback, *plain.values())
    names, definitions = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
    )
    _drop_abuse_limits(definitions["$defs"])
    _add_rules(definitions["$defs"], settings)
    error = {"type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}}
    errors = {code: _response(text, "application/json", error) for code, text in _ERRORS.items()}
    any_object = {"type": "object"}
    generated = _response("The response, or its events", "application/json", any_object)
    generated["content"]["text/event-stream"] = {"schema": {"type": "string"}}

    encoded = _response("The response", "application/json", any_object)

    def operation(*parameters: dict, content: dict | None = None, answer: dict = encoded) -> dict[str, Any]:
        described = {"parameters": list(parameters), "responses": {"200": answer, **errors}}
        return described | ({"requestBody": {"required": True, "content": content}} if content is not None else {})

    def post(kind: type, answer: dict[str, Any] = generated) -> dict[str, Any]:
        return {"post": operation(content={"application/json": {"schema": names[kind, "validation"]}}, answer=answer)}

    def get(media_type: str, *codes: str, schema: dict | None = None) -> dict[str, Any]:
        failures = {code: _response(_ERRORS[code], media_type, {}) for code in codes}
        return {"get": {"responses": {"200": _response("OK", media_type, schema or {"type": "string"}), **failures}}}

    model = get("application/json", "401", "403", "404", schema=any_object)
    model["get"]["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    usage = {path: get("application/json", "400", "401", "403", schema=any_object) for path in usage_api.PARAMETERS}
    for path, taken in usage_api.PARAMETERS.items():
        parameters = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in taken]
        usage[path]["get"]["parameters"] = parameters
    return {
        "openapi": "3.1.0",
        "info": {"title": f"Trident gateway: {settings.model}", "version": "1"},
        "paths": {
            "/v1/chat/completions": post(ChatRequest),
            "/v1/completions": post(CompletionRequest),
            "/v1/responses": post(ResponsesRequest),
            "/v1/responses/{id}": {"get": operation(_ID), "delete": operation(_ID)},
            "/v1/responses/{id}/input_items": {"get": operation(_ID, _limit(MAX_LISTED), _ORDER, _AFTER)},
            **{path: post(kind, encoded) for path, kind in plain.items()},
            "/tokenizer_info": get("application/json", "401", "403", "404", schema=any_object),
            "/v1/models": get("application/json", "401", schema=any_object),
            "/v1/models/{name}": model,
            "/health/live": get("text/plain"),
            "/health/ready": get("application/json", "503", schema=any_object),
            "/health/deep": get("application/json", "404", "503", schema=any_object),
            **({"/v1/feedback": post(Feedback, encoded)} if settings.samples else {}),
            **(usage if settings.usage_db else {}),
            **(_batch_paths(settings, operation) if settings.batch_db else {}),
        },
        "components": definitions and {"schemas": definitions["$defs"]},
    }


def _batch_paths(settings: Settings, operation: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Return the operations of files and batches by path."""
    batch = BatchRequest.model_json_schema()
    if not settings.batch_webhook_origins:
        del batch["properties"]["webhook_url"]
    content = _response("OK", "application/octet-stream", {"type": "string", "format": "binary"})
    return {
        "/v1/files": {
            "get": operation(_limit(MAX_FILES_LISTED), _ORDER, _AFTER, _PURPOSE),
            "post": operation(content={"multipart/form-data": {"schema": _FORM}}),
        },
        "/v1/files/{id}": {"get": operation(_ID), "delete": operation(_ID)},
        "/v1/files/{id}/content": {"get": operation(_ID, answer=content)},
        "/v1/batches": {
            "get": operation(_limit(MAX_LISTED), _AFTER),
            "post": operation(content={"application/json": {"schema": batch}}),
        },
        "/v1/batches/{id}": {"get": operation(_ID)},
        "/v1/batches/{id}/cancel": {"post": operation(_ID)},
    }


def _limit(maximum: int) -> dict[str, Any]:
    return {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": maximum}}


def _drop_abuse_limits(schema: Any) -> None:
    """Remove limits that protect from abuse: a tool that tests the schema would send huge bodies to exceed them."""
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _drop_abuse_limits(inner)
    for name in ("maxItems", "maxProperties"):
        if isinstance(schema, dict) and isinstance(schema.get(name), int) and schema[name] > MAX_STOPS:
            del schema[name]


def _add_rules(schemas: dict[str, Any], settings: Settings) -> None:
    """Add the rules between fields and the limits that the settings define."""
    max_choices = settings.max_choices
    schemas["Message"] = {"anyOf": [_message(schemas["Message"]["properties"], *case) for case in _ROLES]}
    chat, completion = schemas["ChatRequest"], schemas["CompletionRequest"]
    # Two names of one limit: equal values are accepted, which a schema cannot express.
    both = {name: {"type": "integer"} for name in ("max_tokens", "max_completion_tokens")}
    chat["allOf"] = [
        {"not": {"required": list(both), "properties": both}},
        _only_with("top_logprobs", "integer", "logprobs"),
    ]
    if settings.prompts is None:
        chat["required"].append("messages")
        for schema in (chat, schemas["ResponsesRequest"]):
            schema["properties"]["prompt"] = _NULL
    else:
        chat["allOf"].append({"anyOf": [{"required": ["messages"]}, {"required": ["prompt"]}]})
    forms = completion["properties"]["prompt"]["anyOf"]
    single_choice, no_ids = {"enum": [1, None]}, {"continue_ids": _NONE}
    chat["allOf"].append(_any_of(no_ids, {"n": single_choice, "response_format": _NULL, "tools": _NONE}))
    chat["allOf"].append(
        {"anyOf": [{"properties": {"tool_choice": {"enum": [None, "none", "auto"]}}}, {"required": ["tools"], **_SOME}]}
    )
    # Which values of prompt, n, best_of and continue_ids go together. The cases replace the schema of the field prompt.
    # From a case for every number of prompts schemathesis generates nothing: with n above 1 a square is published.
    single, lists = {"anyOf": forms[:2]}, forms[2:]
    few = math.isqrt(max_choices)
    completion["allOf"] = [
        {"anyOf": [{"properties": {"max_tokens": {"anyOf": _POSITIVE}}}, _ECHO]},
        _any_of(
            {"prompt": single, "n": single_choice, "response_format": _NULL},
            {"prompt": single, "n": single_choice, **no_ids},
            {"prompt": single, "best_of": _NULL, **no_ids},
            {"prompt": {"anyOf": [{**form, "maxItems": max_choices} for form in lists]}, "n": single_choice, **no_ids},
            {"prompt": {"anyOf": [{**form, "maxItems": few} for form in lists]}, "n": _up_to(few)}
            | {"best_of": _NULL, **no_ids},
        ),
    ]
    completion["properties"]["prompt"] = {"title": "Prompt"}
    # It equals n. Of all equal values one pair is published.
    completion["properties"]["best_of"] = {"enum": [1, None], "default": None}
    for schema in (chat, completion):
        schema["properties"]["n"] = _up_to(max_choices)
        schema["properties"]["truncate_prompt_tokens"] = {"anyOf": [{"const": -1}, *_POSITIVE]}
        schema["allOf"].append(_only_with("stream_options", "object", "stream"))


def _any_of(*cases: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [{"properties": case} for case in cases]}


def _up_to(maximum: int) -> dict[str, Any]:
    return {"anyOf": [{"type": "integer", "minimum": 1, "maximum": maximum}, _NULL]}


def _message(
    fields: dict[str, Any], roles: tuple[str, ...], required: tuple[str, ...], allowed: tuple[str, ...]
) -> dict[str, Any]:
    shown = {name: schema if name in allowed or "enum" in schema else _NULL for name, schema in fields.items()}
    for name in required:
        cases = [{**case, **_NOT_EMPTY.get(name, {})} for case in fields[name]["anyOf"] if case != _NULL]
        shown[name] = {"anyOf": cases}
    shown["role"] = {"enum": list(roles)}
    return {"type": "object", "properties": shown, "required": ["role", *required], "additionalProperties": False}


def _only_with(field: str, kind: str, switch: str) -> dict[str, Any]:
    """Return the rule that ``field`` may be set only where ``switch`` is true."""
    return {
        "if": {"required": [field], "properties": {field: {"type": kind}}},
        "then": {"required": [switch], "properties": {switch: {"const": True}}},
    }


def _response(description: str, media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {media_type: {"schema": schema}}}
