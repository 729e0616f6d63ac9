"""Batches as one component over a running service: database, endpoints and worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.routing import Route

from gateway.api.openai_http import FormatterType, complete
from gateway.api.vocabulary import Vocabulary
from gateway.batch import webhook
from gateway.batch.aimd import PacePolicy
from gateway.batch.endpoints import BatchEndpoints
from gateway.batch.signals import InteractiveSignals
from gateway.batch.store import BatchLimits, BatchStore
from gateway.batch.worker import BatchWorker
from gateway.request_context import RequestContext
from gateway.service import Service


class Batches:
    """Start it after the service and close it before. Needs ``settings.batch_db``.

    Raises: InvalidArgument if a setting cannot be used.
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
        webhooks = webhook.configured(settings)
        signals = InteractiveSignals(service)
        self._store = BatchStore(settings.batch_db, limits)
        self.worker = BatchWorker(
            self._store,
            self._complete,
            service.authentication.named,
            signals,
            service.metrics.registry,
            on_cut=signals.forget,
            policy=PacePolicy(max_running=settings.batch_max_running),
            webhooks=webhooks,
            max_lines=settings.batch_max_lines,
            max_line_bytes=settings.max_body_bytes,
        )
        self._endpoints = BatchEndpoints(
            self._store,
            service.tenant,
            lambda: service.configuration.keyless,
            webhooks,
            self.worker.wake,
            settings.body_timeout_s,
            service.metrics.requests,
        )

    def routes(self) -> list[Route]:
        return self._endpoints.routes()

    async def start(self) -> None:
        await self.worker.start()

    async def close(self) -> None:
        await self.worker.close()
        self._store.close()

    async def _complete(self, formatter: FormatterType, context: RequestContext, body: bytes) -> Mapping[str, Any]:
        return await complete(self._service, formatter, self._vocabulary, context, body)
