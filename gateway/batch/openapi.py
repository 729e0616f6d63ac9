"""The part of the published OpenAPI document that is about files and batches."""

from __future__ import annotations

from typing import Any

from gateway.batch.endpoints import MAX_FILES_LISTED, MAX_LISTED, BatchRequest
from gateway.batch.store import OUTPUT_PURPOSE, PURPOSE
from gateway.config.settings import Settings

_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
_AFTER = {"name": "after", "in": "query", "schema": {"type": "string"}}
_OBJECT = {"type": "object"}
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
    """By path. refusals: the responses that any endpoint may give, by status."""
    batch = BatchRequest.model_json_schema()
    if not settings.batch_webhook_origins:
        del batch["properties"]["webhook_url"]
    listed_files = {"name": "purpose", "in": "query", "schema": {"enum": [PURPOSE, OUTPUT_PURPOSE]}}
    order = {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}}

    def answers(*parameters: dict, body: dict | None = None, media_type: str = "application/json") -> dict[str, Any]:
        said: dict[str, Any] = {
            "responses": {"200": {"description": "It is so", "content": {media_type: {"schema": _OBJECT}}}, **refusals}
        }
        if media_type != "application/json":
            said["responses"]["200"]["content"][media_type]["schema"] = {"type": "string", "format": "binary"}
        if parameters:
            said["parameters"] = list(parameters)
        if body is not None:
            said["requestBody"] = {"required": True, "content": body}
        return said

    return {
        "/v1/files": {
            "get": answers(_limit(MAX_FILES_LISTED), _AFTER, listed_files, order),
            "post": answers(body={"multipart/form-data": {"schema": _FORM}}),
        },
        "/v1/files/{id}": {"get": answers(_ID), "delete": answers(_ID)},
        "/v1/files/{id}/content": {"get": answers(_ID, media_type="application/octet-stream")},
        "/v1/batches": {
            "get": answers(_limit(MAX_LISTED), _AFTER),
            "post": answers(body={"application/json": {"schema": batch}}),
        },
        "/v1/batches/{id}": {"get": answers(_ID)},
        "/v1/batches/{id}/cancel": {"post": answers(_ID)},
    }


def _limit(most: int) -> dict[str, Any]:
    return {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": most}}
