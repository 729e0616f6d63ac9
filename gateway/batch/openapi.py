"""The paths of files and batches in the published OpenAPI document."""

from __future__ import annotations

from typing import Any

from gateway.batch.endpoints import MAX_FILES_LISTED, MAX_LISTED, BatchRequest
from gateway.batch.store import OUTPUT_PURPOSE, PURPOSE
from gateway.config.settings import Settings

_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
_AFTER = {"name": "after", "in": "query", "schema": {"type": "string"}}
_OK = {"description": "OK"}
_JSON = {"application/json": {"schema": {"type": "object"}}}
_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_FORM = {
    "type": "object",
    "required": ["purpose", "file"],
    "additionalProperties": False,
    "properties": {
        "purpose": {"type": "string", "enum": [PURPOSE]},
        "file": {"type": "string", "format": "binary", "minLength": 1},
    },
}


def paths(settings: Settings, refusals: dict[str, Any]) -> dict[str, Any]:
    """Return the operations by path. refusals: the error responses of any endpoint, by status."""
    batch = BatchRequest.model_json_schema()
    if not settings.batch_webhook_origins:
        del batch["properties"]["webhook_url"]
    listed_files = {"name": "purpose", "in": "query", "schema": {"enum": [PURPOSE, OUTPUT_PURPOSE]}}
    order = {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}}

    def operation(*parameters: dict, body: dict | None = None, content: dict = _JSON) -> dict[str, Any]:
        described = {"parameters": list(parameters), "responses": {"200": _OK | {"content": content}, **refusals}}
        return described | ({"requestBody": {"required": True, "content": body}} if body is not None else {})

    return {
        "/v1/files": {
            "get": operation(_limit(MAX_FILES_LISTED), _AFTER, listed_files, order),
            "post": operation(body={"multipart/form-data": {"schema": _FORM}}),
        },
        "/v1/files/{id}": {"get": operation(_ID), "delete": operation(_ID)},
        "/v1/files/{id}/content": {"get": operation(_ID, content=_BYTES)},
        "/v1/batches": {
            "get": operation(_limit(MAX_LISTED), _AFTER),
            "post": operation(body={"application/json": {"schema": batch}}),
        },
        "/v1/batches/{id}": {"get": operation(_ID)},
        "/v1/batches/{id}/cancel": {"post": operation(_ID)},
    }


def _limit(maximum: int) -> dict[str, Any]:
    return {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": maximum}}
