"""Serve the operators' page /console and the events that it shows."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from contract.errors import Overloaded, TridentError
from gateway.api.strict_model import StrictModel
from gateway.service import Service

PERIOD_S = 1.0
WINDOW_S = 300.0  # of the figures of pools
MAX_READERS = 32
_FOLDER = Path(__file__).parents[1] / "console"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class ScalingDecision(StrictModel):
    """What a scaler decided for one pool. replicas: how many. at: seconds since 1970; the arrival by default."""

    pool: Annotated[str, Field(max_length=64)]
    replicas: Annotated[int, Field(ge=0, le=1_000_000)]
    reason: Annotated[str, Field(max_length=2000)]
    rule: Annotated[str, Field(max_length=64)] = ""
    at: Annotated[float, Field(ge=0, le=1e11)] | None = None


class ScalingReport(StrictModel):
    decisions: Annotated[list[ScalingDecision], Field(max_length=100)]


class Console:
    """What the page shows: the state of the service, and the last decisions of scalers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._decisions: deque[dict[str, Any]] = deque(maxlen=50)
        self._readers = 0

        if service.link is not None:
            service.link.topics["scaling"] = self.report

    def report(self, report: ScalingReport) -> None:
        """Keep the decisions that differ from the latest one of their pool."""
        for decision in report.decisions:
            entry = {"at": time.time(), **decision.model_dump(exclude_none=True)}
            latest = next((known for known in self._decisions if known["pool"] == decision.pool), {"replicas": None})
            if (latest["replicas"], latest.get("rule")) != (decision.replicas, decision.rule):
                self._decisions.appendleft(entry)

    def snapshot(self) -> dict[str, Any]:
        """Return the state: metrics by name without prefix, as [labels, value], and what no metric says."""
        service = self._service
        samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in service.state_metrics.collect():
            for sample in family.samples:
                name = sample.name.removeprefix("trident_gateway_")
                samples.setdefault(name, []).append((sample.labels, sample.value))
        window = service.metrics.outcomes.window
        return {
            "time": time.time(),
            "ready": service.ready(),
            "draining": service.draining,
            "problem": service.configuration.problem,
            "samples": samples,
            "pools": {pool: window(pool, WINDOW_S).summary() for pool in service.replicas.pools},
            "registered": service.replicas.registrations.entries(),
            "releases": service.releases.status(),
            "scaling": list(self._decisions),
        }

    async def events(self, request: Request) -> Response:
        """Return the state as server-sent events, one per PERIOD_S. Raises Overloaded."""
        if self._readers >= MAX_READERS:
            raise Overloaded(f"{MAX_READERS} pages are connected, and no more are allowed", 5.0)
        events = self._stream(request)
        return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-store"})

    async def _stream(self, request: Request) -> AsyncIterator[bytes]:
        self._readers += 1
        try:
            while not self._service.draining:
                yield b"data: " + orjson.dumps(self.snapshot()) + b"\n\n"
                await asyncio.sleep(PERIOD_S)
                (await self._service.authentication.principal(request.headers)).check_operator()
        except TridentError:  # the token or key was revoked or has expired, which the page is told when it asks again
            return
        finally:
            self._readers -= 1


def page_routes() -> list[Route]:
    """Return the page and its files, which hold no data."""

    def served(path: Path) -> Callable[[Request], Awaitable[Response]]:
        content = path.read_bytes()

        async def endpoint(request: Request) -> Response:
            return Response(content, media_type=_TYPES[path.suffix], headers=_HEADERS)

        return endpoint

    index, *files = sorted(_FOLDER.iterdir(), key=lambda path: path.suffix != ".html")
    return [Route("/console", served(index)), *(Route(f"/console/{path.name}", served(path)) for path in files)]
