"""Files and batches as OpenAI's clients use them: database, endpoints and worker over a running service.

A tenant sees its own files and batches; another tenant's gives the same response as one that never existed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import Field, StrictStr
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from contract.errors import InvalidArgument, Overloaded
from gateway.api import admin
from gateway.api.openai_http import chosen, complete, counted_route, limit, page
from gateway.api.strict_model import Metadata, StrictModel
from gateway.batch import multipart, webhook
from gateway.batch.pace import InteractiveSignals
from gateway.batch.store import OUTPUT_PURPOSE, PURPOSE, Batch, BatchLimits, BatchStore, File, FileTooLarge
from gateway.batch.worker import FORMATTERS, BatchWorker
from gateway.config.tenant import Tenant
from gateway.service import Service
from gateway.tools.vocabulary import Vocabulary

MAX_UPLOADS, MAX_TENANT_UPLOADS = 8, 4  # at once, of all tenants and of one
MAX_WINDOW_HOURS = 168
_WINDOW = re.compile(r"([1-9][0-9]{0,2})h")
MAX_LISTED, MAX_FILES_LISTED = 100, 10_000


class BatchRequest(StrictModel):
    """The body of POST /v1/batches. webhook_url is our extension: it is called when the batch has ended."""

    input_file_id: Annotated[StrictStr, Field(min_length=1, max_length=100)]
    endpoint: StrictStr = Field(json_schema_extra={"enum": list(FORMATTERS)})
    completion_window: StrictStr = Field(json_schema_extra={"enum": ["24h"]})
    metadata: Metadata | None = None
    webhook_url: StrictStr | None = None

    @property
    def window_s(self) -> float:
        found = _WINDOW.fullmatch(self.completion_window)
        if found is None or int(found[1]) > MAX_WINDOW_HOURS:
            problem = f"must be 1h to {MAX_WINDOW_HOURS}h, got {self.completion_window!r:.50}"
            raise InvalidArgument("completion_window", problem)
        return int(found[1]) * 3600.0


class Batches:
    """Started after the service and closed before. Raises: InvalidArgument if a setting cannot be used."""

    def __init__(self, service: Service, vocabulary: Vocabulary) -> None:
        settings, signals = service.settings, InteractiveSignals(service)
        assert settings.batch_db is not None, "batches are off"
        self._service, self._webhooks = service, webhook.configured(settings)
        self._uploads: list[str] = []  # the tenant of each
        bounds = {name: getattr(settings, f"batch_{name}") for name in ("max_file_bytes", "max_bytes", "max_batches")}
        self._store = BatchStore(settings.batch_db, BatchLimits(**bounds))
        self._worker = BatchWorker(
            self._store,
            partial(complete, service, vocabulary),
            service.authentication.named,
            signals,
            service.metrics.registry,
            self._webhooks,
            settings,
            on_cut=signals.forget,
        )
        self.start = self._worker.start

    async def close(self) -> None:
        await self._worker.close()
        self._store.close()

    async def upload(self, request: Request, tenant: Tenant) -> Any:
        if len(self._uploads) >= MAX_UPLOADS:
            raise Overloaded(f"{MAX_UPLOADS}/{MAX_UPLOADS} files are being uploaded", 5.0)
        alone = self._service.configuration.keyless  # there is no other tenant to keep a share for
        if self._uploads.count(tenant.name) >= MAX_TENANT_UPLOADS and not alone:
            raise Overloaded(f"{MAX_TENANT_UPLOADS}/{MAX_TENANT_UPLOADS} files of this tenant are being uploaded", 5.0)
        self._uploads.append(tenant.name)
        try:
            return _file(await self._upload(request, tenant.name))
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

    async def files(self, request: Request, tenant: Tenant) -> Any:
        query = request.query_params
        found, more = await asyncio.to_thread(
            self._store.files,
            tenant.name,
            limit(request, MAX_FILES_LISTED, MAX_FILES_LISTED),
            query.get("after", ""),
            purpose=chosen(request, "purpose", PURPOSE, OUTPUT_PURPOSE) if "purpose" in query else "",
            oldest_first=chosen(request, "order", "desc", "asc") == "asc",
        )
        return page([_file(file) for file in found], more)

    async def file(self, request: Request, tenant: Tenant) -> Any:
        return _file(await asyncio.to_thread(self._store.file, tenant.name, request.path_params["id"]))

    async def delete_file(self, request: Request, tenant: Tenant) -> Any:
        file_id = request.path_params["id"]
        await asyncio.to_thread(self._store.delete_file, tenant.name, file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    async def content(self, request: Request, tenant: Tenant) -> Any:
        file_id = request.path_params["id"]
        file = await asyncio.to_thread(self._store.file, tenant.name, file_id)
        parts = await asyncio.to_thread(self._store.content, tenant.name, file_id)

        async def read() -> AsyncIterator[bytes]:
            while part := await asyncio.to_thread(next, parts, b""):
                yield part

        headers = {"content-length": str(file.bytes), "x-content-type-options": "nosniff"}
        return StreamingResponse(read(), headers=headers, media_type="application/octet-stream")

    async def create(self, request: Request, tenant: Tenant) -> Any:
        body = await admin.body(self._service, request, BatchRequest)
        if body.endpoint not in FORMATTERS:
            raise InvalidArgument("endpoint", f"must be {' or '.join(FORMATTERS)}, got {body.endpoint!r:.100}")
        if body.webhook_url is not None:
            self._webhooks.check(body.webhook_url)
        fields = body.model_dump(include={"endpoint", "input_file_id", "completion_window"})
        batch = await asyncio.to_thread(
            self._store.create_batch,
            tenant.name,
            tenant.levels[-1].name if tenant.levels else "",
            window_s=body.window_s,
            metadata=body.metadata or {},
            webhook_url=body.webhook_url or "",
            **fields,
        )
        self._worker.wake()
        return _batch(batch)

    async def batches(self, request: Request, tenant: Tenant) -> Any:
        after = request.query_params.get("after", "")
        found, more = await asyncio.to_thread(self._store.batches, tenant.name, limit(request, 20, MAX_LISTED), after)
        return page([_batch(batch) for batch in found], more)

    async def batch(self, request: Request, tenant: Tenant) -> Any:
        return _batch(await asyncio.to_thread(self._store.batch, tenant.name, request.path_params["id"]))

    async def cancel(self, request: Request, tenant: Tenant) -> Any:
        batch = await asyncio.to_thread(self._store.cancel, tenant.name, request.path_params["id"])
        self._worker.wake()
        return _batch(batch)

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
