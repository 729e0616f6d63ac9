"""Batch work as one thing to be mounted: its database, its door, its worker, over one running service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.routing import Route

from gateway.api.openai_http import complete
from gateway.api.vocabulary import Vocabulary
from gateway.batch.aimd import PacePolicy
from gateway.batch.endpoints import BatchDoor
from gateway.batch.signals import InteractiveSignals
from gateway.batch.store import BatchLimits, BatchStore
from gateway.batch.webhook import Webhooks
from gateway.batch.worker import BatchWorker, Form
from gateway.request_context import RequestContext
from gateway.service import Service


class Batches:
    """``start`` it after the service and ``close`` it before. Raises InvalidArgument if its settings cannot be used.

    Only where ``settings.batch_db`` is set.
    """

    def __init__(self, service: Service, vocabulary: Vocabulary) -> None:
        settings = service.settings
        assert settings.batch_db is not None, "batches are off"
        self._service, self._vocabulary = service, vocabulary
        limits = BatchLimits(
            max_file_bytes=settings.batch_max_file_bytes,
            max_bytes=settings.batch_max_bytes,
            max_batches=settings.batch_max_batches,
        )
        origins = tuple(filter(None, (part.strip() for part in settings.batch_webhook_origins.split(","))))
        webhooks = Webhooks(origins, settings.batch_webhook_secret)
        signals = InteractiveSignals(service)
        self._store = BatchStore(settings.batch_db, limits)
        self.worker = BatchWorker(
            self._store,
            self._answer,
            service.keys.named,
            signals,
            service.metrics.registry,
            acted_on=signals.forget,
            policy=PacePolicy(most=settings.batch_max_running),
            webhooks=webhooks,
            max_lines=settings.batch_max_lines,
            max_line_bytes=settings.max_body_bytes,
        )
        wake, requests = self.worker.wake, service.metrics.requests
        self._door = BatchDoor(self._store, service.tenant, webhooks, wake, settings.body_timeout_s, requests)

    def routes(self) -> list[Route]:
        return self._door.routes()

    async def start(self) -> None:
        await self.worker.start()

    async def close(self) -> None:
        await self.worker.close()
        self._store.close()

    async def _answer(self, form: Form, asking: RequestContext, body: bytes) -> Mapping[str, Any]:
        return await complete(self._service, form, self._vocabulary, asking, body)
