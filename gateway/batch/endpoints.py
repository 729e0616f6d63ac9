"""Serve /v1/files and /v1/batches as OpenAI's clients use them.

A tenant sees its own files and batches; another tenant's gives the same response as one that never existed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Annotated, Any

import orjson
from pydantic import Field, StrictStr
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from contract.errors import InvalidArgument, Overloaded
from gateway.api import admin
from gateway.api.openai_http import counted_route
from gateway.api.strict_model import StrictModel
from gateway.batch import multipart
from gateway.batch.store import OUTPUT_PURPOSE, PURPOSE, Batch, BatchStore, File, FileTooLarge
from gateway.batch.webhook import Webhooks
from gateway.batch.worker import FORMATTERS
from gateway.config.tenant import Tenant
from gateway.service import Service

MAX_UPLOADS, MAX_TENANT_UPLOADS = 8, 4  # at once, of all tenants and of one
MAX_WINDOW_HOURS = 168
_WINDOW = re.compile(r"([1-9][0-9]{0,2})h")
MAX_LISTED, MAX_FILES_LISTED = 100, 10_000
_Text = Annotated[StrictStr, Field(max_length=512)]


class BatchRequest(StrictModel):
    """The body of POST /v1/batches. webhook_url is our extension: it is called when the batch has ended."""

    input_file_id: Annotated[StrictStr, Field(min_length=1, max_length=100)]
    endpoint: StrictStr = Field(json_schema_extra={"enum": list(FORMATTERS)})
    completion_window: StrictStr = Field(json_schema_extra={"enum": ["24h"]})
    metadata: dict[Annotated[StrictStr, Field(max_length=64)], _Text] | None = Field(default=None, max_length=16)
    webhook_url: StrictStr | None = None

    @property
    def window_s(self) -> float:
        found = _WINDOW.fullmatch(self.completion_window)
        if found is None or int(found[1]) > MAX_WINDOW_HOURS:
            raise InvalidArgument(
                "completion_window", f"must be 1h to {MAX_WINDOW_HOURS}h, got {self.completion_window!r:.50}"
            )
        return int(found[1]) * 3600.0


class BatchEndpoints:
    """The routes of files and batches. wake: called when a batch was created or cancelled."""

    def __init__(self, service: Service, store: BatchStore, webhooks: Webhooks, wake: Callable[[], None]) -> None:
        self._service, self._store, self._webhooks, self._wake = service, store, webhooks, wake
        self._uploads: list[str] = []  # the tenant of each

    async def upload(self, request: Request, tenant: Tenant) -> Response:
        if len(self._uploads) >= MAX_UPLOADS:
            raise Overloaded(f"{MAX_UPLOADS}/{MAX_UPLOADS} files are being uploaded", 5.0)
        alone = self._service.configuration.keyless  # there is no other tenant to keep a share for
        if self._uploads.count(tenant.name) >= MAX_TENANT_UPLOADS and not alone:
            raise Overloaded(f"{MAX_TENANT_UPLOADS}/{MAX_TENANT_UPLOADS} files of this tenant are being uploaded", 5.0)
        self._uploads.append(tenant.name)
        try:
            return _json(_file(await self._upload(request, tenant.name)))
        finally:
            self._uploads.remove(tenant.name)

    async def _upload(self, request: Request, tenant: str) -> File:
        declared = request.headers.get("content-length", "0")
        max_bytes = self._store.limits.max_file_bytes
        if declared.isdigit() and int(declared) > max_bytes + multipart.OVERHEAD_BYTES:
            raise FileTooLarge(max_bytes)
        file_id, number, last = "", 0, None
        try:
            timeout_s = self._service.settings.body_timeout_s
            async for chunk in multipart.file_chunks(request, timeout_s, max_bytes):
                if not file_id:
                    file_id = await asyncio.to_thread(self._store.open_file, tenant, chunk.filename[-255:])
                if chunk.data:
                    await asyncio.to_thread(self._store.append, file_id, number, chunk.data)
                    number += 1
                last = chunk
            assert last is not None, "file_chunks() yields at least one"
            keep_s = _expiry_s(last.fields)
            if not number:
                raise InvalidArgument("file", "must be a file of JSON lines, got an empty one")
            return await asyncio.to_thread(self._store.close_file, tenant, file_id, keep_s)
        except BaseException:
            if file_id:
                await asyncio.shield(asyncio.to_thread(self._store.abandon_file, file_id))
            raise

    async def files(self, request: Request, tenant: Tenant) -> Response:
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidArgument("order", f"must be asc or desc, got {order!r:.50}")
        purpose = request.query_params.get("purpose")
        if purpose not in (None, PURPOSE, OUTPUT_PURPOSE):
            raise InvalidArgument("purpose", f"must be {PURPOSE} or {OUTPUT_PURPOSE}, got {purpose!r:.50}")
        found, more = await asyncio.to_thread(
            self._store.files,
            tenant.name,
            _limit(request, MAX_FILES_LISTED, MAX_FILES_LISTED),
            request.query_params.get("after", ""),
            purpose=purpose or "",
            oldest_first=order == "asc",
        )
        return _list([_file(file) for file in found], more)

    async def file(self, request: Request, tenant: Tenant) -> Response:
        return _json(_file(await asyncio.to_thread(self._store.file, tenant.name, request.path_params["id"])))

    async def delete_file(self, request: Request, tenant: Tenant) -> Response:
        file_id = request.path_params["id"]
        await asyncio.to_thread(self._store.delete_file, tenant.name, file_id)
        return _json({"id": file_id, "object": "file", "deleted": True})

    async def content(self, request: Request, tenant: Tenant) -> Response:
        file_id = request.path_params["id"]
        file = await asyncio.to_thread(self._store.file, tenant.name, file_id)
        parts = await asyncio.to_thread(self._store.content, tenant.name, file_id)

        async def read() -> AsyncIterator[bytes]:
            while part := await asyncio.to_thread(next, parts, b""):
                yield part

        headers = {"content-length": str(file.bytes), "x-content-type-options": "nosniff"}
        return StreamingResponse(read(), headers=headers, media_type="application/octet-stream")

    async def create(self, request: Request, tenant: Tenant) -> Response:
        body = await admin.body(self._service, request, BatchRequest)
        if body.endpoint not in FORMATTERS:
            raise InvalidArgument("endpoint", f"must be {' or '.join(FORMATTERS)}, got {body.endpoint!r:.100}")
        if body.webhook_url is not None:
            self._webhooks.check(body.webhook_url)
        batch = await asyncio.to_thread(
            self._store.create_batch,
            tenant.name,
            tenant.levels[-1].name if tenant.levels else "",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            window_s=body.window_s,
            metadata=body.metadata or {},
            webhook_url=body.webhook_url or "",
        )
        self._wake()
        return _json(_batch(batch))

    async def batches(self, request: Request, tenant: Tenant) -> Response:
        after, limit = request.query_params.get("after", ""), _limit(request, 20, MAX_LISTED)
        found, more = await asyncio.to_thread(self._store.batches, tenant.name, limit, after)
        return _list([_batch(batch) for batch in found], more)

    async def batch(self, request: Request, tenant: Tenant) -> Response:
        return _json(_batch(await asyncio.to_thread(self._store.batch, tenant.name, request.path_params["id"])))

    async def cancel(self, request: Request, tenant: Tenant) -> Response:
        batch = await asyncio.to_thread(self._store.cancel, tenant.name, request.path_params["id"])
        self._wake()
        return _json(_batch(batch))

    def routes(self) -> list[Route]:
        files, batches = (partial(counted_route, self._service, name) for name in ("files", "batches"))
        return [
            files("/v1/files", GET=self.files, POST=self.upload),
            files("/v1/files/{id}", GET=self.file, DELETE=self.delete_file),
            files("/v1/files/{id}/content", GET=self.content),
            batches("/v1/batches", GET=self.batches, POST=self.create),
            batches("/v1/batches/{id}", GET=self.batch),
            batches("/v1/batches/{id}/cancel", POST=self.cancel),
        ]


def _expiry_s(fields: Mapping[str, str]) -> float | None:
    """Return the requested lifetime of a file in seconds, None for the default. Raises: InvalidArgument."""
    allowed = {"purpose", "expires_after[anchor]", "expires_after[seconds]"}
    for name in fields.keys() - allowed:
        raise InvalidArgument(name, f"must be one of {', '.join(sorted(allowed))} and file")
    if fields.get("purpose") != PURPOSE:
        raise InvalidArgument("purpose", f"must be {PURPOSE}, got {fields.get('purpose', '')!r:.50}")
    seconds, anchor = fields.get("expires_after[seconds]"), fields.get("expires_after[anchor]")
    if seconds is None and anchor is None:
        return None
    if anchor != "created_at":
        raise InvalidArgument("expires_after[anchor]", f"must be created_at, got {anchor!r:.50}")
    if seconds is None or not re.fullmatch(r"[0-9]{4,7}", seconds) or not 3600 <= int(seconds) <= 2_592_000:
        raise InvalidArgument("expires_after[seconds]", f"must be an integer from 3600 to 2592000, got {seconds!r:.50}")
    return float(seconds)


def _limit(request: Request, default: int, maximum: int) -> int:
    text = request.query_params.get("limit", str(default))
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= maximum:
        raise InvalidArgument("limit", f"must be an integer from 1 to {maximum}, got {text!r:.50}")
    return int(text)


def _file(file: File) -> dict[str, Any]:
    shown = ("id", "bytes", "created_at", "expires_at", "filename", "purpose")
    return {"object": "file", "status": "processed", **{name: getattr(file, name) for name in shown}}


def _batch(batch: Batch) -> dict[str, Any]:
    shown = ("id", "endpoint", "input_file_id", "completion_window", "status", "output_file_id", "error_file_id")
    times = ("created", "in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling")
    errors = {"object": "list", "data": list(batch.errors)} if batch.errors else None
    usage = {
        "input_tokens": batch.input_tokens,
        "input_tokens_details": {"cached_tokens": batch.cached_tokens},
        "output_tokens": batch.output_tokens,
        "output_tokens_details": {"reasoning_tokens": batch.reasoning_tokens},
        "total_tokens": batch.input_tokens + batch.output_tokens,
    }
    return {
        "object": "batch",
        **{name: getattr(batch, name) for name in shown},
        **{f"{name}_at": getattr(batch, f"{name}_at") for name in (*times, "cancelled")},
        "errors": errors,
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "usage": usage,
        "metadata": dict(batch.metadata),
        "webhook_url": batch.webhook_url or None,
    }


def _list(data: list[dict[str, Any]], has_more: bool) -> Response:
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return _json({"object": "list", "data": data, **ends, "has_more": has_more})


def _json(table: Mapping[str, Any]) -> Response:
    return Response(orjson.dumps(table), media_type="application/json")
