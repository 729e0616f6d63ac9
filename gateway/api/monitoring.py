"""The monitoring listener: metrics and health over plain HTTP, on an address of its own (docs/decisions/0020)."""

from __future__ import annotations

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.service import Service


def build(service: Service) -> Starlette:
    """Builds the application of the monitoring listener: ``/metrics``, ``/health/live``, ``/health/ready`` and
    ``/health/deep`` with the address of every replica."""

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return Starlette(routes=[Route("/metrics", metrics), *health_routes(service, public=False)])


def health_routes(service: Service, *, public: bool) -> list[Route]:
    """Returns the health endpoints.

    public: callers may be anybody; once there are API keys, the addresses of the replicas are left out.
    """

    async def live(request: Request) -> Response:
        return Response("live\n", media_type="text/plain")

    async def ready(request: Request) -> Response:
        """200 while a pool that callers are sent to has a healthy replica; the pools one by one, but not to anybody."""
        is_ready = service.ready()
        fields: dict[str, object] = {"ready": is_ready, "draining": service.draining}
        if not public or service.configuration.keyless:
            fields["pools"] = {pool: _standing(service, pool) for pool in service.replicas.pools}
        headers = {} if is_ready else {"retry-after": "1"}
        return Response(orjson.dumps(fields), 200 if is_ready else 503, headers, media_type="application/json")

    async def deep(request: Request) -> Response:
        """What the latest deep probes fields; asking does not make another one. 200 if one replica made its token,
        404 where none is asked to."""
        on = service.settings.deep_probes
        digests = {replica.url: replica.deep_digest for replica in service.replicas.all()}
        fields: dict[str, object] = {"deep_probes": on}
        if not public or service.configuration.keyless:
            fields["replicas"] = {url: {"ok": bool(digest), "sha256": digest} for url, digest in digests.items()}
        status = (200 if any(digests.values()) else 503) if on else 404
        return Response(orjson.dumps(fields), status, media_type="application/json")

    return [Route("/health/live", live), Route("/health/ready", ready), Route("/health/deep", deep)]


def _standing(service: Service, pool: str) -> dict[str, object]:
    """A pool's health. serving: callers are sent there; not so for pools of copies and overflow alone."""
    healthy, replicas = len(service.replicas.ready_in(pool)), service.replicas.all()
    return {
        "ready": healthy > 0,
        "serving": pool in service.serving_pools(),
        "healthy": healthy,
        "replicas": sum(replica.pool == pool for replica in replicas),
    }
