"""Batches as one component over a running service: database, endpoints and worker."""

from __future__ import annotations

from functools import partial

from gateway.api.openai_http import complete
from gateway.api.vocabulary import Vocabulary
from gateway.batch import webhook
from gateway.batch.aimd import PacePolicy
from gateway.batch.endpoints import BatchEndpoints
from gateway.batch.signals import InteractiveSignals
from gateway.batch.store import BatchLimits, BatchStore
from gateway.batch.worker import BatchWorker
from gateway.service import Service


class Batches:
    """Start it after the service and close it before. Needs ``settings.batch_db``.

    Raises: InvalidArgument if a setting cannot be used.
    """

    def __init__(self, service: Service, vocabulary: Vocabulary) -> None:
        settings = service.settings
        assert settings.batch_db is not None, "batches are off"
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
            partial(complete, service, vocabulary),
            service.authentication.named,
            signals,
            service.metrics.registry,
            on_cut=signals.forget,
            policy=PacePolicy(max_running=settings.batch_max_running),
            webhooks=webhooks,
            max_lines=settings.batch_max_lines,
            max_line_bytes=settings.max_body_bytes,
        )
        self.routes = BatchEndpoints(service, self._store, webhooks, self.worker.wake).routes
        self.start = self.worker.start

    async def close(self) -> None:
        await self.worker.close()
        self._store.close()
