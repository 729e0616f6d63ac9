"""Serve metrics and health over plain HTTP, on a separate address (docs/decisions/0017)."""

from __future__ import annotations

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.service import Service


def build(service: Service) -> Starlette:
    """Return the monitoring listener's application: metrics, and health with the address of every replica."""

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return Starlette(routes=[Route("/metrics", metrics), *health_routes(service, public=False)])


def health_routes(service: Service, *, public: bool) -> list[Route]:
    """Return the health endpoints. public: once there are API keys, without pools and replica addresses."""

    async def live(request: Request) -> Response:
        return Response("live\n", media_type="text/plain")

    async def ready(request: Request) -> Response:
        """Respond 200 while a pool that serves requests has a healthy replica, else 503."""
        is_ready = service.ready()
        fields: dict[str, object] = {"ready": is_ready, "draining": service.draining}
        if not public or service.configuration.keyless:
            fields["pools"] = {pool: _pool_state(service, pool) for pool in service.replicas.pools}
        headers = {} if is_ready else {"retry-after": "1"}
        return Response(orjson.dumps(fields), 200 if is_ready else 503, headers, media_type="application/json")

    async def deep(request: Request) -> Response:
        """Tell of the latest deep probes: 200 if one replica generated its token, else 503; 404 where they are off."""
        on = service.settings.deep_probes
        digests = {replica.url: replica.deep_digest for replica in service.replicas.all()}
        fields: dict[str, object] = {"deep_probes": on}
        if not public or service.configuration.keyless:
            fields["replicas"] = {url: {"ok": bool(digest), "sha256": digest} for url, digest in digests.items()}
        status = (200 if any(digests.values()) else 503) if on else 404
        return Response(orjson.dumps(fields), status, media_type="application/json")

    return [Route("/health/live", live), Route("/health/ready", ready), Route("/health/deep", deep)]


def _pool_state(service: Service, pool: str) -> dict[str, object]:
    """Return a pool's health. ``serving`` is false for a pool that gets only shadow copies or overflow."""
    healthy, replicas = len(service.replicas.ready_in(pool)), service.replicas.all()
    return {
        "ready": healthy > 0,
        "serving": pool in service.serving_pools(),
        "healthy": healthy,
        "replicas": sum(replica.pool == pool for replica in replicas),
    }
